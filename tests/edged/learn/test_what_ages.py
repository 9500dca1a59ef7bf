"""What makes rated answers too old in the learner's loop, and what does not: only a policy that moved on does."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from edged.learn import learner as learner_module
from edged.learn import updating

InBox = Callable[[Callable[[Any], Awaitable[None]]], None]
UP_AND_DOWN = [1.0, -1.0] * 8
N_NUMBERS = 4  # that are used up in vain, where answers may be one step old
NO_SPACE = 28


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updating, "PROVING_PAUSE_S", 0.0)
    monkeypatch.setattr(updating, "TRAINING_PAUSE_S", 0.0)
    monkeypatch.setattr(learner_module, "HOLD_FIRST_S", 0.001)
    monkeypatch.setattr(learner_module, "HOLD_MAX_S", 0.001)


async def until_finished(box: Any, n_updates: int) -> None:
    """Run the loop until `n_updates` more have a verdict; nothing may be dropped meanwhile."""
    wanted = len(box.finished) + n_updates
    task = asyncio.create_task(box.learner.run())
    try:
        await box.until(lambda: len(box.finished) >= wanted or task.done() or box.store.feedback.drop_counts())
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert box.store.feedback.drop_counts() == {}


async def published(box: Any, n_updates: int) -> None:
    for _ in range(n_updates):
        await box.rate(*UP_AND_DOWN, version=box.store.lineage.live().version)
        await until_finished(box, 1)


def strict(box: Any, staleness: int) -> None:
    box.rules = dataclasses.replace(box.rules, staleness=staleness)
    box.max_attempts = 1


def test_a_candidate_that_the_gate_refused_ages_nothing(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        strict(box, staleness=0)
        box.worker.metrics = {"kl/live": 0.75}
        for _ in range(N_NUMBERS):
            await box.rate(*UP_AND_DOWN)
            await until_finished(box, 1)
        box.worker.metrics = None
        await box.rate(*UP_AND_DOWN)
        await until_finished(box, 1)
        assert [update.verdict for update in box.finished] == ["refused"] * N_NUMBERS + ["published"]

    in_box(scenario)


@pytest.mark.parametrize("where", ["trainer", "job"])
def test_ratings_outlast_a_full_disk_wherever_it_is_met(
    in_box: InBox, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    async def scenario(box: Any) -> None:
        strict(box, staleness=0)
        write_job, left = box.folders.write_job, [N_NUMBERS]

        def full(*job: Any) -> None:
            if left[0]:
                left[0] -= 1
                raise OSError(NO_SPACE, "No space left on device")
            write_job(*job)

        if where == "job":
            monkeypatch.setattr(box.folders, "write_job", full)
        else:
            box.worker.behaviours.extend(["disk_full"] * N_NUMBERS)
        await box.rate(*UP_AND_DOWN)
        await until_finished(box, N_NUMBERS + 1)
        assert [update.verdict for update in box.finished] == ["skipped"] * N_NUMBERS + ["published"]
        assert box.finished[-1].version == N_NUMBERS + 1
        assert len(box.finished[-1].new_episode_ids) == 16

    in_box(scenario)


def test_ratings_outlast_a_trainer_that_is_killed_every_time_and_the_alarm_says_so(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        strict(box, staleness=0)
        box.max_attempts = 2
        box.worker.behaviours.extend(["die"] * 2 * N_NUMBERS)
        await box.rate(*UP_AND_DOWN)
        await until_finished(box, N_NUMBERS)
        assert [update.metrics["trainer/deaths"] for update in box.finished] == [2.0] * N_NUMBERS
        await box.learner._look_back()
        assert any("trainer died 8 times" in alarm for alarm in box.learner.alarms)
        await until_finished(box, 1)
        assert [update.verdict for update in box.finished] == ["skipped"] * N_NUMBERS + ["published"]
        assert len(box.finished[-1].new_episode_ids) == 16
        assert not any("trainer died" in alarm for alarm in box.learner.alarms)

    in_box(scenario)


def test_a_job_that_cannot_be_written_holds_learning_and_takes_one_number(
    in_box: InBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_module, "HOLD_FIRST_S", 60.0)

    async def scenario(box: Any) -> None:
        def full(*_: Any) -> None:
            raise OSError(NO_SPACE, "No space left on device")

        monkeypatch.setattr(box.folders, "write_job", full)
        await box.rate(*UP_AND_DOWN)
        task = asyncio.create_task(box.learner.run())
        await box.until(lambda: box.learner.state == "paused" or task.done())
        assert "No space left on device" in box.learner.why
        for _ in range(5):
            box.learner.wake()
            await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert (await box.store.lineage.newest_version(), len(box.finished), await box.unused()) == (1, 1, 16)

    in_box(scenario)


def test_imports_that_do_not_go_live_age_nothing(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        strict(box, staleness=0)
        await box.rate(*UP_AND_DOWN[:8])
        for _ in range(N_NUMBERS):
            await box.store.lineage.add_candidate(origin="imported", parent_version=0, caller=box.OPERATOR)
        await box.rate(*UP_AND_DOWN[8:])
        await until_finished(box, 1)
        assert (box.finished[0].verdict, len(box.finished[0].new_episode_ids)) == ("published", 16)

    in_box(scenario)


@pytest.mark.parametrize("why", ["promoted", "rolled_back"])
def test_what_is_live_again_is_learned_from_again_and_replays_its_past(in_box: InBox, why: str) -> None:
    async def scenario(box: Any) -> None:
        strict(box, staleness=1)
        await published(box, 4)
        await box.rate(*UP_AND_DOWN[:8], version=4)  # its answers wait while it is not near
        await box.store.lineage.set_live(1, caller=box.OPERATOR, why=why, if_live=None, now=1.0)
        await box.rate(*UP_AND_DOWN, version=1)
        await until_finished(box, 1)
        last = box.finished[-1]
        assert (last.verdict, last.parent_version, len(last.new_episode_ids)) == ("published", 1, 16)
        of_versions = {episode.version for episode in await box.store.episodes.get(last.replay_episode_ids)}
        assert of_versions
        assert of_versions <= {0, 1, 2}
        assert await box.unused() == 8
        await box.store.lineage.set_live(4, caller=box.OPERATOR, why="promoted", if_live=None, now=2.0)
        await box.rate(*UP_AND_DOWN[8:], version=4)
        await until_finished(box, 1)
        assert await box.unused() == 0

    in_box(scenario)


def test_what_the_policy_has_moved_past_is_dropped_but_not_while_learning_is_paused(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        strict(box, staleness=1)
        await published(box, 2)
        await box.rate(*UP_AND_DOWN, version=0)
        box.learner.pause(True)
        task = asyncio.create_task(box.learner.run())
        await box.until(lambda: box.learner.state == "paused")
        assert (await box.unused(), box.store.feedback.drop_counts()) == (16, {})
        box.learner.pause(False)
        await box.until(lambda: box.store.feedback.drop_counts() == {"stale": 16})
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    in_box(scenario)
