"""Jobs of unfinished updates lose what was removed from the store: while they are trained, and after a crash."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from edged.learn.forgetting import forget_removed, without_removed
from edged.learn.scoring import tokens_of
from engine import protocol

InBox = Callable[[Callable[[Any], Awaitable[None]]], None]


def ids_in(box: Any, update_id: int) -> list[int]:
    """The episodes of an update's job as it is on disk."""
    return [rated.episode.episode_id for rated in box.folders.read_job(update_id).episodes]


async def planned(box: Any) -> list[int]:
    """Update 1 with a job of two episodes of ann and two of bob on disk; the episodes' ids, ann's first."""
    update, job = await box.plan()
    base = protocol.AdapterRef(version=0, folder=None)
    ids = [(await box.answer(user=user))[1] for user in ("ann", "ann", "bob", "bob")]
    tokens = [tokens_of(episode, base) for episode in await box.store.episodes.get(ids)]
    box.folders.replace_job(
        update.id,
        dataclasses.replace(
            job,
            episodes=tuple(protocol.RatedEpisode(episode=one, reward=0.5, replay=False) for one in tokens),
            pairs=(
                protocol.PreferredPair(chosen=tokens[0], rejected=tokens[2]),
                protocol.PreferredPair(chosen=tokens[3], rejected=tokens[2]),
            ),
        ),
    )
    return ids


def test_removed_episodes_leave_the_jobs_in_the_spool(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        ids = await planned(box)
        await box.store.episodes.delete_user("ann", caller=box.OPERATOR)
        await forget_removed(box.store.episodes, box.store.written, box.folders)
        assert ids_in(box, 1) == ids[2:]
        (pair,) = box.folders.read_job(1).pairs
        assert pair.chosen.episode_id == ids[3]

    in_box(scenario)


def test_a_job_of_which_nothing_was_removed_stays_as_it_is(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        await planned(box)
        file = box.folders.job(1) / protocol.JOB_FILE
        before = file.stat().st_ino
        await forget_removed(box.store.episodes, box.store.written, box.folders)
        assert file.stat().st_ino == before

    in_box(scenario)


def test_a_damaged_job_does_not_keep_the_others_from_being_looked_through(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        ids = await planned(box)
        damaged = box.folders.job(0)
        damaged.mkdir()
        (damaged / protocol.JOB_FILE).write_bytes(b"\xc1")
        await box.store.episodes.delete_user("ann", caller=box.OPERATOR)
        await forget_removed(box.store.episodes, box.store.written, box.folders)
        assert ids_in(box, 1) == ids[2:]

    in_box(scenario)


def test_a_job_that_was_finished_meanwhile_is_not_written_again(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        ids = await planned(box)
        job = box.folders.read_job(1)
        await box.store.episodes.delete_user("ann", caller=box.OPERATOR)
        box.folders.clear_job(1)
        left = await without_removed(1, job, box.store.episodes, box.store.written, box.folders)
        assert [rated.episode.episode_id for rated in left.episodes] == ids[2:]
        assert not box.folders.job(1).exists()

    in_box(scenario)


def test_after_a_crash_between_removal_and_job_the_trainer_gets_the_job_without_them(in_box: InBox) -> None:
    ids: list[int] = []

    async def crashed(box: Any) -> None:
        ids.extend(await planned(box))
        await box.store.episodes.delete_user("ann", caller=box.OPERATOR)

    in_box(crashed)

    async def next_start(box: Any) -> None:
        box.worker.behaviours.append("hang")
        learner = asyncio.create_task(box.learner.run())
        await box.until(lambda: bool(box.worker.trained))
        assert ids_in(box, 1) == ids[2:]
        learner.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await learner

    in_box(next_start)
