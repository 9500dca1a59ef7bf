"""Waiting for a worker that is started on demand: until it is ready, says that it cannot work, or time is up."""

from __future__ import annotations

import asyncio
from typing import Protocol

from engine import protocol


class Startable(Protocol):
    """A worker as far as starting it goes."""

    @property
    def is_ready(self) -> bool: ...

    def want(self) -> None: ...

    def unwant(self) -> None: ...


class Readiness:
    """Lives on the event loop; `ready`, `fault` and `down` are called by the worker's owner."""

    def __init__(self, worker: Startable) -> None:
        self._worker = worker
        self._ready = asyncio.Event()
        self._fault: protocol.Fault | None = None

    async def start(self, within_s: float) -> protocol.Fault | None:
        """None once the worker is ready, or what keeps it from working. Raises TimeoutError."""
        self._fault = None
        self._worker.want()
        if not self._worker.is_ready:  # set by a fault whose process is still on its way out
            self._ready.clear()
        async with asyncio.timeout(within_s):
            await self._ready.wait()
        return self._fault

    def ready(self) -> None:
        """A worker is ready."""
        self._ready.set()

    def fault(self, fault: protocol.Fault) -> None:
        """The worker said that it cannot do its role; it is not started again until somebody asks."""
        self._fault = fault
        self._worker.unwant()
        self._ready.set()

    def down(self) -> None:
        """The worker is gone."""
        self._ready.clear()
