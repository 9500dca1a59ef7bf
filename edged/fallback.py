"""What is served when the version that should be cannot: the nearest one before it that can, at last the base.

Looked at before every start of the serve worker, the daemon's first one too, so that an adapter that is damaged, gone
or of another base model costs its own effect and never the answers. The stopgap is written into the live history, keeps
a pin, and makes way as soon as the version that people or updates wanted can be served again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from edged.records import Caller, Live
from edged.refusal import Refused
from edged.swap import HISTORY_ROWS, STOPGAP, wanted_versions

log = logging.getLogger(__name__)

DAEMON = Caller(name=STOPGAP, scopes=frozenset())


class Lineage(Protocol):
    """What is and was live (`edged.store.lineage`)."""

    def live(self) -> Live: ...

    async def history(self, limit: int) -> list[Live]: ...

    async def set_live(
        self, version: int, *, why: str, caller: Caller, if_live: int | None, now: float, pinned: bool | None = None
    ) -> Live: ...


class AdapterFiles(Protocol):
    """The published adapters on disk (`edged.learn.folders`). Blocking calls."""

    def complaint_about(self, version: int) -> str | None: ...

    def write_current(self, version: int) -> None: ...


class Fallback:
    """`condemn` what the engine would not serve; `servable` then finds what it should."""

    def __init__(self, lineage: Lineage, files: AdapterFiles) -> None:
        self._lineage = lineage
        self._files = files
        self._condemned: dict[int, tuple[str, float]] = {}  # version -> why, and since when was live what was then

    def condemn(self, version: int, why: str) -> None:
        """The engine cannot serve `version`, whatever its files look like. Holds until somebody makes it live again."""
        self._condemned[version] = (why, self._lineage.live().since)

    async def servable(self) -> Live:
        """What is live, after it was made one that can be served. Raises StoreError, OSError: it could not be."""
        while True:
            live = self._lineage.live()
            if live.caller != STOPGAP and live.since != self._condemned.get(live.version, ("", live.since))[1]:
                del self._condemned[live.version]
            version = await self._nearest_servable()
            if version == live.version:
                return live
            log.warning("v%d is served instead of v%d", version, live.version)
            try:
                await self._lineage.set_live(
                    version,
                    why="rolled_back" if version < live.version else "promoted",
                    caller=DAEMON,
                    if_live=live.version,
                    now=time.time(),
                    pinned=live.pinned,
                )
            except Refused as refused:
                if refused.code != "live_changed":
                    raise
            else:
                await asyncio.to_thread(self._files.write_current, version)

    async def _nearest_servable(self) -> int:
        for version in wanted_versions(await self._lineage.history(HISTORY_ROWS)):
            complaint = await self._complaint_about(version)
            if complaint is None:
                return version
            log.error("v%d cannot be served: %s", version, complaint)
        return 0

    async def _complaint_about(self, version: int) -> str | None:
        if version in self._condemned:
            return self._condemned[version][0]
        return await asyncio.to_thread(self._files.complaint_about, version)
