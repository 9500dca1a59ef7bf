"""What was removed from the store leaves the jobs of unfinished updates too.

A job holds the token ids of its episodes. Who removes episodes has the jobs in the spool looked through, and a job is
looked at once more before it is carried: it may have been written while episodes were being removed, or a crash may
have come between. A trainer that has read its job already goes on with what it read.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging

from edged.learn.folders import Folders
from edged.learn.ports import EpisodeShelf
from engine import protocol

log = logging.getLogger(__name__)


async def without_removed(
    update_id: int, job: protocol.TrainJob, episodes: EpisodeShelf, folders: Folders
) -> protocol.TrainJob:
    """The job without the episodes that are no longer in the store; on disk too."""
    asked = {rated.episode.episode_id for rated in job.episodes}
    for pair in job.pairs:
        asked |= {pair.chosen.episode_id, pair.rejected.episode_id}
    asked = {episode_id for episode_id in asked if episode_id > 0}  # the others were never episodes of the store
    removed = asked - {episode.id for episode in await episodes.get(sorted(asked))}
    if not removed:
        return job
    left = dataclasses.replace(
        job,
        episodes=tuple(rated for rated in job.episodes if rated.episode.episode_id not in removed),
        pairs=tuple(pair for pair in job.pairs if not removed & {pair.chosen.episode_id, pair.rejected.episode_id}),
    )
    await asyncio.to_thread(folders.replace_job, update_id, left)
    log.info("update %d: %d of its episodes were removed from the store, and from its job", update_id, len(removed))
    return left


async def forget_removed(episodes: EpisodeShelf, folders: Folders) -> None:
    """Look through all jobs in the spool. A damaged one is left to whoever carries it."""
    for update_id in await asyncio.to_thread(folders.jobs):
        try:
            job = await asyncio.to_thread(folders.read_job, update_id)
        except protocol.WireError:
            continue
        if job is not None:
            await without_removed(update_id, job, episodes, folders)
