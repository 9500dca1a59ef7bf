"""The client of the train worker: it starts the worker, and every call ends whatever becomes of the process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from edged.failure import JobRefused, WorkerDown, WorkerFault, WorkerLost
from edged.learn.trainer import Trainer
from engine import protocol

BASE = protocol.AdapterRef(version=0, folder=None)
FAULT = protocol.Fault(code="model_unreadable", message="the model file is truncated")
SCORE = protocol.EpisodeScore(episode_id=1, n_tokens=2, reference_logprob=-1.0, kl=0.0, engine_gap=None)
EPISODE = protocol.EpisodeTokens(
    episode_id=1, prompt_ids=(1,), completion_ids=(2,), logprobs=(-0.5,), temperature=1.0, adapter=BASE
)
RESULT = protocol.TrainResult(
    job_id="update-1", version=1, metrics={}, seconds={}, dropped={}, canary=(), parent_canary=()
)


class LightEngine:
    """Keeps what the client asks of the process."""

    def __init__(self) -> None:
        self.is_ready = False
        self.wanted = False
        self.sent: list[protocol.Message] = []

    def want(self) -> None:
        self.wanted = True

    def unwant(self) -> None:
        self.wanted = False

    def kill(self, why: str) -> None:
        raise AssertionError(why)

    def send(self, message: protocol.Message) -> None:
        self.sent.append(message)


class Bench:
    """A client on a light engine, played by the test."""

    def __init__(self, start_timeout_s: float = 30.0) -> None:
        self.engine = LightEngine()
        self.progress: list[protocol.Progress] = []
        self.trainer = Trainer(self.engine, start_timeout_s=start_timeout_s, on_progress=self.progress.append)

    def worker_ready(self) -> None:
        self.engine.is_ready = True
        self.trainer.ready()

    def worker_dies(self) -> None:
        self.engine.is_ready = False
        self.trainer.down()


async def begun(call: Awaitable[object]) -> asyncio.Future[object]:
    """The call as a task that has run up to its first wait."""
    task = asyncio.ensure_future(call)
    for _ in range(3):
        await asyncio.sleep(0)
    return task


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario()

    asyncio.run(main())


def test_starting_wants_the_worker_and_waits_until_it_is_ready() -> None:
    async def scenario() -> None:
        bench = Bench()
        start = await begun(bench.trainer.start())
        assert (bench.engine.wanted, start.done()) == (True, False)
        bench.worker_ready()
        await start

    run(scenario)


def test_warming_up_does_not_wait() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.trainer.warm_up()
        assert bench.engine.wanted

    run(scenario)


def test_a_worker_that_does_not_get_ready_is_lost() -> None:
    async def scenario() -> None:
        with pytest.raises(WorkerLost, match="not ready within 0.01 s"):
            await Bench(start_timeout_s=0.01).trainer.start()

    run(scenario)


def test_a_worker_that_cannot_do_its_role_is_a_fault_and_not_started_again() -> None:
    async def scenario() -> None:
        bench = Bench()
        start = await begun(bench.trainer.start())
        bench.trainer.fault(FAULT)
        with pytest.raises(WorkerFault, match="truncated") as caught:
            await start
        assert caught.value.code == "model_unreadable"
        assert not bench.engine.wanted

    run(scenario)


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_start_after_a_fault_waits_for_the_next_worker(is_gone: bool) -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.trainer.warm_up()
        bench.trainer.fault(FAULT)
        if is_gone:
            bench.worker_dies()
        start = await begun(bench.trainer.start())
        assert not start.done()
        bench.worker_dies()
        assert not start.done()
        bench.worker_ready()
        await start

    run(scenario)


def test_scores_come_back_to_who_asked() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.worker_ready()
        calls = [await begun(bench.trainer.score((EPISODE,), BASE)) for _ in range(2)]
        first, second = bench.engine.sent
        assert isinstance(first, protocol.Score)
        assert isinstance(second, protocol.Score)
        assert bench.trainer.received(protocol.Scored(job_id=second.job_id, scores=(SCORE,)))
        assert bench.trainer.received(protocol.Scored(job_id=first.job_id, scores=()))
        assert [await call for call in calls] == [(), (SCORE,)]

    run(scenario)


def test_a_job_is_told_by_its_folder_and_its_progress_is_passed_on() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.worker_ready()
        call = await begun(bench.trainer.train("update-1", Path("/spool/update-1")))
        assert bench.engine.sent == [protocol.Train(job_id="update-1", folder="/spool/update-1")]
        step = protocol.Progress(job_id="update-1", stage="epochs", done=1, total=4)
        assert bench.trainer.received(step)
        assert bench.trainer.received(protocol.Trained(job_id="update-1", result=RESULT))
        assert (await call, bench.progress) == (RESULT, [step])

    run(scenario)


def test_a_job_that_the_worker_will_not_do_is_refused_with_its_code() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.worker_ready()
        call = await begun(bench.trainer.train("update-1", Path("/spool/update-1")))
        bench.trainer.received(protocol.TrainFailed(job_id="update-1", code="not_finite", message="the loss is NaN"))
        with pytest.raises(JobRefused, match="the loss is NaN") as caught:
            await call
        assert caught.value.code == "not_finite"

    run(scenario)


def test_a_worker_that_dies_ends_every_call() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.worker_ready()
        calls = [
            await begun(bench.trainer.score((EPISODE,), BASE)),
            await begun(bench.trainer.train("update-1", Path("/spool/update-1"))),
        ]
        bench.worker_dies()
        for call in calls:
            with pytest.raises(WorkerLost, match="the train worker died"):
                await call

    run(scenario)


def test_a_worker_that_does_not_run_is_asked_nothing() -> None:
    async def scenario() -> None:
        bench = Bench()
        with pytest.raises(WorkerDown, match="not running"):
            await bench.trainer.score((EPISODE,), BASE)
        assert bench.engine.sent == []

    run(scenario)


def test_a_late_answer_to_a_call_that_was_given_up_is_forgotten() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.worker_ready()
        call = await begun(bench.trainer.train("update-1", Path("/spool/update-1")))
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert bench.trainer.received(protocol.Trained(job_id="update-1", result=RESULT))

    run(scenario)


def test_messages_of_other_roles_are_left_to_them() -> None:
    async def scenario() -> None:
        assert not Bench().trainer.received(protocol.Routed(job_id="route-1", version=1, swap_ms=0.0))

    run(scenario)
