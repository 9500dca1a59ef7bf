"""What an operator can do: implements `edged.api.ports.Control` on the daemon's parts.

Thin: the decisions are the store's (compare-and-swap on what is live) and the learner's; `edged.swapping` changes what
is live.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol

from adapters import store as adapter_files
from adapters.peft import load_peft
from adapters.shape import BaseShape
from adapters.weights import AdapterWeights, compare
from edged import status
from edged.records import Adapter, AuditEntry, Caller, Live, Update
from edged.refusal import Refused

PAUSED_FILE = "PAUSED"  # in the state folder: the operator's pause outlives the daemon


class LineageDesk(Protocol):
    """The store's lineage as the operator's commands need it (`edged.store.lineage`)."""

    def live(self) -> Live: ...

    def folder(self, version: int) -> str: ...

    async def list(self) -> list[Adapter]: ...

    async def set_pinned(self, pinned: bool, *, version: int, if_live: int | None, caller: Caller) -> Live: ...

    async def set_kept(self, kept: bool, *, version: int, caller: Caller, if_live: int | None = None) -> Adapter: ...


class UpdateList(Protocol):
    """The store's updates, for reading."""

    async def list(self, limit: int) -> list[Update]: ...


class AuditLog(Protocol):
    """Who did what, when."""

    async def list(self, limit: int) -> list[AuditEntry]: ...

    async def add(self, action: str, detail: dict[str, Any], *, caller: Caller) -> AuditEntry: ...


class LearnerSwitches(Protocol):
    """The learner as the operator sees it (`edged.learn.learner`)."""

    async def ask(self) -> tuple[bool, str]: ...

    def pause(self, paused: bool) -> None: ...

    def wake(self) -> None: ...


class Swaps(Protocol):
    """What changes the live version (`edged.swapping`)."""

    async def promote(
        self, version: int, *, if_live: int | None, caller: Caller, pinned: bool | None = None
    ) -> Live: ...

    async def undo(self, *, if_live: int | None, caller: Caller) -> Live: ...


class Importer(Protocol):
    """What judges an adapter from outside (`edged.learn.importing`)."""

    async def bring(self, folder: Path, caller: Caller, *, if_live: int | None = None) -> Adapter: ...


class Operator:
    """`parts` gives the status as it is now; `announce` tells readers of events."""

    def __init__(
        self,
        *,
        state_folder: Path,
        base: BaseShape,
        model_name: str,
        lineage: LineageDesk,
        update_list: UpdateList,
        audit_log: AuditLog,
        learner: LearnerSwitches,
        swaps: Swaps,
        importer: Importer,
        parts: Callable[[], status.Parts],
        readiness: Callable[[], tuple[bool, str]],
        subscribe: Callable[[], AsyncIterator[tuple[str, dict[str, Any]]]],
        announce: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._state_folder = state_folder
        self._base = base
        self._model_name = model_name
        self._lineage = lineage
        self._updates = update_list
        self._audit = audit_log
        self._learner = learner
        self._swaps = swaps
        self._importer = importer
        self._parts = parts
        self._announce = announce
        self.ready = readiness
        self.events = subscribe

    def status(self) -> dict[str, Any]:
        return status.status(self._parts())

    def model_id(self) -> str:
        return self._model_name

    def metrics(self) -> str:
        return status.prometheus(self._parts())

    async def adapters(self) -> tuple[Live, list[Adapter]]:
        return self._lineage.live(), await self._lineage.list()

    async def promote(self, version: int, *, if_live: int | None, caller: Caller) -> Live:
        return await self._swaps.promote(version, if_live=if_live, caller=caller)

    async def rollback(self, *, if_live: int | None, caller: Caller) -> Live:
        return await self._swaps.undo(if_live=if_live, caller=caller)

    async def pin(self, version: int, pinned: bool, *, if_live: int | None, caller: Caller) -> Live:
        if pinned and self._lineage.live().version != version:
            await self._swaps.promote(version, if_live=if_live, caller=caller, pinned=True)
            if_live = version
        live = await self._lineage.set_pinned(pinned, version=version, if_live=if_live, caller=caller)
        self._learner.wake()
        self._announce("adapter", {"version": live.version, "why": live.why, "pinned": live.pinned})
        return live

    async def keep(self, version: int, kept: bool, *, caller: Caller, if_live: int | None = None) -> Adapter:
        return await self._lineage.set_kept(kept, version=version, caller=caller, if_live=if_live)

    async def import_adapter(self, folder: str, *, if_live: int | None = None, caller: Caller) -> Adapter:
        adapter = await self._importer.bring(Path(folder), caller, if_live=if_live)
        self._announce("adapter", {"version": adapter.version, "why": adapter.state, "reason": adapter.reason})
        self._learner.wake()
        return adapter

    def adapter_folder(self, version: int) -> Path:
        return self._state_folder / "adapters" / self._lineage.folder(version)

    async def diff(self, version: int, other: int) -> dict[str, Any]:
        folders = [None if n == 0 else self.adapter_folder(n) for n in (version, other)]

        def read() -> dict[str, Any]:
            read_ones = [folder and load_peft(folder, self._base) for folder in folders]
            there = next((weights for weights in read_ones if weights), None)
            if there is None:
                raise Refused(400, "nothing_to_compare", "both versions are the base: it has no adapter")
            found = compare(*(weights or without_effect(there) for weights in read_ones))
            return {
                "norm": found.norm,
                "other_norm": found.other_norm,
                "distance": found.distance,
                "cosine": found.cosine,
                "modules": found.distance_by_module,
            }

        return await asyncio.to_thread(read)

    async def updates(self, *, limit: int) -> list[Update]:
        return await self._updates.list(limit)

    async def train(self, *, caller: Caller) -> dict[str, Any]:
        accepted, reason = await self._learner.ask()
        if accepted:
            await self._audit.add("train", {}, caller=caller)
        return {"accepted": accepted, "reason": reason}

    async def pause(self, *, caller: Caller) -> None:
        await self._audit.add("pause", {}, caller=caller)  # first: what is not written down does not happen
        await asyncio.to_thread(adapter_files.write_file_atomically, self._state_folder / PAUSED_FILE, b"")
        self._learner.pause(True)

    async def resume(self, *, caller: Caller) -> None:
        def remove() -> None:
            (self._state_folder / PAUSED_FILE).unlink(missing_ok=True)
            adapter_files.fsync_folder(self._state_folder)

        await self._audit.add("resume", {}, caller=caller)
        await asyncio.to_thread(remove)
        self._learner.pause(False)

    async def audit(self, *, limit: int) -> list[AuditEntry]:
        return await self._audit.list(limit)


def without_effect(weights: AdapterWeights) -> AdapterWeights:
    """The base as an adapter of the shape of `weights`: B is 0."""
    matrices = {module: (a, b * 0) for module, (a, b) in weights.matrices.items()}
    return dataclasses.replace(weights, matrices=matrices)
