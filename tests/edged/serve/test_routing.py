"""New requests follow what is live, whatever stands between the two."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.failure import JobRefused, WorkerBusy, WorkerLost
from edged.serve import routing as module
from edged.serve import staging as staging_module
from edged.serve.routing import Routing
from edged.serve.staging import NOT_RESIDENT, Staging
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
        self.tell: Callable[[protocol.Message], bool]

    def received(self, message: protocol.Message) -> bool:
        return isinstance(message, protocol.Staged | protocol.Routed)

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
        done = staged("stage-1", adapter.version)
        assert self.tell(done)
        return done

    async def route(self, version: int) -> protocol.Routed:
        await asyncio.sleep(0)
        if version not in self.resident:
            raise JobRefused(NOT_RESIDENT, f"version {version} is nowhere")
        self.routed.append(version)
        done = protocol.Routed(job_id="route-1", version=version, swap_ms=1.5)
        assert self.tell(done)
        return done


def staged(job_id: str, version: int) -> protocol.Staged:
    return protocol.Staged(
        job_id=job_id, version=version, canary=(), live_canary=(), fluency=(), fluency_texts=(),
        load_ms=1.0, prove_ms=1.0, longest_gap_ms=0.0,
    )  # fmt: skip


class SlowWorker:
    """A serve worker that does what it was sent, and whose answers arrive, when the test says so."""

    def __init__(self) -> None:
        self.is_ready = True
        self.serves, self.spare = 0, 0
        self.sent: collections.deque[protocol.Message] = collections.deque()
        self.answers: collections.deque[protocol.Message] = collections.deque()

    def send(self, message: protocol.Message) -> None:
        self.sent.append(message)

    def work(self) -> None:
        """Do the oldest thing that it was sent."""
        match self.sent.popleft() if self.sent else None:
            case protocol.Stage(job_id=job_id, adapter=adapter):
                self.spare = adapter.version
                self.answers.append(staged(job_id, adapter.version))
            case protocol.Route(job_id=job_id, version=version) if version in (self.serves, self.spare):
                if version != self.serves:
                    self.serves, self.spare = version, self.serves
                self.answers.append(protocol.Routed(job_id=job_id, version=version, swap_ms=1.5))
            case protocol.Route(job_id=job_id, version=version):
                self.answers.append(protocol.RouteFailed(job_id=job_id, version=version, message="nowhere"))


class SlowDesk:
    """The real routing and staging before a slow worker."""

    def __init__(self) -> None:
        self.live = 0
        self.worker = SlowWorker()
        self.staging = Staging(self.worker)
        self.routing = Routing(self.staging, self._live, self._replace, lambda: None)
        self.routing.ready(0)

    def _live(self) -> protocol.AdapterRef:
        return protocol.AdapterRef(version=self.live, folder=f"/adapters/v{self.live}" if self.live else None)

    async def _replace(self, version: int, why: str) -> None:
        raise AssertionError(f"v{version}: {why}")

    def hear(self) -> None:
        if self.worker.answers:
            assert self.routing.received(self.worker.answers.popleft())

    async def settle(self) -> None:
        """Until nothing is under way any more."""
        for _ in range(20):
            await turn()
            self.worker.work()
            self.hear()


async def turn() -> None:
    """Everybody on the loop has gone on as far as he can."""
    for _ in range(8):
        await asyncio.sleep(0)


class Desk:
    """A routing and what is around it."""

    def __init__(self) -> None:
        self.live = 0
        self.contexts = LightContexts()
        self.replaced: list[tuple[int, str]] = []
        self.replace_failures: collections.deque[Exception] = collections.deque()
        self.seen: list[int | None] = []
        self.routing = Routing(self.contexts, self._live, self._replace, self._changed)
        self.contexts.tell = self.routing.received

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


def test_a_route_that_is_under_way_when_what_is_live_changes_back_is_not_forgotten() -> None:
    async def scenario() -> None:
        desk = SlowDesk()
        desk.worker.spare = 1
        desk.live = 1
        assert await desk.routing.go_live() is None  # the worker takes longer
        desk.worker.work()
        desk.live = 0
        assert await desk.routing.go_live() is None
        assert (desk.worker.serves, desk.worker.sent) == (1, collections.deque())
        await desk.settle()
        assert (desk.routing.serving, desk.worker.serves, desk.routing.spare) == (0, 0, 1)
        desk.routing.close()

    asyncio.run(scenario())


def test_a_staging_that_ends_after_its_asker_gave_up_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_module, "STAGE_WAIT_S", 0.01)

    async def scenario() -> None:
        desk = SlowDesk()
        adapter = protocol.AdapterRef(version=7, folder="/adapters/v7")
        with pytest.raises(WorkerBusy):
            await desk.routing.stage(adapter, fluency_prompts=(), fluency_tokens=0, seed=0)
        assert desk.routing.spare == 0
        desk.worker.work()
        desk.hear()
        assert (desk.routing.serving, desk.routing.spare) == (0, 7)
        desk.routing.close()

    asyncio.run(scenario())


def test_a_worker_that_dies_with_a_route_under_way_is_followed_anew() -> None:
    async def scenario() -> None:
        desk = SlowDesk()
        desk.live = desk.worker.spare = 1
        assert await desk.routing.go_live() is None
        desk.routing.down()
        desk.staging.down()
        desk.worker.sent.clear()
        desk.routing.ready(0)
        await desk.settle()
        assert (desk.routing.serving, desk.worker.serves) == (1, 1)
        desk.routing.close()

    asyncio.run(scenario())


steps = st.lists(st.sampled_from(["live 0", "live 1", "live 2", "work", "hear", "turn"]), max_size=24)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_in_any_order_of_changes_and_answers_what_is_said_to_serve_is_what_the_worker_serves(steps: list[str]) -> None:
    async def scenario() -> None:
        desk = SlowDesk()
        changes = []
        for step in steps:
            match step.split():
                case ["live", version]:
                    desk.live = int(version)
                    changes.append(asyncio.create_task(desk.routing.go_live()))
                case ["work"]:
                    desk.worker.work()
                case ["hear"]:
                    desk.hear()
                case _:
                    await turn()
            if not desk.worker.answers:
                assert (desk.routing.serving, desk.routing.spare) == (desk.worker.serves, desk.worker.spare)
        await desk.settle()
        assert (desk.routing.serving, desk.worker.serves) == (desk.live, desk.live)
        assert desk.routing.spare == desk.worker.spare
        desk.routing.close()
        for change in changes:
            change.cancel()

    asyncio.run(scenario())
