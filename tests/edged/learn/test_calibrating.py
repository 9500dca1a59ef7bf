"""The calibration: measured once for every base, as soon as both workers run, and waited for by the first update."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from edged.failure import WorkerBusy, WorkerDown, WorkerLost
from edged.learn import calibrating
from edged.learn.calibrating import ATTEMPTS, Calibration
from edged.learn.probes import CALIBRATION_PROMPTS
from engine import protocol

InBox = Callable[[Callable[[Any], Awaitable[None]]], None]
NOISE = protocol.EngineNoise(bias=0.01, spread=0.1, tokens=12.0, temperature=0.7)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrating, "PAUSE_S", 0.0)


class Workers:
    """Both workers: the serve worker answers with `n_tokens` tokens each, the trainer finds them `bias` off."""

    def __init__(self, *, n_tokens: int = 8, bias: float = 0.05) -> None:
        self.n_tokens = n_tokens
        self.bias = bias
        self.failures: list[Exception] = []
        self.staged = 0
        self.scored: tuple[protocol.EpisodeTokens, ...] = ()
        self.is_ready = True

    async def stage(
        self, adapter: protocol.AdapterRef, *, fluency_prompts: tuple[str, ...], fluency_tokens: int, seed: int
    ) -> protocol.Staged:
        self.staged += 1
        if self.failures:
            raise self.failures.pop(0)
        ids = tuple(range(self.n_tokens))
        return protocol.Staged(
            job_id="stage",
            version=adapter.version,
            canary=(),
            live_canary=(),
            fluency=tuple(protocol.ProbeTokens(prompt_ids=(1,), completion_ids=ids) for _ in fluency_prompts),
            fluency_texts=("",) * len(fluency_prompts),
            load_ms=0.0,
            prove_ms=0.0,
            longest_gap_ms=0.0,
            fluency_logprobs=tuple((-0.5,) * self.n_tokens for _ in fluency_prompts),
        )

    async def score(
        self, episodes: tuple[protocol.EpisodeTokens, ...], reference: protocol.AdapterRef
    ) -> tuple[protocol.EpisodeScore, ...]:
        self.scored = episodes
        return tuple(
            protocol.EpisodeScore(
                episode_id=one.episode_id,
                n_tokens=len(one.completion_ids),
                reference_logprob=None,
                kl=0.0,
                engine_gap=abs(self.bias),
                engine_bias=self.bias,
            )
            for one in episodes
        )


def calibration_of(box: Any, workers: Any, kind: str = "cpu float32") -> Calibration:
    return Calibration(
        workers,
        workers,
        box.store.lineage,
        candidates=box.candidates,
        base_sha256=box.BASE_SHA256,
        trainer_kind=lambda: kind,
        is_serving=lambda: True,
    )


@contextlib.asynccontextmanager
async def running(calibration: Calibration) -> AsyncIterator[None]:
    task = asyncio.create_task(calibration.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def calibrated(box: Any, workers: Any, kind: str = "cpu float32") -> Calibration:
    calibration = calibration_of(box, workers, kind)
    async with running(calibration), asyncio.timeout(box.GUARD_S):
        await calibration.over()
    return calibration


def test_the_answers_of_the_base_are_scored_as_they_were_sampled(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        workers = Workers()
        calibration = await calibrated(box, workers)
        assert calibration.noise is not None
        assert calibration.noise.bias == pytest.approx(0.05)
        assert len(workers.scored) == len(CALIBRATION_PROMPTS)
        assert {one.logprobs for one in workers.scored} == {(-0.5,) * 8}
        assert {(one.temperature, one.adapter.version) for one in workers.scored} == {(0.7, 0)}
        assert len({one.episode_id for one in workers.scored}) == len(workers.scored)
        assert all(one.episode_id < 0 for one in workers.scored)

    in_box(scenario)


def test_it_is_measured_once_for_a_base_and_a_kind_of_trainer(in_box: InBox) -> None:
    async def first(box: Any) -> None:
        await calibrated(box, Workers(bias=0.05))

    async def again(box: Any) -> None:
        workers = Workers(bias=0.2)
        calibration = await calibrated(box, workers)
        assert (workers.staged, calibration.noise and calibration.noise.bias) == (0, pytest.approx(0.05))
        other = await calibrated(box, workers, kind="cuda bfloat16")
        assert (workers.staged, other.noise and other.noise.bias) == (1, pytest.approx(0.2))

    in_box(first)
    in_box(again)


def test_workers_that_are_not_there_are_waited_for(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        workers = Workers()
        workers.is_ready = False
        workers.failures = [WorkerBusy("draining"), WorkerDown("not there")] * ATTEMPTS
        calibration = calibration_of(box, workers)
        async with running(calibration), asyncio.timeout(box.GUARD_S):
            await asyncio.sleep(0.01)
            assert (calibration.is_pending, workers.staged) == (True, 0)
            workers.is_ready = True
            calibration.wake()
            await calibration.over()
        assert calibration.noise is not None

    in_box(scenario)


def test_it_is_given_up_after_some_failures_and_says_why(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        workers = Workers()
        workers.failures = [WorkerLost("it died")] * ATTEMPTS
        calibration = await calibrated(box, workers)
        assert (calibration.noise, calibration.is_pending, calibration.why) == (None, False, "it died")

    in_box(scenario)


def test_a_base_that_answers_with_next_to_nothing_is_not_asked_again(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        for n_tokens in (0, 1):
            workers = Workers(n_tokens=n_tokens)
            calibration = await calibrated(box, workers)
            assert (calibration.noise, workers.staged) == (None, 1)
            assert "too few tokens" in calibration.why

    in_box(scenario)


def test_the_first_update_waits_for_it_and_its_job_holds_it(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.calibration.is_pending = True
        await box.rate(*[1.0, -1.0] * 8)
        task = asyncio.create_task(box.learner.run())
        await box.until(lambda: "measuring" in box.learner.why and box.trainer.is_ready)
        assert (box.learner.state, box.finished) == ("collecting", [])
        box.calibration.noise, box.calibration.is_pending = NOISE, False
        jobs: list[protocol.TrainJob] = []
        write = box.folders.write_job
        box.folders.write_job = lambda update_id, job: (jobs.append(job), write(update_id, job))
        box.calibration.is_over.set()
        await box.until(lambda: bool(box.finished))
        task.cancel()
        assert [job.noise for job in jobs] == [NOISE]

    in_box(scenario)


def test_an_update_does_not_hang_on_it_nor_on_a_trainer_that_cannot_run(
    in_box: InBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(box: Any) -> None:
        box.calibration.is_pending = True
        monkeypatch.setattr("edged.learn.learner.CALIBRATION_WAIT_S", 0.01)
        await box.rate(*[1.0, -1.0] * 8)
        task = asyncio.create_task(box.learner.run())
        await box.until(lambda: bool(box.finished))
        assert dataclasses.asdict(box.finished[0])["verdict"] == "published"
        box.worker.fault = protocol.Fault(code="device_missing", message="no GPU")
        task.cancel()

    async def without_a_trainer(box: Any) -> None:
        box.calibration.is_pending = True
        box.worker.fault = protocol.Fault(code="device_missing", message="no GPU")
        await box.rate(*[1.0, -1.0] * 8)
        task = asyncio.create_task(box.learner.run())
        await box.until(lambda: bool(box.finished))
        assert "no GPU" in str(box.finished[0].reason)
        task.cancel()

    in_box(scenario)
    in_box(without_a_trainer)
