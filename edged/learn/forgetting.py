"""What was removed from the store leaves the jobs of unfinished updates too.

A job holds the token ids of its episodes, and of what people wrote. Who removes them has the jobs in the spool looked
through, and a job is looked at once more before it is carried: it may have been written while rows were being removed,
or a crash may have come between. A trainer that has read its job already goes on with what it read.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging

from edged.learn.folders import Folders
from edged.learn.ports import EpisodeShelf, WrittenBook
from edged.learn.written import written_id
from engine import protocol

log = logging.getLogger(__name__)


async def without_removed(
    update_id: int, job: protocol.TrainJob, episodes: EpisodeShelf, written: WrittenBook, folders: Folders
) -> protocol.TrainJob:
    """The job without the episodes, pairs and corrections that are no longer in the store; on disk too."""
    removed = await _removed(job, episodes, written)
    if not removed:
        return job
    left = dataclasses.replace(
        job,
        episodes=tuple(rated for rated in job.episodes if rated.episode.episode_id not in removed),
        pairs=tuple(pair for pair in job.pairs if not removed & {pair.chosen.episode_id, pair.rejected.episode_id}),
        corrections=tuple(answer for answer in job.corrections if answer.episode_id not in removed),
    )
    await asyncio.to_thread(folders.replace_job, update_id, left)
    log.info("update %d: %d of its answers were removed from the store, and from its job", update_id, len(removed))
    return left


async def _removed(job: protocol.TrainJob, episodes: EpisodeShelf, written: WrittenBook) -> set[int]:
    """The answers of the job, sampled and written, that the store does not have any more."""
    answers = {rated.episode.episode_id for rated in job.episodes}
    answers |= {answer.episode_id for answer in job.corrections}
    for pair in job.pairs:
        answers |= {pair.chosen.episode_id, pair.rejected.episode_id}
    sampled = {answer for answer in answers if answer > 0}
    rows = {answer: written_id(answer) for answer in answers - sampled}
    there = {episode.id for episode in await episodes.get(sorted(sampled))}
    rows_there = {tokens.id for tokens in await written.tokens(sorted(set(rows.values())))}
    return (sampled - there) | {answer for answer, row in rows.items() if row not in rows_there}


async def forget_removed(episodes: EpisodeShelf, written: WrittenBook, folders: Folders) -> None:
    """Look through all jobs in the spool. A damaged one is left to whoever carries it."""
    for update_id in await asyncio.to_thread(folders.jobs):
        try:
            job = await asyncio.to_thread(folders.read_job, update_id)
        except protocol.WireError:
            continue
        if job is not None:
            await without_removed(update_id, job, episodes, written, folders)
