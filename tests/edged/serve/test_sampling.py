"""Groups of practice answers: whole or not there, and given up at once when somebody needs the box."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from edged.failure import JobRefused, WorkerDown, WorkerLost
from edged.records import Episode, PracticePrompt
from edged.serve.sampling import Interrupted, Sampler
from edged.serve.translation import Serving
from engine import protocol

GUARD_S = 30.0
WHY = PracticePrompt(prompt_of=7, messages=[{"role": "user", "content": "Why?"}], prompt=None)


class LightEngine:
    """Keeps what was sent to the worker."""

    def __init__(self) -> None:
        self.is_ready = True
        self.sent: list[protocol.Message] = []

    def send(self, message: protocol.Message) -> None:
        assert self.is_ready
        self.sent.append(message)

    def asked(self) -> protocol.Generate:
        (message,) = [message for message in self.sent if isinstance(message, protocol.Generate)]
        return message

    def cancelled(self) -> list[str]:
        return [message.request_id for message in self.sent if isinstance(message, protocol.Cancel)]


def run(scenario: Callable[[LightEngine, Sampler], Awaitable[None]]) -> None:
    async def main() -> None:
        engine = LightEngine()
        async with asyncio.timeout(GUARD_S):
            serving = Serving(model="small", base_sha256="b" * 64, wait_s=1.0)
            await scenario(engine, Sampler(serving, engine, "practice"))

    asyncio.run(main())


async def begun(sampler: Sampler) -> asyncio.Task[list[Episode]]:
    task = asyncio.create_task(sampler.sample(WHY, n=2, max_tokens=9, seed=5))
    await asyncio.sleep(0)
    return task


def choice(request_id: str, number: int, finish_reason: protocol.FinishReason = "stop") -> protocol.ChoiceDone:
    return protocol.ChoiceDone(
        request_id=request_id,
        choice=number,
        finish_reason=finish_reason,
        completion_ids=(4, number),
        logprobs=(-0.5, -0.25),
        raw_logprobs=(-0.5, -0.25),
        text=f"answer {number}",
        seed=5,
    )


def done(request_id: str) -> protocol.RequestDone:
    return protocol.RequestDone(
        request_id=request_id,
        prompt_tokens=3,
        cached_tokens=0,
        completion_tokens=4,
        queue_s=0.0,
        prefill_s=0.0,
        decode_s=0.0,
    )


def test_a_group_is_sampled_with_full_support_and_becomes_episodes_of_the_box() -> None:
    async def scenario(engine: LightEngine, sampler: Sampler) -> None:
        task = await begun(sampler)
        asked = engine.asked()
        sampling = asked.sampling
        assert (asked.n, sampling.temperature, sampling.top_p, sampling.top_k) == (2, 1.0, 1.0, 0)
        assert (sampling.max_tokens, sampling.seed) == (9, 5)
        for message in (
            protocol.Begun(request_id=asked.request_id, version=3, prompt_ids=(1, 2, 3)),
            choice(asked.request_id, 1),
            protocol.Chunk(request_id=asked.request_id, choice=0, text="answer"),
            choice(asked.request_id, 0),
            done(asked.request_id),
        ):
            assert sampler.received(message)
        episodes = await task
        assert [(e.choice, e.text, e.origin, e.user, e.caller) for e in episodes] == [
            (0, "answer 0", "practice", None, "practice"),
            (1, "answer 1", "practice", None, "practice"),
        ]
        assert {(e.version, e.prompt_ids, e.completion_id) for e in episodes} == {(3, (1, 2, 3), asked.request_id)}

    run(scenario)


def test_an_interruption_cancels_at_once_and_what_the_worker_says_afterwards_is_nobodys() -> None:
    async def scenario(engine: LightEngine, sampler: Sampler) -> None:
        task = await begun(sampler)
        request_id = engine.asked().request_id
        sampler.interrupt()
        assert engine.cancelled() == [request_id]
        with pytest.raises(Interrupted):
            await task
        for message in (choice(request_id, 0, "cancelled"), choice(request_id, 1, "cancelled"), done(request_id)):
            assert sampler.received(message)

    run(scenario)


def test_a_group_with_a_choice_that_was_cut_is_not_there() -> None:
    async def scenario(engine: LightEngine, sampler: Sampler) -> None:
        task = await begun(sampler)
        request_id = engine.asked().request_id
        for message in (choice(request_id, 0), choice(request_id, 1, "cancelled"), done(request_id)):
            sampler.received(message)
        with pytest.raises(Interrupted):
            await task

    run(scenario)


def test_a_prompt_that_the_engine_refuses_and_a_worker_that_dies_are_told_apart() -> None:
    async def scenario(engine: LightEngine, sampler: Sampler) -> None:
        task = await begun(sampler)
        request_id = engine.asked().request_id
        sampler.received(protocol.RequestFailed(request_id=request_id, code="context_length_exceeded", message="long"))
        with pytest.raises(JobRefused, match="long"):
            await task
        task = asyncio.create_task(sampler.sample(WHY, n=2, max_tokens=9, seed=5))
        await asyncio.sleep(0)
        sampler.down()
        with pytest.raises(WorkerLost, match="died"):
            await task
        engine.is_ready = False
        with pytest.raises(WorkerDown):
            await sampler.sample(WHY, n=2, max_tokens=9, seed=5)

    run(scenario)


def test_who_does_not_wait_any_more_leaves_nothing_running() -> None:
    async def scenario(engine: LightEngine, sampler: Sampler) -> None:
        task = await begun(sampler)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.cancelled() == [engine.asked().request_id]

    run(scenario)


def test_answers_of_users_are_left_to_others() -> None:
    async def scenario(engine: LightEngine, sampler: Sampler) -> None:
        assert not sampler.received(protocol.Begun(request_id="chatcmpl-1", version=3, prompt_ids=(1,)))
        assert not sampler.received(protocol.Routed(job_id="route-1", version=3, swap_ms=0.0))

    run(scenario)
