"""New requests follow what is live, whatever stands between the two."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable

import pytest

from edged.failure import JobRefused, WorkerBusy, WorkerLost
from edged.serve import routing as module
from edged.serve.routing import Routing
from edged.serve.staging import NOT_RESIDENT
from engine import protocol

GUARD_S = 60.0
BUSY = WorkerBusy("the spare context is draining")


class LightContexts:
    """Two contexts: `resident` can be routed to. `failures`: what the next stagings raise."""

    def __init__(self) -> None:
        self.resident = {0}
        self.failures: collections.deque[Exception] = collections.deque()
        self.routed: list[int] = []
        self.is_draining = False

    async def stage(
        self, adapter: protocol.AdapterRef, *, fluency_prompts: tuple[str, ...], fluency_tokens: int, seed: int
    ) -> protocol.Staged:
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.popleft()
        if self.is_draining:
            await asyncio.sleep(0.001)
            raise BUSY
        self.resident.add(adapter.version)
        return protocol.Staged(
            job_id="stage-1", version=adapter.version, canary=(), live_canary=(), fluency=(), fluency_texts=(),
            load_ms=1.0, prove_ms=1.0, longest_gap_ms=0.0,
        )  # fmt: skip

    async def route(self, version: int) -> protocol.Routed:
        await asyncio.sleep(0)
        if version not in self.resident:
            raise JobRefused(NOT_RESIDENT, f"version {version} is nowhere")
        self.routed.append(version)
        return protocol.Routed(job_id="route-1", version=version, swap_ms=1.5)


class Desk:
    """A routing and what is around it."""

    def __init__(self) -> None:
        self.live = 0
        self.contexts = LightContexts()
        self.replaced: list[tuple[int, str]] = []
        self.replace_failures: collections.deque[Exception] = collections.deque()
        self.seen: list[int | None] = []
        self.routing = Routing(self.contexts, self._live, self._replace, self._changed)

    def _live(self) -> protocol.AdapterRef:
        return protocol.AdapterRef(version=self.live, folder=f"/adapters/v{self.live}" if self.live else None)

    async def _replace(self, version: int, why: str) -> None:
        if self.replace_failures:
            raise self.replace_failures.popleft()
        self.replaced.append((version, why))
        self.live = 0

    def _changed(self) -> None:
        self.seen.append(self.routing.serving)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(GUARD_S):
            while not condition():
                await asyncio.sleep(0.002)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GO_LIVE_WAIT_S", 0.05)
    monkeypatch.setattr(module, "RETRY_FIRST_S", 0.001)


def at_desk(scenario: Callable[[Desk], Awaitable[None]]) -> None:
    async def main() -> None:
        desk = Desk()
        try:
            await scenario(desk)
        finally:
            desk.routing.close()

    asyncio.run(main())


def test_a_version_that_is_nowhere_is_staged_and_routed_to() -> None:
    async def scenario(desk: Desk) -> None:
        desk.routing.ready(0)
        desk.live = 3
        assert await desk.routing.go_live() == 1.5
        assert (desk.routing.serving, desk.contexts.routed, desk.seen) == (3, [3], [3])
        assert await desk.routing.go_live() is None

    at_desk(scenario)


def test_what_takes_long_is_done_in_the_background_and_shown_until_then() -> None:
    async def scenario(desk: Desk) -> None:
        desk.routing.ready(0)
        desk.live, desk.contexts.is_draining = 3, True
        assert await desk.routing.go_live() is None
        assert desk.routing.serving == 0
        desk.contexts.is_draining = False
        await desk.until(lambda: desk.routing.serving == 3)
        assert desk.contexts.routed == [3]

    at_desk(scenario)


def test_who_changes_his_mind_meanwhile_is_never_served_what_he_left() -> None:
    async def scenario(desk: Desk) -> None:
        desk.contexts.resident.add(2)
        desk.routing.ready(0)
        desk.live, desk.contexts.is_draining = 3, True
        assert await desk.routing.go_live() is None
        desk.live = 2
        assert await desk.routing.go_live() == 1.5
        desk.contexts.is_draining = False
        await asyncio.sleep(0.02)
        assert desk.contexts.routed == [2]

    at_desk(scenario)


def test_a_worker_that_started_on_what_is_not_live_any_more_follows() -> None:
    async def scenario(desk: Desk) -> None:
        desk.live = 3
        assert await desk.routing.go_live() is None  # no worker runs
        desk.routing.ready(0)
        await desk.until(lambda: desk.routing.serving == 3)

    at_desk(scenario)


def test_a_worker_that_dies_ends_the_wait() -> None:
    async def scenario(desk: Desk) -> None:
        desk.routing.ready(0)
        desk.live = 3
        desk.contexts.failures.append(WorkerLost("the serve worker died"))
        assert await desk.routing.go_live() is None
        desk.routing.down()
        assert desk.routing.serving is None
        desk.routing.ready(3)
        assert desk.routing.serving == 3

    at_desk(scenario)


@pytest.mark.parametrize("code", ["adapter_unreadable", "adapter_mismatch", "not_finite"])
def test_a_live_version_that_the_engine_will_not_serve_is_replaced(code: str) -> None:
    async def scenario(desk: Desk) -> None:
        desk.routing.ready(0)
        desk.live = 3
        desk.contexts.failures.append(JobRefused(code, "half a file"))
        desk.replace_failures.append(OSError("the disk is full"))
        desk.contexts.failures.append(JobRefused(code, "half a file"))
        await desk.routing.go_live()
        assert (desk.replaced, desk.live, desk.routing.serving) == ([(3, "half a file")], 0, 0)

    at_desk(scenario)


def test_what_the_machine_is_to_blame_for_is_tried_again() -> None:
    async def scenario(desk: Desk) -> None:
        desk.routing.ready(0)
        desk.live = 3
        desk.contexts.failures.extend(JobRefused("engine_error", "decoding failed") for _ in range(3))
        assert await desk.routing.go_live() == 1.5
        assert (desk.replaced, desk.routing.serving) == ([], 3)

    at_desk(scenario)


def test_nothing_is_proved_beside_a_version_that_is_not_live() -> None:
    async def scenario(desk: Desk) -> None:
        adapter = protocol.AdapterRef(version=4, folder="/adapters/v4")
        desk.routing.ready(0)
        desk.live, desk.contexts.is_draining = 3, True
        await desk.routing.go_live()
        with pytest.raises(WorkerBusy, match="still run on v0"):
            await desk.routing.stage(adapter, fluency_prompts=(), fluency_tokens=0, seed=0)
        desk.contexts.is_draining = False
        await desk.until(lambda: desk.routing.serving == 3)
        assert (await desk.routing.stage(adapter, fluency_prompts=(), fluency_tokens=0, seed=0)).version == 4

    at_desk(scenario)
