"""Changing what is live: written first, routed then.

For operators (`promote`, `undo`) and for whatever judges the live version while it serves (`roll_back`): the watch over
ratings, the deep gate. Each change is a compare-and-swap in the store, made while no candidate is being proved. What
may be gone back to is decided by `edged.swap`; where routing takes long it goes on by itself (`edged.serve.routing`).
A kill at any point leaves the old version live or the new one: CURRENT and the routing follow at the next start.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from edged import swap
from edged.records import Caller, Live
from edged.refusal import Refused

log = logging.getLogger(__name__)


class Lineage(Protocol):
    """What is and was live (`edged.store.lineage`)."""

    def live(self) -> Live: ...

    def expect(self, if_live: int | None) -> Live: ...

    def folder(self, version: int) -> str: ...

    async def history(self, limit: int) -> list[Live]: ...

    async def set_live(
        self,
        version: int,
        *,
        why: str,
        caller: Caller,
        if_live: int | None,
        now: float,
        pinned: bool | None = None,
        reason: str | None = None,
    ) -> Live: ...


class Router(Protocol):
    """The serve worker's side of a change of what is live (`edged.serve.routing`)."""

    async def go_live(self) -> float | None: ...


class Swaps:
    """`complaint_about` reads the files of a published version and tells why it cannot be served; `write_current`
    names a version to people (blocking; never fails); `announce` tells readers of events; `on_change` is called when
    another version is live. `candidates` is held while a candidate is being proved."""

    def __init__(
        self,
        *,
        state_folder: Path,
        lineage: Lineage,
        complaint_about: Callable[[int], str | None],
        write_current: Callable[[int], None],
        router: Router,
        candidates: asyncio.Lock,
        announce: Callable[[str, dict[str, Any]], None],
        on_change: Callable[[], None],
    ) -> None:
        self._state_folder = state_folder
        self._lineage = lineage
        self._complaint_about = complaint_about
        self._write_current = write_current
        self._router = router
        self._candidates = candidates
        self._announce = announce
        self._on_change = on_change

    async def promote(self, version: int, *, if_live: int | None, caller: Caller, pinned: bool | None = None) -> Live:
        """Make `version` live because `caller` wishes it. pinned: as of `Lineage.set_live`.

        Raises Refused: 404 `adapter_not_found`, 409 `live_changed`, `pinned`, `no_files`, `not_servable` and what else
        the store says.
        """
        async with self._candidates:
            await asyncio.to_thread(self._require_files, version)
            return await self._make_live(version, why="promoted", if_live=if_live, caller=caller, pinned=pinned)

    async def undo(self, *, if_live: int | None, caller: Caller) -> Live:
        """Back to the version before the live one, because `caller` wishes it. Raises Refused as `promote` does, and
        409 `nothing_before`."""
        async with self._candidates:
            reason = f"rolled back by {caller.name}"
            return await self._make_live(
                await self.last_good(), why="rolled_back", if_live=if_live, caller=caller, reason=reason
            )

    async def roll_back(self, version: int, reason: str, *, caller: Caller) -> Live:
        """Back from the live `version`, because `reason`, a sentence for people, speaks against it.

        It is not gone back to until somebody promotes it. What it made stays data to learn from, and the next update
        starts from what is live then. Waits while a candidate is being proved.

        Args:
            version: the judged one; that it is live still is looked at in the same transaction.
            caller: one of `edged.swap.JUDGES`; the audit shows it.
        Raises:
            Refused: 409 `live_changed` if another version is live by now, 409 `pinned` if an operator has pinned it,
                409 `nothing_before`, 409 `not_servable`. Nothing has changed then, but for the last, where the engine
                would not serve what was gone back to and an older version is live.
        """
        if caller.name not in swap.JUDGES:
            raise ValueError(f"{caller.name} does not roll back by itself; an operator's rollback is `undo`")
        async with self._candidates:
            live = self._lineage.expect(version)
            if live.pinned:
                raise Refused(409, "pinned", f"version {version} is pinned, and stays live although {reason}")
            log.warning("v%d is rolled back: %s", version, reason)
            return await self._make_live(
                await self.last_good(), why="rolled_back", if_live=version, caller=caller, reason=reason
            )

    async def last_good(self) -> int:
        """The version that a rollback leads to: live before the one that is, and whole.

        Raises Refused 409 `nothing_before`.
        """
        history = await self._lineage.history(swap.HISTORY_ROWS)
        for version in swap.versions_before(history):
            if await asyncio.to_thread(self._complaint_about, version) is None:
                return version
        raise Refused(409, "nothing_before", f"no other version was live before version {history[0].version}")

    def _require_files(self, version: int) -> None:
        """Refuse a published version that cannot be served before anything changes.

        Of a version that was never published the store says why it cannot be live.
        """
        try:
            folder = None if version == 0 else self._state_folder / "adapters" / self._lineage.folder(version)
        except Refused as refused:
            if refused.code == "no_files":
                raise
            return
        if folder is None:
            return
        if not folder.is_dir():
            raise Refused(409, "no_files", f"the files of version {version} are not on this box any more")
        complaint = self._complaint_about(version)
        if complaint is not None:
            raise Refused(409, "not_servable", f"version {version} cannot be served: {complaint}")

    async def _make_live(
        self,
        version: int,
        *,
        why: str,
        if_live: int | None,
        caller: Caller,
        pinned: bool | None = None,
        reason: str | None = None,
    ) -> Live:
        before = self._lineage.live().version
        live = await self._lineage.set_live(
            version, why=why, caller=caller, if_live=if_live, now=time.time(), pinned=pinned, reason=reason
        )
        writing = asyncio.to_thread(self._write_current, version)
        event: dict[str, Any] = {"version": version, "why": live.why, "pinned": live.pinned, "from": before}
        if reason is not None:
            event["reason"] = reason
        _, swap_ms = await asyncio.gather(writing, self._router.go_live())  # CURRENT is for people: no request waits
        if swap_ms is not None:
            event["swap_ms"] = swap_ms
        self._announce("adapter", event)
        self._on_change()
        now = self._lineage.live()
        if now.version != version:
            raise Refused(
                409,
                "not_servable",
                f"the engine would not serve version {version} (the log says why); version {now.version} is live",
            )
        return live
