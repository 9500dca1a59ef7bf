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
