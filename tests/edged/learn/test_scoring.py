"""Scoring ahead: which episodes go to the trainer, and that one that cannot be scored does not stop the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from edged.learn.scoring import GROUP_EPISODES, Scorer

InBox = Callable[[Callable[[Any], Awaitable[None]]], None]


class WatchedScorer(Scorer):
    """A scorer that tells when it has found nothing more to do."""

    asleep: asyncio.Event

    async def _sleep(self) -> None:
        self.asleep.set()
        await super()._sleep()


def scorer_of(box: Any, *versions: int) -> WatchedScorer:
    """versions: those worth scoring; none named: 0 to 9."""

    async def worth_scoring() -> frozenset[int]:
        return frozenset(versions or range(10))

    return WatchedScorer(
        box.trainer,
        box.store.episodes,
        box.folders,
        base_sha256=box.BASE_SHA256,
        versions=worth_scoring,
        reference=lambda: box.reference,
    )


async def until_asleep(box: Any, scorer: WatchedScorer) -> asyncio.Task[None]:
    """The scorer's task, once it found nothing more to do."""
    scorer.asleep = asyncio.Event()
    task = asyncio.create_task(scorer.run())
    async with asyncio.timeout(box.GUARD_S):
        await scorer.asleep.wait()
    return task


async def woken(box: Any, scorer: WatchedScorer) -> None:
    """Wake the scorer, until it found nothing more to do."""
    scorer.asleep.clear()
    scorer.wake()
    async with asyncio.timeout(box.GUARD_S):
        await scorer.asleep.wait()


async def unscored(box: Any) -> list[int]:
    return [episode.id for episode in await box.store.episodes.unscored(100, None)]


async def scored_once(box: Any, scorer: WatchedScorer) -> None:
    """Run the scorer until it has nothing to do."""
    task = await until_asleep(box, scorer)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_episodes_are_scored_in_groups_the_newest_first(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        ids = [(await box.answer())[1] for _ in range(6)]
        await box.trainer.start()
        scorer = scorer_of(box)
        await scored_once(box, scorer)
        groups = [[episode.episode_id for episode in score.episodes] for score in box.worker.scored]
        assert groups == [ids[:1:-1][:GROUP_EPISODES], ids[1::-1]]
        assert await unscored(box) == []

    in_box(scenario)


def test_what_the_trainer_says_is_stored_with_its_reference(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        _, episode_id = await box.answer()
        await box.trainer.start()
        await scored_once(box, scorer_of(box))
        ((_, _, score),) = await box.store.episodes.list(after=0, limit=10, version=None, rated=None)
        assert (score.episode_id, score.reference_version) == (episode_id, 0)
        assert (score.reference_logprob, score.kl, score.engine_gap) == (-1.5, 0.25, None)

    in_box(scenario)


def test_scoring_never_starts_the_trainer(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        await box.answer()
        await scored_once(box, scorer_of(box))
        assert box.worker.starts_total == 0

    in_box(scenario)


def test_a_new_episode_wakes_the_scorer(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        await box.trainer.start()
        scorer = scorer_of(box)
        task = await until_asleep(box, scorer)
        await box.answer()
        await woken(box, scorer)
        assert await unscored(box) == []
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    in_box(scenario)


def test_an_episode_of_a_version_whose_files_are_gone_is_left_alone(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        await box.answer(version=3)
        _, here = await box.answer(version=0)
        await box.trainer.start()
        await scored_once(box, scorer_of(box))
        assert [[episode.episode_id for episode in score.episodes] for score in box.worker.scored] == [[here]]

    in_box(scenario)


def test_episodes_that_are_too_old_to_be_trained_on_are_not_scored(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        await box.answer(version=0)
        await box.trainer.start()
        await scored_once(box, scorer_of(box, 1))
        assert box.worker.scored == []

    in_box(scenario)


def test_nothing_is_scored_against_a_reference_that_is_not_there(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        await box.answer()
        box.reference = 5
        await box.trainer.start()
        await scored_once(box, scorer_of(box))
        assert box.worker.scored == []

    in_box(scenario)


def test_a_group_that_the_trainer_refuses_is_not_tried_again_and_does_not_stop_others(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        for _ in range(GROUP_EPISODES):
            await box.answer()
        await box.trainer.start()
        box.worker.refuse_scores = True
        scorer = scorer_of(box)
        task = await until_asleep(box, scorer)
        assert len(box.worker.scored) == 1
        box.worker.refuse_scores = False
        _, fresh = await box.answer()
        await woken(box, scorer)
        assert [episode.episode_id for episode in box.worker.scored[1].episodes] == [fresh]
        assert fresh not in await unscored(box)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    in_box(scenario)


def test_a_trainer_that_dies_is_waited_for(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        await box.answer()
        await box.trainer.start()
        box.worker.send = lambda message: box.worker.die()
        scorer = scorer_of(box)
        await scored_once(box, scorer)
        assert len(await unscored(box)) == 1

    in_box(scenario)
