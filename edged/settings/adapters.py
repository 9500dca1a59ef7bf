"""What becomes of adapters that went live: `[watch]` and `[adapters]`."""

from __future__ import annotations

from edged.settings.keys import Section, key


class WatchSection(Section):
    false_alarm: float = key(
        0.01,
        "Share of versions as good as those before them that may be rolled back by bad luck; 0: none is rolled back.",
        ge=0,
        le=0.5,
        live=True,
    )
    min_ratings: int = key(
        8, "Ratings of a version before they can roll it back, however bad they are.", ge=1, le=1_000_000, live=True
    )
    ratings: int = key(
        128, "Ratings of a version without an alarm after which it is kept for good.", ge=1, le=1_000_000, live=True
    )


class AdaptersSection(Section):
    keep_versions: int = key(
        16, "Newest versions whose files stay, besides those that are in use or kept.", ge=0, le=1_000_000, live=True
    )
    min_free_bytes: int = key(
        2**29, "Free bytes of the disk below which all versions go that are not in use or kept.", ge=0, live=True
    )
