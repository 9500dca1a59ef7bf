"""Scoring ahead: hand episodes to the trainer when they end, not when an update needs them.

While the train worker runs, the newest unscored episodes go to it in small groups; it keeps what it computed (trunk
features, old and reference log-probabilities) for the update to come, and what it says of an episode is stored. It
never starts the worker, and an update waits for at most one group.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from edged.failure import JobRefused, WorkerLost
from edged.learn.folders import Folders
from edged.learn.ports import EpisodeShelf
from edged.learn.trainer import Trainer
from edged.records import Episode, EpisodeScore
from engine import protocol

log = logging.getLogger(__name__)

GROUP_EPISODES = 4
POLL_S = 30.0  # a safety net: every event that matters also wakes the loop


class Scorer:
    """Scores episodes while the trainer runs. `wake` after a new episode, and when the trainer got ready."""

    def __init__(
        self,
        trainer: Trainer,
        episodes: EpisodeShelf,
        folders: Folders,
        *,
        base_sha256: str,
        versions: Callable[[], Awaitable[frozenset[int]]],
        reference: Callable[[], int],
    ) -> None:
        """versions: those whose answers may be trained on. reference: the one that the KL penalty pulls towards."""
        self._trainer = trainer
        self._episodes = episodes
        self._folders = folders
        self._base_sha256 = base_sha256
        self._worth_scoring = versions
        self._reference = reference
        self._awake = asyncio.Event()
        self._unscorable: set[int] = set()

    def wake(self) -> None:
        self._awake.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._awake.clear()
            if not (self._trainer.is_ready and await self._score_group()):
                await self._sleep()

    async def _sleep(self) -> None:
        try:
            async with asyncio.timeout(POLL_S):
                await self._awake.wait()
        except TimeoutError:
            return

    async def _score_group(self) -> bool:
        """Score one group; False if there was nothing to do or the trainer went away."""
        wanted = GROUP_EPISODES + len(self._unscorable)
        found = await self._episodes.unscored(wanted, await self._worth_scoring(), base_sha256=self._base_sha256)
        versions = await asyncio.to_thread(self._folders.versions)
        group = [
            episode
            for episode in found
            if episode.id not in self._unscorable and (episode.version == 0 or episode.version in versions)
        ][:GROUP_EPISODES]
        reference = self._reference()
        if not group or (reference and reference not in versions):
            return False
        try:
            scores = await self._trainer.score(
                tuple(tokens_of(episode, self._folders.reference_to(episode.version, versions)) for episode in group),
                self._folders.reference_to(reference, versions),
            )
        except WorkerLost:
            return False
        except JobRefused as refused:
            log.warning("episodes %s cannot be scored: %s", [episode.id for episode in group], refused)
            self._unscorable |= {episode.id for episode in group}
            return True
        answered = {score.episode_id for score in scores}
        self._unscorable |= {episode.id for episode in group} - answered
        await self._episodes.set_scores(
            [
                EpisodeScore(
                    episode_id=score.episode_id,
                    reference_version=reference,
                    reference_logprob=score.reference_logprob,
                    kl=score.kl,
                    engine_gap=score.engine_gap,
                )
                for score in scores
            ]
        )
        return True


def tokens_of(episode: Episode, adapter: protocol.AdapterRef) -> protocol.EpisodeTokens:
    """What the trainer sees of a stored episode; `adapter` is the one that sampled it."""
    return protocol.EpisodeTokens(
        episode_id=episode.id,
        prompt_ids=episode.prompt_ids,
        completion_ids=episode.completion_ids,
        logprobs=episode.logprobs,
        temperature=episode.temperature,
        adapter=adapter,
    )
