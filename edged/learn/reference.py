"""The version that the KL penalty pulls towards: as configured, until a live version has earned its place.

A thin shell around `edged.learn.anchor`: it counts ratings, writes the move down and tells who needs to know. An
update that is under way keeps the reference that its job names.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from edged.learn import anchor as anchors
from edged.learn.folders import Folders
from edged.learn.ports import LineageBook
from edged.learn.updating import LEARNER
from edged.records import Anchor, Caller

log = logging.getLogger(__name__)


class AnchorBook(Protocol):
    """The store's anchors (`edged.store.anchors`)."""

    def latest(self) -> Anchor | None: ...

    async def ratings_of(self, version: int, base_sha256: str) -> tuple[int, float]: ...

    async def move(self, anchor: Anchor, *, caller: Caller) -> None: ...


class Reference:
    """`wake` after a rating. `on_moved` is called when the reference has moved."""

    def __init__(
        self,
        book: AnchorBook,
        lineage: LineageBook,
        folders: Folders,
        *,
        rules: Callable[[], anchors.Rules],
        base_sha256: str,
        on_moved: Callable[[], None],
    ) -> None:
        self._book = book
        self._lineage = lineage
        self._folders = folders
        self._rules = rules
        self._base_sha256 = base_sha256
        self._on_moved = on_moved
        self._awake = asyncio.Event()

    def wake(self) -> None:
        self._awake.set()

    def anchor(self) -> Anchor | None:
        """What the reference moved to, if it is there now. No I/O."""
        return anchors.in_force(self._book.latest(), self._base_sha256, self._rules())

    def version(self) -> int:
        """The reference as it is now. No I/O."""
        anchor = self.anchor()
        return self._rules().configured if anchor is None else anchor.version

    async def run(self) -> None:
        """Until cancelled: after ratings, see whether the live version has earned it."""
        while True:
            self._awake.clear()
            await self.consider()
            await self._awake.wait()

    async def consider(self) -> None:
        """Move the reference to the live version if that has earned it."""
        rules, live, before = self._rules(), self._lineage.live().version, self.version()
        if rules.ratings == 0 or live == before:
            return
        candidate = await self._rated(live)
        if not anchors.moves(candidate, await self._rated(before), rules):
            return
        if live and live not in await asyncio.to_thread(self._folders.versions):
            return
        moved = Anchor(
            version=live,
            since=time.time(),
            ratings=candidate.ratings,
            mean_rating=candidate.mean,
            before=before,
            configured=rules.configured,
            base_sha256=self._base_sha256,
        )
        await self._book.move(moved, caller=LEARNER)
        log.info("the reference moves from v%d to v%d, rated %d times", before, live, candidate.ratings)
        self._on_moved()

    async def _rated(self, version: int) -> anchors.Rated:
        ratings, mean = await self._book.ratings_of(version, self._base_sha256)
        return anchors.Rated(version=version, ratings=ratings, mean=mean)
