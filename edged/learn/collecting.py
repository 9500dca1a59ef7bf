"""Removing old adapter versions from the disk, now and then and after each change of what is live.

A thin shell around `edged.learn.collection`. First the version's row says that its files are gone, in a transaction
that looks once more whether it is in use; then the folder goes, by a rename. So after a kill in between no row promises
files that are not there, and the next start removes the folder (`finish`). Nothing is removed while a candidate is
being proved or another version made live.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from edged import swap
from edged.learn import collection
from edged.learn.ages import ages
from edged.learn.folders import Folders, bytes_under
from edged.records import Adapter, Caller, Live
from edged.refusal import Refused
from engine import protocol

log = logging.getLogger(__name__)

COLLECTOR = Caller(name="collector", scopes=frozenset())
SETTLE_S = 1.0  # after a change: there is no hurry, and others want to change what is live meanwhile
LOOK_EVERY_S = 600.0  # the disk also fills without any change of what is live


class Versions(Protocol):
    """The lineage as collection needs it (`edged.store.lineage`)."""

    def live(self) -> Live: ...

    async def history(self, limit: int) -> list[Live]: ...

    async def list(self) -> list[Adapter]: ...

    async def parents(self) -> dict[int, int | None]: ...

    async def collect(self, version: int, *, caller: Caller) -> None:
        """Raises Refused 409 `in_use`."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """on_disk, n_bytes: adapter versions of this base. collected: removed ones. why: what is short, or ""."""

    on_disk: int
    n_bytes: int
    collected: int
    free_bytes: int
    why: str


class Collector:
    """`wake` after a change of what is live and after each update. last_good: what a rollback leads to, or Refused."""

    def __init__(
        self,
        lineage: Versions,
        folders: Folders,
        *,
        rules: Callable[[], collection.Rules],
        staleness: Callable[[], int],
        references: Callable[[], Iterable[int]],
        last_good: Callable[[], Any],
        candidates: asyncio.Lock,
        announce: Callable[[str, dict[str, Any]], None],
        on_change: Callable[[], None],
        free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    ) -> None:
        self._lineage = lineage
        self._folders = folders
        self._rules = rules
        self._staleness = staleness
        self._references = references
        self._last_good = last_good
        self._candidates = candidates
        self._announce = announce
        self._on_change = on_change
        self._free_bytes = free_bytes
        self._awake = asyncio.Event()
        self.view: View | None = None

    def wake(self) -> None:
        self._awake.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._awake.clear()
            await self.consider()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._awake.wait()
                    await asyncio.sleep(SETTLE_S)

    async def consider(self) -> None:
        """Remove what is not needed any more."""
        async with self._candidates:
            rows = await self._lineage.list()
            files = await asyncio.to_thread(self._measure, rows)
            in_use = await self._in_use(rows)
            free_bytes = await asyncio.to_thread(self._free_bytes, self._folders.adapters)
            decision = collection.decide(files, in_use, self._rules(), free_bytes=free_bytes)
            removed = [version for version in decision.removed if await self._remove(version)]
            await self._show(files, removed, decision.is_short)

    async def _in_use(self, rows: list[Adapter]) -> collection.InUse:
        history = await self._lineage.history(swap.HISTORY_ROWS)
        last_good: frozenset[int] = frozenset()
        with contextlib.suppress(Refused):  # there is nothing before
            last_good = frozenset([await self._last_good()])
        return collection.InUse(
            wanted=frozenset([history[0].version, *swap.wanted_versions(history)[:1]]),
            last_good=last_good,
            kept=frozenset(row.version for row in rows if row.kept),
            references=frozenset(self._references()),
            in_updates=await asyncio.to_thread(self._in_updates),
            # One more than the cap: an update may be planned now that looked before the latest change of what is live.
            named=ages(await self._lineage.parents(), history[0].version).within(self._staleness() + 1),
        )

    def _in_updates(self) -> frozenset[int]:
        """Blocking: the versions that jobs in the spool name."""
        named: set[int] = set()
        for update_id in self._folders.jobs():
            with contextlib.suppress(protocol.WireError):  # a damaged job is given back by the learner
                job = self._folders.read_job(update_id)
                if job is not None:
                    answers = [rated.episode for rated in job.episodes] + list(job.corrections)
                    answers += [answer for pair in job.pairs for answer in (pair.chosen, pair.rejected)]
                    named |= {job.version, job.parent.version, job.reference.version}
                    named |= {answer.adapter.version for answer in answers}
        return frozenset(named)

    def _measure(self, rows: list[Adapter]) -> list[collection.Files]:
        """Blocking: the versions of this base on the disk."""
        paths = self._folders.versions()
        now = time.time()
        return [
            collection.Files(
                version=row.version, n_bytes=bytes_under(paths[row.version]), age_s=max(0.0, now - row.created_at)
            )
            for row in rows
            if row.state == "published" and row.folder is not None and row.version in paths
        ]

    async def _remove(self, version: int) -> bool:
        try:
            await self._lineage.collect(version, caller=COLLECTOR)
        except Refused as refused:
            log.info("v%d stays: %s", version, refused)
            return False
        await asyncio.to_thread(self._folders.withdraw, version)
        log.info("v%d is removed from the disk", version)
        self._announce("adapter", {"version": version, "why": "collected"})
        return True

    async def _show(self, files: list[collection.Files], removed: list[int], is_short: bool) -> None:
        left = [one for one in files if one.version not in removed]
        free_bytes = await asyncio.to_thread(self._free_bytes, self._folders.adapters)
        why = ""
        if is_short:
            why = (
                f"the disk has {free_bytes / 1e6:.0f} MB left, and all adapters but those in use are removed: "
                "make room, or lower adapters.min_free_bytes"
            )
        view = View(
            on_disk=len(left),
            n_bytes=sum(one.n_bytes for one in left),
            collected=sum(adapter.collected_at is not None for adapter in await self._lineage.list()),
            free_bytes=free_bytes,
            why=why,
        )
        if why and (self.view is None or not self.view.why):
            log.warning("%s", why)
        is_news = self.view is None or dataclasses.replace(self.view, free_bytes=free_bytes) != view
        self.view = view
        if is_news:
            self._on_change()


def finish(adapters: Iterable[Adapter], folders: Folders) -> None:
    """Remove the folders of versions whose rows say so already: a crash came between the two. Blocking."""
    for adapter in adapters:
        if adapter.collected_at is not None and adapter.version in folders.versions():
            folders.withdraw(adapter.version)
