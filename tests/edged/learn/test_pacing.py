"""When the trainer is told of its share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from edged.learn import pacing
from edged.learn.first_tokens import QUIET_MIN, TRAINING_MIN
from edged.learn.pace import Targets
from edged.learn.pacing import Activity, Pacing
from engine import protocol

QUIET = protocol.Decoding(gaps=(protocol.Gap(answers=1, steps=50, seconds=0.5),))
SLOW = protocol.Decoding(gaps=(protocol.Gap(answers=1, steps=50, seconds=5.0),))


class Trainer:
    """A train worker that remembers the shares it was told."""

    def __init__(self) -> None:
        self.is_ready = True
        self.activity: Activity = "idle"
        self.told: list[float] = []

    def send(self, message: protocol.Message) -> None:
        assert isinstance(message, protocol.Pace)
        self.told.append(message.share)


def with_pacing(scenario: Callable[[Trainer, Pacing], Awaitable[None]]) -> None:
    async def run() -> None:
        trainer = Trainer()
        targets = Targets(min_share=0.1, ttft_inflation=1.3)
        await scenario(trainer, Pacing(trainer, activity=lambda: trainer.activity, targets=lambda: targets))

    asyncio.run(run())


def slow_down(trainer: Trainer, paced: Pacing, reports: int) -> None:
    """Quiet gaps, then some reports of slow ones while it trains; the first is of both kinds."""
    paced.received(QUIET)
    trainer.activity = "training"
    for _ in range(reports + 1):
        paced.received(SLOW)


def test_a_trainer_that_slows_answers_down_is_told_less_and_less() -> None:
    async def scenario(trainer: Trainer, paced: Pacing) -> None:
        slow_down(trainer, paced, reports=5)
        assert trainer.told == [0.5, 0.25, 0.125, 0.1]

    with_pacing(scenario)


def test_a_report_of_both_kinds_of_gaps_proves_nothing() -> None:
    async def scenario(trainer: Trainer, paced: Pacing) -> None:
        slow_down(trainer, paced, reports=0)
        assert trainer.told == []

    with_pacing(scenario)


def test_it_has_all_of_the_time_once_nobody_asks_and_its_share_again_when_somebody_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(trainer: Trainer, paced: Pacing) -> None:
        slow_down(trainer, paced, reports=2)
        async with asyncio.timeout(20):
            while trainer.told[-1] != 1.0:
                await asyncio.sleep(0.005)
        trainer.activity = "idle"
        paced.received(QUIET)
        assert trainer.told == [0.5, 0.25, 1.0, 0.25]

    monkeypatch.setattr(pacing, "QUIET_AFTER_S", 0.05)
    with_pacing(scenario)


def test_a_trainer_that_was_started_again_is_told_what_the_one_before_it_was() -> None:
    async def scenario(trainer: Trainer, paced: Pacing) -> None:
        slow_down(trainer, paced, reports=1)
        trainer.told.clear()
        paced.trainer_ready()
        assert trainer.told == [0.5]

    with_pacing(scenario)


def test_other_messages_are_not_taken_and_a_trainer_that_is_not_there_is_not_told() -> None:
    async def scenario(trainer: Trainer, paced: Pacing) -> None:
        assert not paced.received(protocol.Beat(rss_bytes=1))
        trainer.is_ready = False
        slow_down(trainer, paced, reports=3)
        assert (trainer.told, paced.share) == ([], 1.0)

    with_pacing(scenario)


def firsts(seconds: float, number: int) -> protocol.Decoding:
    first = protocol.FirstToken(queue_s=0.0, prefill_s=seconds, beside=0, evaluated_tokens=30)
    return protocol.Decoding(gaps=(), firsts=(first,) * number)


def test_a_trainer_that_makes_first_tokens_late_rests_while_somebody_waits_for_one() -> None:
    async def scenario(trainer: Trainer, paced: Pacing) -> None:
        paced.received(firsts(0.2, QUIET_MIN))
        trainer.activity = "training"
        paced.waiting(1)
        paced.waiting(0)
        assert trainer.told == [], "nothing shows that it is needed"
        paced.received(QUIET)
        paced.received(firsts(0.5, TRAINING_MIN))
        assert trainer.told == []
        for requests in (1, 2, 1, 0):
            paced.waiting(requests)
        assert trainer.told == [0.25, 1.0]
        shown = paced.first_tokens()
        assert (shown.idle_s, shown.inflation, shown.target, shown.share) == (0.2, pytest.approx(2.5), 1.3, 0.25)

    with_pacing(scenario)


def test_a_trainer_that_has_nothing_to_do_is_not_told_of_every_request() -> None:
    async def scenario(trainer: Trainer, paced: Pacing) -> None:
        paced.received(firsts(0.2, QUIET_MIN))
        trainer.activity = "training"
        paced.received(QUIET)
        paced.received(firsts(0.5, TRAINING_MIN))
        trainer.activity = "idle"
        for requests in (1, 0):
            paced.waiting(requests)
        assert trainer.told == []

    with_pacing(scenario)


def test_what_a_trainer_costs_while_it_starts_is_neither_usual_nor_what_training_costs() -> None:
    async def scenario(trainer: Trainer, paced: Pacing) -> None:
        paced.received(firsts(0.2, QUIET_MIN))
        trainer.activity = "starting"
        for _ in range(3):
            paced.received(firsts(0.9, TRAINING_MIN))
        shown = paced.first_tokens()
        assert (shown.idle_s, shown.training_s, shown.inflation, shown.share) == (0.2, None, None, 1.0)

    with_pacing(scenario)
