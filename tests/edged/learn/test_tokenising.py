"""What people wrote gets its tokens from the engine, or is dropped with its reason; on a real store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from edged.failure import JobRefused, WorkerDown
from edged.learn.tokenising import Tokenising
from edged.records import Preference, WrittenCounts
from engine import protocol

InBox = Callable[[Callable[[Any], Awaitable[None]]], None]


class LightTokeniser:
    """A token a byte. `failure`: what the next calls raise."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.calls = 0

    async def tokenise(
        self, messages: Sequence[Mapping[str, Any]] | None, answer: str, *, prompt_tokens: int = 0
    ) -> protocol.Tokenised:
        self.calls += 1
        if self.failure is not None:
            raise self.failure
        prompt = "" if messages is None else str(messages[0]["content"])
        return protocol.Tokenised(
            request_id="", prompt_ids=tuple(prompt.encode()), completion_ids=tuple(answer.encode())
        )


async def prefer(box: Any, chosen: str = "Yes.") -> None:
    pair = Preference(
        id="",
        messages=[{"role": "user", "content": "Why?"}],
        chosen=chosen,
        rejected="No.",
        user=None,
        caller="uid:1000",
        created_at=1.0,
    )
    await box.store.feedback.prefer(pair)


@contextlib.asynccontextmanager
async def running(box: Any, tokeniser: LightTokeniser) -> Any:
    told = asyncio.Event()
    part = Tokenising(box.store.written, tokeniser, base_sha256=box.BASE_SHA256, on_tokenised=told.set)
    task = asyncio.create_task(part.run())
    try:
        yield part, told
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def test_all_that_waits_gets_tokens_and_the_learner_hears_of_it(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        for _ in range(40):
            await prefer(box)
        async with running(box, LightTokeniser()) as (_, told):
            await told.wait()
            while await box.store.written.untokenised(1, box.BASE_SHA256):
                await asyncio.sleep(0.002)
        (tokens,) = await box.store.written.tokens([40])
        assert tuple(map(bytes, (tokens.prompt_ids, tokens.chosen_ids, tokens.rejected_ids))) == (
            b"Why?",
            b"Yes.",
            b"No.",
        )

    in_box(scenario)


def test_it_waits_while_the_worker_is_away(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        await prefer(box)
        tokeniser = LightTokeniser()
        tokeniser.failure = WorkerDown("away")
        async with running(box, tokeniser) as (part, told):
            await box.until(lambda: tokeniser.calls == 1)
            tokeniser.failure = None
            part.wake()
            await told.wait()
        assert len(await box.store.written.unused_written(9, box.BASE_SHA256)) == 1

    in_box(scenario)


def test_what_the_model_has_no_tokens_for_is_dropped_and_the_next_is_not(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        await prefer(box)
        tokeniser = LightTokeniser()
        tokeniser.failure = JobRefused("context_length_exceeded", "too long")
        async with running(box, tokeniser) as (part, told):
            await told.wait()
            tokeniser.failure = None
            told.clear()
            await prefer(box)
            part.wake()
            await told.wait()
        counts = await box.store.written.counts()
        assert counts == WrittenCounts(pairs_waiting=1, dropped={"context_length_exceeded": 1})

    in_box(scenario)


def test_an_empty_correction_teaches_nothing(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        await prefer(box, chosen="")
        async with running(box, LightTokeniser()) as (_, told):
            await told.wait()
        assert (await box.store.written.counts()).dropped == {"empty": 1}

    in_box(scenario)


def test_a_fault_of_the_engine_drops_nothing(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        await prefer(box)
        tokeniser = LightTokeniser()
        tokeniser.failure = JobRefused("engine_error", "no memory")
        async with running(box, tokeniser):
            await box.until(lambda: tokeniser.calls == 1)
        assert (await box.store.written.counts()).pairs_waiting == 1

    in_box(scenario)
