"""The last good version stands by in the spare context, and nobody waits for it."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable

import pytest

from edged.failure import JobRefused, WorkerBusy, WorkerLost
from edged.refusal import Refused
from edged.serve.standby import Standby
from engine import protocol

GUARD_S = 60.0


class LightContexts:
    """What new requests run on, what else is held, and what was staged. `failures`: what the next stagings raise."""

    def __init__(self) -> None:
        self.serving: int | None = 2
        self.spare: int | None = 2
        self.staged: list[protocol.AdapterRef] = []
        self.failures: collections.deque[Exception] = collections.deque()
        self.takes_s = 0.0

    async def stage(
        self, adapter: protocol.AdapterRef, *, fluency_prompts: tuple[str, ...], fluency_tokens: int, seed: int
    ) -> protocol.Staged:
        assert fluency_tokens == 0
        self.staged.append(adapter)
        if self.failures:
            raise self.failures.popleft()
        await asyncio.sleep(self.takes_s)
        self.spare = adapter.version
        return protocol.Staged(
            job_id="stage-1", version=adapter.version, canary=(), live_canary=(), fluency=(), fluency_texts=(),
            load_ms=1.0, prove_ms=1.0, longest_gap_ms=0.0,
        )  # fmt: skip


class Desk:
    """A standby and what is around it; a rollback leads to version 1, unless `before` says otherwise."""

    def __init__(self) -> None:
        self.live = 2
        self.before: int | None = 1
        self.looks = 0
        self.contexts = LightContexts()
        self.candidates = asyncio.Lock()
        self.standby = Standby(
            self.contexts,
            live=lambda: self.live,
            last_good=self._last_good,
            adapter=lambda version: protocol.AdapterRef(version=version, folder=f"/v{version}" if version else None),
            candidates=self.candidates,
        )

    async def _last_good(self) -> int:
        self.looks += 1
        if self.before is None:
            raise Refused(409, "nothing_before", "no other version was live")
        return self.before

    def staged(self) -> list[int]:
        return [adapter.version for adapter in self.contexts.staged]


def at_desk(scenario: Callable[[Desk], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(GUARD_S):
            await scenario(Desk())

    asyncio.run(main())


def test_after_a_start_and_after_a_refused_candidate_the_last_good_version_is_put_back() -> None:
    async def scenario(desk: Desk) -> None:
        await desk.standby.consider()
        assert (desk.staged(), desk.contexts.spare) == ([1], 1)
        await desk.standby.consider()
        assert desk.staged() == [1]
        desk.contexts.spare = 3
        await desk.standby.consider()
        assert desk.staged() == [1, 1]

    at_desk(scenario)


def test_files_are_read_again_only_after_something_has_changed() -> None:
    async def scenario(desk: Desk) -> None:
        for _ in range(4):
            await desk.standby.consider()
        assert (desk.staged(), desk.looks) == ([1], 2)
        desk.standby.wake()
        await desk.standby.consider()
        desk.contexts.spare = 3
        await desk.standby.consider()
        assert (desk.staged(), desk.looks) == ([1, 1], 4)

    at_desk(scenario)


@pytest.mark.parametrize("reason", ["behind", "down", "nothing_before", "same"])
def test_nothing_is_staged_where_there_is_nothing_to_stand_by_for(reason: str) -> None:
    async def scenario(desk: Desk) -> None:
        match reason:
            case "behind":
                desk.live = 3
            case "down":
                desk.contexts.serving = None
            case "nothing_before":
                desk.before = None
            case "same":
                desk.before = 2
        await desk.standby.consider()
        assert desk.staged() == []

    at_desk(scenario)


@pytest.mark.parametrize(
    "failure", [WorkerBusy("draining"), WorkerLost("killed"), JobRefused("adapter_unreadable", "damaged")]
)
def test_what_cannot_stand_by_is_tried_again_at_the_next_look(failure: Exception) -> None:
    async def scenario(desk: Desk) -> None:
        desk.contexts.failures.append(failure)
        await desk.standby.consider()
        assert desk.contexts.spare == 2
        await desk.standby.consider()
        assert desk.contexts.spare == 1

    at_desk(scenario)


def test_it_waits_for_a_candidate_and_nobody_waits_for_it() -> None:
    async def scenario(desk: Desk) -> None:
        running = asyncio.create_task(desk.standby.run())
        async with desk.candidates:
            desk.standby.wake()
            await asyncio.sleep(0.02)
            assert desk.staged() == []
            desk.contexts.takes_s = GUARD_S
        while not desk.staged():
            await asyncio.sleep(0.001)
        async with desk.candidates:  # long before the staging would be over
            running.cancel()

    at_desk(scenario)
