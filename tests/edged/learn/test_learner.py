"""The learner's loop on a real store: what ratings lead to, and what a start after a crash takes up."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from edged.learn import learner as learner_module
from edged.learn import updating
from edged.learn.forgetting import forget_removed
from edged.records import Preference
from engine import protocol

InBox = Callable[[Callable[[Any], Awaitable[None]]], None]
UP_AND_DOWN = [1.0, -1.0] * 8


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updating, "PROVING_PAUSE_S", 0.0)
    monkeypatch.setattr(learner_module, "PROBES_POLL_S", 0.01)


@contextlib.asynccontextmanager
async def running(box: Any) -> AsyncIterator[None]:
    """The learner's loop, until the block ends; a loop that failed fails the test."""
    task = asyncio.create_task(box.learner.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def learned(box: Any, n_updates: int = 1) -> None:
    """Run the loop until `n_updates` have a verdict."""
    async with running(box):
        await box.until(lambda: len(box.finished) >= n_updates)


def job_of(box: Any, update_id: int = 1) -> protocol.TrainJob:
    job: protocol.TrainJob = box.folders.read_job(update_id)
    return job


def keep_jobs(box: Any) -> list[protocol.TrainJob]:
    """Every job that the trainer is given from now on."""
    jobs: list[protocol.TrainJob] = []
    send = box.worker.send

    def watched(message: protocol.Message) -> None:
        if isinstance(message, protocol.Train):
            jobs.append(job_of(box, int(message.job_id.removeprefix("update-"))))
        send(message)

    box.worker.send = watched
    return jobs


def test_sixteen_ratings_make_one_update(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        async with running(box):
            await box.rate(*UP_AND_DOWN[:15])
            await box.until(lambda: box.learner.ratings_until_update == 1)
            assert (box.learner.state, box.finished) == ("collecting", [])
            await box.rate(-1.0)
            await box.until(lambda: bool(box.finished))
            await box.until(lambda: box.learner.state == "idle")
        (update,) = box.finished
        assert (update.verdict, update.version, len(update.new_episode_ids)) == ("published", 1, 16)
        assert box.store.lineage.live().version == 1
        assert box.learner.ratings_until_update == 16

    in_box(scenario)


def test_a_job_holds_everything_that_the_update_depends_on(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        jobs = keep_jobs(box)
        await box.rate(*UP_AND_DOWN)
        await learned(box)
        (job,) = jobs
        base = protocol.AdapterRef(version=0, folder=None)
        assert (job.job_id, job.version, job.parent, job.reference, job.checkpoint) == (
            "update-1",
            1,
            base,
            base,
            None,
        )
        assert (job.probes, job.lora, job.seed, job.threads, job.base_sha256) == (
            box.PROBES,
            box.LORA,
            41,
            1,
            box.BASE_SHA256,
        )
        assert job.created_at == box.finished[0].created_at
        assert [rated.reward for rated in job.episodes] == UP_AND_DOWN
        assert not any(rated.replay for rated in job.episodes)
        first = job.episodes[0].episode
        assert (first.prompt_ids, first.completion_ids, first.logprobs) == ((1, 2, 3), (4, 5), (-0.5, -0.25))
        assert first.adapter == base

    in_box(scenario)


def test_answers_to_one_prompt_by_one_version_are_a_group(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        jobs = keep_jobs(box)
        await box.rate(*UP_AND_DOWN[:8])
        await box.rate(*UP_AND_DOWN[8:], prompt_ids=(3, 2, 1))
        await learned(box)
        await box.rate(*UP_AND_DOWN, version=1)
        await learned(box, 2)
        groups = [[rated.group for rated in job.episodes if not rated.replay] for job in jobs]
        assert [len(set(groups[0][:8])), len(set(groups[0][8:])), len(set(groups[0]))] == [1, 1, 2]
        assert len({*groups[0], *groups[1]}) == 3, "another version is another policy"

    in_box(scenario)


def test_single_ratings_wait_where_only_groups_are_compared_and_are_not_used_up(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.objectives = {"grpo": 1.0}
        await box.rate(*UP_AND_DOWN)
        async with running(box):
            await box.until(lambda: box.learner.state == "waiting_for_contrast")
            assert box.learner.why.startswith("16 rated answers wait")
            assert box.learner.ratings_until_update == 16
            assert (await box.learner.ask())[0] is False
        assert box.worker.trained == []
        assert len(await box.store.feedback.unused_rated(99)) == 16

    in_box(scenario)


def test_kto_takes_the_ratings_that_have_nothing_beside_them(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.objectives = {"grpo": 1.0, "kto": 0.5}
        jobs = keep_jobs(box)
        await box.rate(*UP_AND_DOWN[:14], prompt_ids=(1, 2, 3))
        await box.rate(1.0, prompt_ids=(7,))
        await box.rate(-1.0, prompt_ids=(8,))
        await learned(box)
        sampled = [set(rated.episode.logprobs) for rated in jobs[0].episodes]
        assert sampled == [{-0.5, -0.25}] * 14 + [{None}] * 2

    in_box(scenario)


def test_the_next_update_starts_from_the_live_version_and_replays_older_ratings(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        jobs = keep_jobs(box)
        await box.rate(*UP_AND_DOWN)
        await learned(box)
        await box.rate(*UP_AND_DOWN, version=1)
        await learned(box, 2)
        job = jobs[1]
        assert (job.parent.version, job.checkpoint) == (1, str(box.folders.checkpoint(1)))
        assert [rated.replay for rated in job.episodes] == [False] * 16 + [True] * 8
        assert {rated.episode.adapter.version for rated in job.episodes[:16]} == {1}
        assert {rated.episode.adapter.version for rated in job.episodes[16:]} == {0}
        assert len({rated.episode.episode_id for rated in job.episodes}) == 24

    in_box(scenario)


def test_each_kept_rating_is_followed_to_the_one_update_that_used_it_as_new(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        jobs = keep_jobs(box)
        for version, (n_usable, n_greedy) in enumerate([(16, 0), (17, 2), (20, 0)]):
            await box.rate(*(UP_AND_DOWN * 2)[:n_usable], version=version)
            await box.rate(*[1.0] * n_greedy, version=version, temperature=0.0)
            await learned(box, version + 1)
        used = await box.store.feedback.used_rated(None, 1000)
        assert box.store.feedback.drop_counts() == {"greedy": 2}
        assert (len(used), await box.unused()) == (53, 0), "every kept rating"
        by_update = {update.id: update for update in box.finished}
        for choice in used:
            assert choice.used_by is not None
            as_new = [
                int(job.job_id.removeprefix("update-"))
                for job in jobs
                for rated in job.episodes
                if rated.episode.episode_id == choice.episode_id and not rated.replay
            ]
            assert as_new == [choice.used_by]
            assert choice.episode_id in by_update[choice.used_by].new_episode_ids
        for number, job in enumerate(jobs, start=1):
            replayed = {rated.episode.episode_id for rated in job.episodes if rated.replay}
            assert set(by_update[number].replay_episode_ids) == replayed
            assert replayed <= {choice.episode_id for choice in used if (choice.used_by or number) < number}
            assert len(replayed) == (0, 8, 10)[number - 1]
            assert all(
                rated.reward == {c.episode_id: c.rating for c in used}[rated.episode.episode_id]
                for rated in job.episodes
            )

    in_box(scenario)


def test_a_rating_that_was_trained_on_counts_once(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        await box.rate(*UP_AND_DOWN)
        await learned(box)
        async with running(box):
            for completion in await box.store.episodes.list(after=0, limit=100, version=None, rated=True):
                await box.store.feedback.add(
                    dataclasses.replace(box.feedback_on(completion[0].completion_id), rating=0.5),
                    idempotency_key=None,
                )
            box.learner.wake()
            await box.until(lambda: box.learner.state == "idle")
        assert box.learner.ratings_until_update == 16
        assert len(box.finished) == 1

    in_box(scenario)


def test_equal_ratings_wait_for_contrast_and_join_the_next_batch(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        async with running(box):
            await box.rate(*[1.0] * 17)
            await box.until(lambda: box.learner.state == "waiting_for_contrast")
            assert box.finished == []
            await box.rate(-1.0)
            await box.until(lambda: bool(box.finished))
        assert len(box.finished[0].new_episode_ids) == 18

    in_box(scenario)


def test_contrast_is_found_behind_any_number_of_equal_ratings(in_box: InBox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_module, "ROWS", 4)

    async def scenario(box: Any) -> None:
        await box.rate(*[1.0] * 30, -1.0)
        await learned(box)
        assert len(box.finished[0].new_episode_ids) == 31

    in_box(scenario)


def test_a_batch_may_be_larger_than_what_one_decision_looks_at_by_default(
    in_box: InBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_module, "ROWS", 4)

    async def scenario(box: Any) -> None:
        await box.rate(*UP_AND_DOWN)
        await learned(box)
        assert len(box.finished[0].new_episode_ids) == 16

    in_box(scenario)


def test_what_cannot_be_trained_on_is_counted_by_its_reason(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        await box.rate(1.0, temperature=0.0)
        await box.rate(1.0, -1.0, top_k=40)
        async with running(box):
            await box.until(lambda: sum(box.store.feedback.drop_counts().values()) == 3)
        assert box.store.feedback.drop_counts() == {"greedy": 1, "cut_support": 2}
        assert box.store.feedback.counts() == (3, 3)

    in_box(scenario)


def test_ratings_on_another_base_model_are_counted_and_wait(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        await box.rate(1.0, -1.0, base_sha256="c" * 64)
        await box.rate(*UP_AND_DOWN)
        await learned(box)
        assert (box.learner.elsewhere, box.store.feedback.drop_counts()) == (2, {})
        assert len(await box.store.feedback.unused_rated(10, base_sha256="c" * 64)) == 2

    in_box(scenario)


def test_an_update_of_another_base_model_is_given_back(in_box: InBox) -> None:
    async def planned(box: Any) -> None:
        update, job = await box.plan()
        path = box.folders.job(update.id) / protocol.JOB_FILE
        path.write_bytes(msgpack.packb(protocol.to_map(dataclasses.replace(job, base_sha256="c" * 64))))

    async def restarted(box: Any) -> None:
        async with running(box):
            await box.until(lambda: bool(box.finished))
        assert (box.finished[0].verdict, box.worker.trained) == ("skipped", [])
        assert "another base model" in box.finished[0].reason
        assert await box.unused() == 2

    in_box(planned)
    in_box(restarted)


def test_ratings_behind_many_that_cannot_be_used_are_reached(in_box: InBox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_module, "ROWS", 16)

    async def scenario(box: Any) -> None:
        await box.rate(*[1.0] * 40, base_sha256="c" * 64)
        await box.rate(*[1.0] * 40, temperature=0.0)
        await box.rate(*UP_AND_DOWN)
        await learned(box)
        assert box.store.feedback.drop_counts() == {"greedy": 40}

    in_box(scenario)


def test_the_trainer_is_started_at_half_a_batch(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        async with running(box):
            await box.rate(*UP_AND_DOWN[:7])
            await box.until(lambda: box.learner.ratings_until_update == 9)
            assert box.worker.starts_total == 0
            await box.rate(1.0)
            await box.until(lambda: box.worker.starts_total == 1)

    in_box(scenario)


# ------------------------------------------------------------------------------------------------------- switches


def test_while_paused_nothing_is_trained_and_afterwards_it_is(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        async with running(box):
            box.learner.pause(True)
            await box.rate(*UP_AND_DOWN)
            await box.until(lambda: box.learner.state == "paused")
            assert (box.finished, box.worker.starts_total) == ([], 0)
            box.learner.pause(False)
            await box.until(lambda: bool(box.finished))

    in_box(scenario)


def test_a_pin_stops_learning_until_it_is_taken_back(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        lineage = box.store.lineage
        await lineage.set_pinned(True, version=0, if_live=None, caller=box.OPERATOR)
        async with running(box):
            await box.rate(*UP_AND_DOWN)
            await box.until(lambda: box.learner.why == "a version is pinned")
            await lineage.set_pinned(False, version=0, if_live=None, caller=box.OPERATOR)
            box.learner.wake()
            await box.until(lambda: bool(box.finished))

    in_box(scenario)


def test_learning_that_is_switched_off_stays_off(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.enabled = False
        async with running(box):
            await box.rate(*UP_AND_DOWN)
            await box.until(lambda: box.learner.state == "paused")
            assert await box.learner.ask() == (False, "paused by the operator")

    in_box(scenario)


def test_who_asks_gets_an_update_of_what_there_is(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        async with running(box):
            assert await box.learner.ask() == (False, "no new ratings")
            await box.rate(1.0, -1.0, 1.0)
            await box.until(lambda: box.learner.state == "collecting")
            assert await box.learner.ask() == (True, "3 new ratings")
            await box.until(lambda: bool(box.finished))
            await box.rate(1.0, -1.0)
            await box.until(lambda: box.learner.state == "collecting")
        assert len(box.finished) == 1  # the question was answered once

    in_box(scenario)


def test_who_asks_while_something_else_is_decided_is_heard(in_box: InBox, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(box: Any) -> None:
        answers: list[tuple[bool, str]] = []
        read = box.store.written.unused_written

        async def asked_meanwhile(rows: int, base_sha256: str) -> Any:
            found = await read(rows, base_sha256)
            if not answers:
                answers.append((False, "not asked yet"))
                answers[0] = await box.learner.ask()
            return found

        await box.rate(1.0, -1.0, 1.0)
        monkeypatch.setattr(box.store.written, "unused_written", asked_meanwhile)
        async with running(box):
            await box.until(lambda: bool(box.finished))
        assert answers == [(True, "3 new ratings")]

    in_box(scenario)


def test_who_asks_during_an_update_is_told_to_come_back(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.worker.behaviours.append("hang")
        async with running(box):
            await box.rate(*UP_AND_DOWN)
            await box.until(lambda: box.learner.state == "training")
            accepted, why = await box.learner.ask()
            assert (accepted, why) == (False, "update 1 makes v1; ask again when it is done")

    in_box(scenario)


def test_a_reference_that_is_not_on_this_box_stops_learning(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.reference = 7
        async with running(box):
            await box.rate(*UP_AND_DOWN)
            await box.until(lambda: box.learner.state == "paused")
            assert "version 7 (learn.reference)" in box.learner.why

    in_box(scenario)


# ------------------------------------------------------------------------------------------------ starts, failures


def test_no_job_is_written_before_the_serve_worker_has_given_the_probes(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.probes = ()
        jobs = keep_jobs(box)
        await box.rate(*UP_AND_DOWN)
        async with running(box):
            await box.until(lambda: box.learner.why == "the serve worker is starting")
            assert box.learner.due, "practice must not take the box now"
            assert await box.store.updates.list(1) == []
            box.probes = box.PROBES
            await box.until(lambda: bool(box.finished))
        assert jobs[0].probes == box.PROBES
        assert box.finished[0].verdict == "published"

    in_box(scenario)


def test_an_unfinished_update_is_carried_at_the_start(in_box: InBox) -> None:
    async def killed(box: Any) -> None:
        box.worker.behaviours.append("hang")
        await box.rate(*UP_AND_DOWN)
        async with running(box):
            await box.until(lambda: bool(box.worker.trained))

    async def restarted(box: Any) -> None:
        job = job_of(box)
        jobs = keep_jobs(box)
        await learned(box)
        assert jobs == [job]
        assert (box.finished[0].id, box.finished[0].verdict, box.finished[0].attempts) == (1, "published", 0)
        assert len(await box.store.updates.list(10)) == 1

    in_box(killed)
    in_box(restarted)


def test_an_update_that_was_cut_off_before_its_job_was_written_gives_its_ratings_back(in_box: InBox) -> None:
    async def killed(box: Any) -> None:
        await box.rate(*UP_AND_DOWN)
        chosen = await box.store.feedback.unused_rated(100)
        await box.store.updates.create(
            parent_version=0,
            seed=1,
            new_episode_ids=[choice.episode_id for choice in chosen],
            replay_episode_ids=[],
            new_feedback_ids=[choice.feedback_id for choice in chosen],
            now=10.0,
        )

    async def restarted(box: Any) -> None:
        await learned(box, 2)
        assert [(update.verdict, update.version) for update in box.finished] == [("skipped", 1), ("published", 2)]

    in_box(killed)
    in_box(restarted)


@pytest.mark.parametrize("damage", [b"", b"\x81\xa1x\x01"])
def test_an_update_whose_job_cannot_be_read_gives_its_ratings_back(in_box: InBox, damage: bytes) -> None:
    async def killed(box: Any) -> None:
        update, _ = await box.plan(16)
        (box.folders.job(update.id) / protocol.JOB_FILE).write_bytes(damage)

    async def restarted(box: Any) -> None:
        await learned(box, 2)
        assert [update.verdict for update in box.finished] == ["skipped", "published"]
        assert "job" in box.finished[0].reason
        assert list(box.folders.spool.iterdir()) == []

    in_box(killed)
    in_box(restarted)


def test_a_trainer_that_cannot_run_leaves_the_ratings_and_is_not_tried_again_at_once(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.worker.fault = protocol.Fault(code="model_unreadable", message="the model file is truncated")
        async with running(box):
            await box.rate(*UP_AND_DOWN)
            await box.until(lambda: bool(box.finished))
            starts = box.worker.starts_total
            await box.rate(1.0)
            await box.until(lambda: box.learner.state == "paused")
            assert box.learner.why == (
                "the train worker cannot run: the model file is truncated; it is tried again later"
            )
            assert box.worker.starts_total == starts
        assert [update.verdict for update in box.finished] == ["skipped"]
        assert "the train worker cannot run: the model file is truncated" in box.finished[0].reason
        assert await box.unused() == 17
        assert list(box.folders.spool.iterdir()) == []

    in_box(scenario)


def test_an_update_that_the_machine_could_not_make_leaves_the_ratings_and_waits(
    in_box: InBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updating, "TRAINING_PAUSE_S", 0.0)

    async def scenario(box: Any) -> None:
        box.worker.behaviours.extend(["disk_full"] * 3)
        async with running(box):
            await box.rate(*UP_AND_DOWN)
            await box.until(lambda: bool(box.finished) and box.learner.state == "paused")
            assert "is the disk full?" in box.learner.why
            assert (box.finished[0].verdict, await box.unused()) == ("skipped", 16)
            assert list(box.folders.spool.iterdir()) == []
            assert await box.learner.ask() == (True, "16 new ratings")
            await box.until(lambda: len(box.finished) == 2)
        assert (box.finished[1].verdict, await box.unused()) == ("published", 0)

    in_box(scenario)


@pytest.mark.parametrize("clock_goes_back_s", [0.0, 86_400.0])
def test_a_trainer_that_can_run_again_is_used_after_the_hold(
    in_box: InBox, monkeypatch: pytest.MonkeyPatch, clock_goes_back_s: float
) -> None:
    monkeypatch.setattr(learner_module, "HOLD_MAX_S", 0.05)
    wall = time.time

    async def scenario(box: Any) -> None:
        box.learner._hold_s = 0.05
        box.worker.fault = protocol.Fault(code="out_of_memory", message="no memory")
        async with running(box):
            await box.rate(*UP_AND_DOWN)
            await box.until(lambda: bool(box.finished))
            monkeypatch.setattr(time, "time", lambda: wall() - clock_goes_back_s)
            box.worker.fault = None
            await box.until(lambda: box.finished[-1].verdict == "published")

    in_box(scenario)


def test_no_update_is_planned_on_a_live_version_without_files(in_box: InBox, tmp_path: Path) -> None:
    async def scenario(box: Any) -> None:
        async with running(box):
            await box.rate(*UP_AND_DOWN)
            await box.until(lambda: bool(box.finished))
            folder = box.folders.versions()[1]
            folder.rename(tmp_path / "elsewhere")
            await box.rate(*UP_AND_DOWN)
            await box.until(lambda: box.learner.state == "paused")
            assert "the files of v1, which is live, are gone" in box.learner.why
            (tmp_path / "elsewhere").rename(folder)
            box.learner.wake()
            await box.until(lambda: len(box.finished) == 2)
        assert [(update.version, update.verdict) for update in box.finished] == [(1, "published"), (2, "published")]

    in_box(scenario)


def test_who_asks_ends_the_hold(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.worker.fault = protocol.Fault(code="out_of_memory", message="no memory")
        async with running(box):
            await box.rate(*UP_AND_DOWN)
            await box.until(lambda: box.learner.state == "paused")
            box.worker.fault = None
            assert await box.learner.ask() == (True, "16 new ratings")
            await box.until(lambda: len(box.finished) == 2)
        assert [update.verdict for update in box.finished] == ["skipped", "published"]

    in_box(scenario)


def test_episodes_that_are_deleted_while_an_update_is_planned_are_left_out(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        jobs = keep_jobs(box)
        await box.rate(1.0, -1.0, user="ann")
        await box.rate(*UP_AND_DOWN[:14])
        create = box.store.updates.create

        async def create_late(**values: Any) -> Any:
            await box.store.episodes.delete_user("ann", caller=box.OPERATOR)
            return await create(**values)

        box.store.updates.create = create_late
        await learned(box)
        assert box.finished[0].verdict == "published"
        assert [rated.reward for rated in jobs[0].episodes] == UP_AND_DOWN[:14]

    in_box(scenario)


def test_every_change_of_state_is_told(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        seen: list[str] = []
        box.learner._on_change = lambda: seen.append(box.learner.state)
        await box.rate(*UP_AND_DOWN)
        async with running(box):
            await box.until(lambda: bool(box.finished))
            await box.until(lambda: box.learner.state == "idle")
        assert seen == ["training", "gating", "idle"]

    in_box(scenario)


def test_ratings_that_come_during_an_update_count_towards_the_next(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.worker.behaviours.append("hang")
        await box.rate(*UP_AND_DOWN)
        async with running(box):
            await box.until(lambda: bool(box.worker.trained))
            await box.until(lambda: box.learner.ratings_until_update == 16)
            await box.rate(*UP_AND_DOWN[:5])
            await box.until(lambda: box.learner.ratings_until_update == 11)
            assert box.learner.state == "training"

    in_box(scenario)


async def write(box: Any) -> None:
    """Store a pair and a correction, with their tokens: rows 1 and 2."""
    await box.store.feedback.prefer(
        Preference(
            id="",
            messages=[{"role": "user", "content": "Why?"}],
            chosen="Because.",
            rejected="No.",
            user="ann",
            caller="uid:1000",
            created_at=1.0,
        )
    )
    completion_id, _ = await box.answer(temperature=0.7)
    correction = dataclasses.replace(box.feedback_on(completion_id), rating=None, correction="So.")
    await box.store.feedback.add(correction, idempotency_key=None)
    for row in (1, 2):
        await box.store.written.set_tokens(
            row, base_sha256=box.BASE_SHA256, prompt_ids=(1, 2), chosen_ids=(7, 8), rejected_ids=(9,)
        )


def test_pairs_and_corrections_reach_the_job_and_count_as_used(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.objectives = {"ppo": 1.0, "dpo": 0.5, "sft": 0.1}
        jobs = keep_jobs(box)
        await box.rate(*UP_AND_DOWN)
        await write(box)
        await learned(box)
        (job,) = jobs
        pairs = [(pair.chosen, pair.rejected) for pair in job.pairs]
        assert [(one.prompt_ids, one.completion_ids, two.completion_ids) for one, two in pairs] == [
            ((1, 2), (7, 8), (9,)),
            ((1, 2, 3), (7, 8), (4, 5)),
        ]
        assert [one.episode_id for pair in pairs for one in pair] == [-2, -3, -4, -5]
        assert all(one.temperature == 1.0 and set(one.logprobs) == {None} for pair in pairs for one in pair)
        assert [one.completion_ids for one in job.corrections] == [(7, 8)]
        used = await box.store.written.used_written(10, box.BASE_SHA256)
        assert {one.used_by for one in used} == {box.finished[0].id}
        async with running(box):
            await box.until(lambda: box.learner.written.pairs_used == 1)
        assert box.learner.written.corrections_used == 1

    in_box(scenario)


def test_a_pair_alone_makes_an_update_when_somebody_asks(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.objectives = {"dpo": 1.0}
        box.worker.metrics = {"reward/mean": 0.0}  # without a rated answer nobody knows how far it moved
        await write(box)
        assert await box.learner.ask() == (True, "2 new pairs and corrections")
        async with running(box):
            await box.until(lambda: bool(box.finished) and box.learner.state == "idle")
            assert box.finished[0].verdict == "published"
            assert await box.learner.ask() == (False, "no new ratings")

    in_box(scenario)


def test_without_their_objectives_pairs_and_corrections_wait(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        jobs = keep_jobs(box)
        await box.rate(*UP_AND_DOWN)
        await write(box)
        await learned(box)
        assert (jobs[0].pairs, jobs[0].corrections) == ((), ())
        assert len(await box.store.written.unused_written(10, box.BASE_SHA256)) == 2

    in_box(scenario)


def test_a_correction_is_found_behind_pairs_that_no_objective_feeds_on_new_and_replayed(
    in_box: InBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_module, "ROWS", 2)

    async def scenario(box: Any) -> None:
        box.worker.metrics = {"reward/mean": 0.0}
        box.rules = dataclasses.replace(box.rules, max_wait_s=0.0)
        jobs = keep_jobs(box)
        preference = Preference(
            id="",
            messages=[{"role": "user", "content": "Why?"}],
            chosen="Because.",
            rejected="No.",
            user="ann",
            caller="uid:1000",
            created_at=1.0,
        )

        async def corrected(row: int) -> None:
            completion_id, _ = await box.answer()
            correction = dataclasses.replace(box.feedback_on(completion_id), rating=None, correction="So.")
            await box.store.feedback.add(correction, idempotency_key=None)
            await tokenised(row)

        async def tokenised(row: int) -> None:
            await box.store.written.set_tokens(
                row, base_sha256=box.BASE_SHA256, prompt_ids=(1, 2), chosen_ids=(7, 8), rejected_ids=(9,)
            )

        for row in range(1, 8):
            await box.store.feedback.prefer(preference)
            await tokenised(row)
        box.objectives = {"sft": 1.0}
        await corrected(8)
        await learned(box)
        box.objectives = {"dpo": 1.0}
        await learned(box, 2)
        assert [len(job.pairs) for job in jobs] == [0, 8], "the correction is a pair too, and replayed"
        box.objectives = {"sft": 1.0}
        await corrected(9)
        await corrected(10)
        await learned(box, 3)
        assert len(jobs[2].corrections) == 3, "two are new, and one is replayed from behind the pairs"

    in_box(scenario)


def test_what_the_removed_user_wrote_leaves_the_job_under_way(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.objectives = {"ppo": 1.0, "dpo": 0.5}
        box.worker.behaviours.append("hang")
        await box.rate(*UP_AND_DOWN)
        await write(box)
        async with running(box):
            await box.until(lambda: bool(box.worker.trained))
            assert len(job_of(box).pairs) == 2
            await box.store.episodes.delete_user("ann", caller=box.OPERATOR)
            await forget_removed(box.store.episodes, box.store.written, box.folders)
        assert [pair.chosen.episode_id for pair in job_of(box).pairs] == [-4]

    in_box(scenario)


def test_an_update_whose_answers_are_all_removed_is_skipped_and_trains_nothing(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.worker.behaviours.append("hang")
        await box.rate(*UP_AND_DOWN, user="ann")
        async with running(box):
            await box.until(lambda: bool(box.worker.trained))
        await box.store.episodes.delete_user("ann", caller=box.OPERATOR)
        trained = len(box.worker.trained)
        async with running(box):
            await box.until(lambda: bool(box.finished))
        assert [(update.verdict, update.reason) for update in box.finished] == [
            ("skipped", "all that it was to learn from was removed")
        ]
        assert len(box.worker.trained) == trained

    in_box(scenario)


def test_kto_gets_greedy_answers_without_a_sampler(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.objectives = {"ppo": 1.0, "kto": 0.5}
        jobs = keep_jobs(box)
        await box.rate(*UP_AND_DOWN[:14])
        await box.rate(1.0, temperature=0.0)
        await box.rate(-1.0, top_p=0.5)
        await learned(box)
        sampled = [set(rated.episode.logprobs) for rated in jobs[0].episodes]
        assert sampled == [{-0.5, -0.25}] * 14 + [{None}] * 2
        assert box.store.feedback.drop_counts() == {}

    in_box(scenario)
