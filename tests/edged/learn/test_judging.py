"""The client of the score worker on a light engine: every call ends, and every answer has a reward or a reason."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.learn import judging
from edged.learn.judging import Judgement, Judging, JudgingRules, cut, item_of
from edged.records import Episode
from engine import protocol

RULES = JudgingRules(clip=1.0, batch=2, timeout_s=30.0, fitted_ratings_min=32, fitted_accuracy_min=0.65)
REPORT = protocol.FitReport(
    n_ratings=40, n_pairs=90, head="logistic", accuracy=0.8, chance_se=0.05, used=True, why="0.80 of 90"
)
FAULT = protocol.Fault(code="function_unusable", message="no module named judges")


class LightEngine:
    """A score worker as its client sees it: answers as it is told, and goes down when it is killed."""

    def __init__(self) -> None:
        self.judging: Judging
        self.is_ready = False
        self.wanted = False
        self.starts = 0
        self.sent: list[protocol.Message] = []
        self.killed: list[str] = []
        self.on_start: Callable[[], None] = self.get_ready
        self.on_judge: Callable[[protocol.Judge], None] = self.answer
        self.report = REPORT

    def want(self) -> None:
        self.wanted = True
        if not self.is_ready:
            self.starts += 1
            asyncio.get_running_loop().call_soon(self.on_start)

    def unwant(self) -> None:
        self.wanted = False

    def kill(self, why: str) -> None:
        self.killed.append(why)
        asyncio.get_running_loop().call_soon(self.die)

    def send(self, message: protocol.Message) -> None:
        protocol.encode(message, 1)
        self.sent.append(message)
        if isinstance(message, protocol.Judge):
            asyncio.get_running_loop().call_soon(self.on_judge, message)
        elif isinstance(message, protocol.Fit):
            fitted = protocol.Fitted(job_id=message.job_id, report=self.report, seconds=0.1)
            asyncio.get_running_loop().call_soon(self.judging.received, fitted)

    def get_ready(self) -> None:
        self.is_ready = True
        self.judging.ready()

    def die(self) -> None:
        self.is_ready = False
        self.judging.down()

    def answer(self, message: protocol.Judge, **changes: Any) -> None:
        n_items = len(message.items)
        judged = protocol.Judged(
            job_id=message.job_id, rewards=(0.5,) * n_items, reasons=(None,) * n_items, seconds=0.1
        )
        self.judging.received(dataclasses.replace(judged, **changes))

    def of_type(self, kind: type[protocol.Message]) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


class Bench:
    def __init__(self, ratings: Callable[[], Awaitable[Sequence[protocol.RatedTokens]]] | None = None) -> None:
        self.engine = LightEngine()
        self.rules = RULES
        self.judging = Judging(self.engine, rules=lambda: self.rules, start_timeout_s=30.0, ratings=ratings)
        self.engine.judging = self.judging

    async def judge(self, n_items: int = 1) -> list[tuple[float | None, str | None]]:
        judgements = await self.judging.judge([make_item(episode_id=index) for index in range(n_items)])
        assert [judgement.episode_id for judgement in judgements] == list(range(n_items))
        return [(judgement.reward, judgement.reason) for judgement in judgements]


def make_item(**changes: Any) -> protocol.JudgeItem:
    values: dict[str, Any] = {
        "episode_id": 1,
        "messages": (),
        "prompt": "Once",
        "answer": " upon",
        "finish_reason": "stop",
        "metadata": {},
        "prompt_ids": (1,),
        "completion_ids": (2,),
        **changes,
    }
    return protocol.JudgeItem(**values)


def make_ratings(n: int, tokens: int = 2) -> list[protocol.RatedTokens]:
    return [
        protocol.RatedTokens(episode_id=index, prompt_ids=(1,), completion_ids=(2,) * (tokens - 1), rating=0.5)
        for index in range(n)
    ]


def test_answers_go_out_in_batches_and_come_back_in_their_order() -> None:
    async def scenario() -> None:
        bench = Bench()
        assert await bench.judge(5) == [(0.5, None)] * 5
        batches = bench.engine.of_type(protocol.Judge)
        assert [len(batch.items) for batch in batches] == [2, 2, 1]
        assert {(batch.clip, batch.timeout_s) for batch in batches} == {(1.0, 30.0)}
        assert (bench.engine.starts, bench.judging.judged) == (1, 5)

    asyncio.run(scenario())


def test_nothing_to_judge_starts_no_worker() -> None:
    async def scenario() -> None:
        bench = Bench()
        assert await bench.judge(0) == []
        assert bench.engine.starts == 0

    asyncio.run(scenario())


def test_reasons_are_counted_and_the_newest_failure_is_kept() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.engine.on_judge = lambda message: bench.engine.answer(
            message, rewards=(1.0, None), reasons=("judge_clipped", "judge_not_finite"), detail="a reward is NaN"
        )
        assert await bench.judge(4) == [(1.0, "judge_clipped"), (None, "judge_not_finite")] * 2
        assert bench.judging.reasons == {"judge_clipped": 2, "judge_not_finite": 2}
        assert bench.judging.detail == "a reward is NaN"

    asyncio.run(scenario())


def test_a_worker_that_does_not_answer_in_time_is_killed_and_the_next_batch_gets_a_fresh_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(judging, "GRACE_S", 0.0)

    async def scenario() -> None:
        bench = Bench()
        bench.rules = dataclasses.replace(RULES, timeout_s=0.05)
        answers = iter([lambda message: None, bench.engine.answer])
        bench.engine.on_judge = lambda message: next(answers)(message)
        assert await bench.judge(3) == [(None, "judge_timeout")] * 2 + [(0.5, None)]
        assert bench.engine.killed == ["did not answer within 0.05 s"]
        assert bench.engine.starts == 2

    asyncio.run(scenario())


def test_a_worker_that_dies_costs_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        bench = Bench()
        answers = iter([lambda message: bench.engine.die(), bench.engine.answer])
        bench.engine.on_judge = lambda message: next(answers)(message)
        assert await bench.judge(3) == [(None, "judge_worker_lost")] * 2 + [(0.5, None)]

    asyncio.run(scenario())


def test_after_two_batches_that_cost_the_process_the_rest_is_not_tried() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.engine.on_judge = lambda message: bench.engine.die()
        found = await bench.judge(8)
        assert found == [(None, "judge_worker_lost")] * 4 + [(None, "judge_unavailable")] * 4
        assert bench.engine.starts == judging.GIVE_UP_AFTER
        assert bench.judging.reasons == {"judge_worker_lost": 4, "judge_unavailable": 4}

    asyncio.run(scenario())


def test_a_worker_whose_judge_is_stuck_is_killed_at_its_word() -> None:
    async def scenario() -> None:
        bench = Bench()
        stuck = {"rewards": (None, None), "reasons": ("judge_timeout",) * 2, "stuck": True}
        answers = iter([lambda message: bench.engine.answer(message, **stuck), bench.engine.answer])
        bench.engine.on_judge = lambda message: next(answers)(message)
        assert await bench.judge(3) == [(None, "judge_timeout")] * 2 + [(0.5, None)]
        assert (len(bench.engine.killed), bench.engine.starts) == (1, 2)

    asyncio.run(scenario())


def test_a_worker_that_was_killed_gets_no_batch_until_it_is_gone() -> None:
    async def scenario() -> None:
        bench = Bench()
        at_kill: list[int] = []

        def kill_slowly(why: str) -> None:
            asyncio.get_running_loop().call_later(0.05, go)

        def go() -> None:
            at_kill.append(len(bench.engine.sent))
            bench.engine.die()

        bench.engine.kill = kill_slowly  # type: ignore[method-assign]
        answers = iter([lambda message: bench.engine.answer(message, stuck=True), bench.engine.answer])
        bench.engine.on_judge = lambda message: next(answers)(message)
        await bench.judge(3)
        assert (at_kill, len(bench.engine.sent)) == ([1], 2)

    asyncio.run(scenario())


def test_a_worker_that_a_kill_does_not_end_is_killed_again_and_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(judging, "GONE_S", 0.02)

    async def scenario() -> None:
        bench = Bench()
        killed: list[str] = []
        bench.engine.kill = killed.append  # type: ignore[method-assign]
        answers = iter([lambda message: bench.engine.answer(message, stuck=True), bench.engine.answer])
        bench.engine.on_judge = lambda message: next(answers)(message)
        assert await bench.judge(3) == [(0.5, None)] * 3
        assert len(killed) == 3

    asyncio.run(scenario())


@pytest.mark.parametrize("changes", [{"rewards": (0.5,)}, {"reasons": ()}, {"rewards": (0.5,) * 3}])
def test_a_worker_that_answers_for_another_number_of_items_is_not_believed(changes: dict[str, Any]) -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.engine.on_judge = lambda message: bench.engine.answer(message, **changes)
        assert await bench.judge(2) == [(None, "judge_worker_lost")] * 2
        assert len(bench.engine.killed) == 1

    asyncio.run(scenario())


def test_a_judge_that_cannot_start_is_left_alone_for_a_while() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.engine.on_start = lambda: bench.judging.fault(FAULT)
        assert await bench.judge(2) == [(None, "judge_unavailable")] * 2
        assert (bench.judging.detail, bench.engine.wanted) == (FAULT.message, False)
        assert await bench.judge(2) == [(None, "judge_unavailable")] * 2
        assert bench.engine.starts == 1
        assert "no module named judges; next try in" in bench.judging.detail

    asyncio.run(scenario())


def test_a_judge_that_does_not_get_ready_is_left_alone_for_a_while() -> None:
    async def scenario() -> None:
        bench = Bench()
        slow = Judging(bench.engine, rules=lambda: RULES, start_timeout_s=0.05)
        bench.engine.judging, bench.engine.on_start = slow, lambda: None
        assert await slow.prepare() == "the judge was not ready within 0.05 s"
        assert not bench.engine.wanted

    asyncio.run(scenario())


def test_an_answer_that_cannot_be_sent_costs_nothing_else() -> None:
    async def scenario() -> None:
        bench = Bench()
        items = [make_item(answer="x" * (protocol.MAX_MESSAGE_BYTES + 1)), make_item(answer="\ud800"), make_item()]
        bench.rules = dataclasses.replace(RULES, batch=1)
        found = await bench.judging.judge(items)
        assert [judgement.reason for judgement in found] == ["judge_unsendable", "judge_unsendable", None]
        assert bench.engine.starts == 1

    asyncio.run(scenario())


def test_two_callers_take_turns() -> None:
    async def scenario() -> None:
        bench = Bench()
        under_way: list[str] = []

        def answer(message: protocol.Judge) -> None:
            under_way.append(message.job_id)
            assert len(under_way) == 1
            asyncio.get_running_loop().call_later(0.01, finish, message)

        def finish(message: protocol.Judge) -> None:
            under_way.remove(message.job_id)
            bench.engine.answer(message)

        bench.engine.on_judge = answer
        assert await asyncio.gather(bench.judge(3), bench.judge(3)) == [[(0.5, None)] * 3] * 2

    asyncio.run(scenario())


def test_a_call_that_is_cancelled_ends_the_worker_and_the_next_call_gets_a_fresh_one() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.engine.on_judge = lambda message: None
        call = asyncio.create_task(bench.judge(1))
        while not bench.engine.sent:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        bench.engine.on_judge = bench.engine.answer
        assert await bench.judge(1) == [(0.5, None)]
        assert bench.engine.starts == 2

    asyncio.run(scenario())


# ------------------------------------------------------------------------------------------------- the fitted judge


def test_a_fitted_judge_gets_the_ratings_in_parts_before_it_judges() -> None:
    async def scenario() -> None:
        ratings = make_ratings(2 * judging.FIT_RATINGS + 1)

        async def rated() -> Sequence[protocol.RatedTokens]:
            return ratings

        bench = Bench(rated)
        assert await bench.judge(1) == [(0.5, None)]
        fits = bench.engine.of_type(protocol.Fit)
        assert [(fit.fresh, fit.more, len(fit.ratings)) for fit in fits] == [
            (True, True, judging.FIT_RATINGS),
            (False, True, judging.FIT_RATINGS),
            (False, False, 1),
        ]
        assert tuple(rating for fit in fits for rating in fit.ratings) == tuple(ratings)
        assert {(fit.accuracy_min, fit.ratings_min) for fit in fits} == {(0.65, 32)}
        assert isinstance(bench.engine.sent[-1], protocol.Judge)
        assert bench.judging.report == REPORT

    asyncio.run(scenario())


def test_it_is_fitted_again_after_new_ratings_and_after_a_death_but_not_without_need() -> None:
    async def scenario() -> None:
        async def rated() -> Sequence[protocol.RatedTokens]:
            return make_ratings(1)

        bench = Bench(rated)

        async def fits_for(n_items: int) -> int:
            before = len(bench.engine.of_type(protocol.Fit))
            await bench.judge(n_items)
            return len(bench.engine.of_type(protocol.Fit)) - before

        assert [await fits_for(4), await fits_for(2)] == [1, 0]
        bench.judging.rated()
        assert [await fits_for(2), await fits_for(2)] == [1, 0]
        bench.engine.die()
        assert [await fits_for(2), await fits_for(2)] == [1, 0]

    asyncio.run(scenario())


def test_a_box_without_ratings_tells_the_judge_so() -> None:
    async def scenario() -> None:
        async def rated() -> Sequence[protocol.RatedTokens]:
            return ()

        bench = Bench(rated)
        bench.engine.report = dataclasses.replace(REPORT, used=False, why="0 rated answers; it is fitted from 32 on")
        assert await bench.judging.prepare() == "0 rated answers; it is fitted from 32 on"
        assert [fit.ratings for fit in bench.engine.of_type(protocol.Fit)] == [()]

    asyncio.run(scenario())


def test_ratings_that_cannot_be_read_are_the_callers_error_and_are_asked_for_again() -> None:
    async def scenario() -> None:
        told = iter([OSError("disk"), None])

        async def rated() -> Sequence[protocol.RatedTokens]:
            if (error := next(told)) is not None:
                raise error
            return make_ratings(1)

        bench = Bench(rated)
        with pytest.raises(OSError, match="disk"):
            await bench.judge(1)
        assert await bench.judge(1) == [(0.5, None)]

    asyncio.run(scenario())


def test_preparing_a_judge_that_is_not_fitted_only_starts_it() -> None:
    async def scenario() -> None:
        bench = Bench()
        assert await bench.judging.prepare() is None
        assert (bench.engine.starts, bench.engine.sent) == (1, [])
        bench.judging.rest()
        assert not bench.engine.wanted

    asyncio.run(scenario())


# ------------------------------------------------------------------------------------------------------- pure parts


@given(sizes=st.lists(st.integers(0, 2 * judging.MESSAGE_BYTES), max_size=20), most=st.integers(1, 5))
def test_cutting_keeps_the_order_and_every_limit(sizes: list[int], most: int) -> None:
    groups = list(cut(sizes, most, lambda size: size))
    assert [size for group in groups for size in group] == sizes
    for group in groups:
        assert 1 <= len(group) <= most
        assert len(group) == 1 or sum(group) <= judging.MESSAGE_BYTES


def test_an_item_shows_what_the_episode_holds() -> None:
    values: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(Episode))
    values |= {
        "id": 7,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
        "text": "Because.",
        "finish_reason": "length",
        "metadata": {"app": "shop"},
        "prompt_ids": (1, 2),
        "completion_ids": (3,),
    }
    assert item_of(Episode(**values)) == protocol.JudgeItem(
        episode_id=7,
        messages=(
            protocol.ChatMessage(role="system", content="Be brief."),
            protocol.ChatMessage(role="user", content="Why?"),
        ),
        prompt=None,
        answer="Because.",
        finish_reason="length",
        metadata={"app": "shop"},
        prompt_ids=(1, 2),
        completion_ids=(3,),
    )
    text = item_of(Episode(**{**values, "messages": None, "prompt": "Once"}))
    assert (text.messages, text.prompt) == ((), "Once")


def test_other_messages_are_not_the_clients() -> None:
    async def scenario() -> None:
        assert not Bench().judging.received(protocol.Beat(rss_bytes=1))

    asyncio.run(scenario())


def test_a_judgement_that_nobody_waits_for_is_dropped() -> None:
    async def scenario() -> None:
        bench = Bench()
        late = protocol.Judged(job_id="judge-0", rewards=(0.5,), reasons=(None,), seconds=0.1)
        assert bench.judging.received(late)
        found = await bench.judging.judge([make_item()])
        assert found == [Judgement(episode_id=1, reward=0.5, reason=None)]

    asyncio.run(scenario())
