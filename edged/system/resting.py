"""Workers that hold a card are ended while nobody needs them, and started again when somebody does.

Looks at each of them once a second, and at once when told that one is needed (`used`). Whoever needs a worker waits for
it as for one that died: requests wait in the queue, jobs are tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Protocol

from edged.system import rest

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
POLL_S = 0.05


class Worker(Protocol):
    """A worker as this module sees it."""

    @property
    def is_ready(self) -> bool: ...

    def want(self) -> None: ...

    def unwant(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sleeper:
    """A worker that may rest. keep_warm_s: as of `rest.step`, asked at each look."""

    name: str
    worker: Worker
    in_use: Callable[[], bool]
    keep_warm_s: Callable[[], float | None]


class Resting:
    """Lives on the event loop."""

    def __init__(self, on_change: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_change = on_change
        self._clock = clock
        self._sleepers: dict[str, Sleeper] = {}
        self._states: dict[str, rest.Rest] = {}

    def add(self, sleeper: Sleeper) -> None:
        """Let `sleeper` rest from now on."""
        self._sleepers[sleeper.name] = sleeper
        self._states[sleeper.name] = rest.Rest(used_at=self._clock())

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Put to sleep or wake whoever is due."""
        for sleeper in self._sleepers.values():
            self._step(sleeper, in_use=sleeper.in_use())

    def used(self, name: str) -> None:
        """Somebody needs the worker of this name now."""
        self._step(self._sleepers[name], in_use=True)

    async def awake(self, name: str, within_s: float) -> None:
        """Wake the worker, and wait until it is ready or the time is over."""
        self.used(name)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not self._sleepers[name].worker.is_ready:
                    await asyncio.sleep(POLL_S)

    def is_asleep(self, name: str) -> bool:
        """Whether the worker was put to sleep and will start when it is needed."""
        return self._states[name].asleep

    def _step(self, sleeper: Sleeper, *, in_use: bool) -> None:
        state, action = rest.step(
            self._states[sleeper.name], in_use=in_use, keep_warm_s=sleeper.keep_warm_s(), now=self._clock()
        )
        if action == "sleep" and not sleeper.worker.is_ready:  # it is starting, or has failed: others see to that
            return
        self._states[sleeper.name] = state
        if action == "sleep":
            log.info("the %s worker has had nothing to do and leaves its card", sleeper.name)
            sleeper.worker.unwant()
            self._on_change()
        elif action == "wake":
            log.info("the %s worker is needed again", sleeper.name)
            sleeper.worker.want()
            self._on_change()
