"""The last good adapter in the spare context, so that going back to it is a change of pointer.

While a version serves, the other context holds what a rollback leads to: it was left there by the swap, or is put there
here once something else has been in its place, such as a candidate that was refused, or after a start. A rollback
needs none of this; it only takes longer where the adapter has to be loaded. Nothing is staged here while a candidate
is being proved, and nobody waits for what is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from edged.failure import JobRefused, WorkerBusy, WorkerLost
from edged.refusal import Refused
from engine import protocol

log = logging.getLogger(__name__)

LOOK_EVERY_S = 30.0  # what was staged and not routed to, an import that was refused, is not told


class Contexts(Protocol):
    """The worker's two contexts, and what is known of them (`edged.serve.routing`)."""

    @property
    def serving(self) -> int | None: ...

    @property
    def spare(self) -> int | None: ...

    async def stage(
        self, adapter: protocol.AdapterRef, *, fluency_prompts: tuple[str, ...], fluency_tokens: int, seed: int
    ) -> protocol.Staged: ...


class Standby:
    """`wake` when another version is live or served, or a candidate has got its verdict."""

    def __init__(
        self,
        contexts: Contexts,
        *,
        live: Callable[[], int],
        last_good: Callable[[], Awaitable[int]],
        adapter: Callable[[int], protocol.AdapterRef],
        candidates: asyncio.Lock,
    ) -> None:
        self._contexts = contexts
        self._live = live
        self._last_good = last_good
        self._adapter = adapter
        self._candidates = candidates
        self._awake = asyncio.Event()
        self._settled: tuple[int | None, int | None] | None = None  # what both contexts held when nothing was missing

    def wake(self) -> None:
        self._settled = None
        self._awake.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._awake.clear()
            await self.consider()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._awake.wait()

    async def consider(self) -> None:
        """Stage the last good version, if it is not there and nothing more important goes on."""
        async with self._candidates:  # what is staged after this is staged behind it, and not displaced by it
            version = await self._missing()
            if version is None:
                return
            staging = asyncio.create_task(self._stage(version))
            await asyncio.sleep(0)  # it is asked for
        await staging

    async def _missing(self) -> int | None:
        """The version to put into the spare context; None: there is none, or it is there."""
        held = (self._contexts.serving, self._contexts.spare)
        if held[0] != self._live() or held == self._settled:
            return None
        try:
            version = await self._last_good()  # reads all of its files: not at every look
        except Refused:  # there is nothing to go back to
            version = self._live()
        if version not in held:
            return version
        self._settled = held
        return None

    async def _stage(self, version: int) -> None:
        try:
            await self._contexts.stage(self._adapter(version), fluency_prompts=(), fluency_tokens=0, seed=0)
            log.info("v%d stands by", version)
        except (WorkerBusy, WorkerLost) as waits:
            log.info("v%d does not stand by yet: %s", version, waits)
        except (JobRefused, Refused) as refused:
            log.warning("v%d, which a rollback leads to, cannot stand by: %s", version, refused)
