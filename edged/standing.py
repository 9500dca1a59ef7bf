"""Where the live version stands, and what adapters take of the disk, as a status shows it. Plain data."""

from __future__ import annotations

import dataclasses
from typing import Any

from edged.records import DeepVerdict


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RatedView:
    """What people said of the answers of some versions."""

    versions: list[int]
    ratings: int
    mean: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WatchView:
    """What becomes of the live version (`edged.swap`, `edged.learn.watch`). is_on: its ratings may roll it back.

    evidence: against it, which rolls it back at alarm_at; None where nothing is compared. rollbacks: by the box itself.
    withheld: those that did not happen because the version was pinned, since the start.
    """

    stage: str
    is_on: bool
    why: str
    rollbacks: int
    withheld: int
    evidence: float | None = None
    alarm_at: float | None = None
    rated: RatedView | None = None
    reference: RatedView | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeepView:
    """Where the deep gate stands, and what it found of the version that is live; None: nothing yet."""

    state: str
    why: str
    verdict: DeepVerdict | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FilesView:
    """Adapter versions on the disk, as of the last look. collected: removed ones. why: what is short, or ""."""

    on_disk: int
    n_bytes: int
    collected: int
    free_bytes: int
    why: str


def watch_object(view: WatchView) -> dict[str, Any]:
    """The live version's stage, and the watch over it."""
    watched = dataclasses.asdict(view)
    return {"stage": watched.pop("stage"), "watch": watched}


def files_object(view: FilesView | None) -> dict[str, Any] | None:
    """What adapters take of the disk; null before the first look."""
    if view is None:
        return None
    return {
        "on_disk": view.on_disk,
        "bytes": view.n_bytes,
        "collected": view.collected,
        "disk_free_bytes": view.free_bytes,
        "why": view.why,
    }
