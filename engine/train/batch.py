"""Which episodes of a job can be trained on, and how they are cut into optimizer steps and micro-batches.

Pure: the same job gives the same batch, and nothing here depends on threads, devices or what was computed before. An
episode that is left out is counted under a reason; nothing is repaired (a missing log-probability never becomes 0).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from engine.protocol import OBJECTIVES, EpisodeTokens, PreferredPair, RatedEpisode, TrainJob

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """What a job's objectives learn from, in the job's order.

    sampled: rated answers with the log-probabilities of a sampler. unsampled: rated answers without: greedy ones, or
    with a log-probability missing. dropped: reason -> how many were left out.
    thumbs_take_all: KTO learns from the sampled ones too, because nothing else in the job does.
    """

    sampled: tuple[RatedEpisode, ...] = ()
    unsampled: tuple[RatedEpisode, ...] = ()
    pairs: tuple[PreferredPair, ...] = ()
    corrections: tuple[EpisodeTokens, ...] = ()
    dropped: Mapping[str, int] = dataclasses.field(default_factory=dict)
    thumbs_take_all: bool = False

    @property
    def episodes(self) -> tuple[EpisodeTokens, ...]:
        """All that goes through the network, in no order that means something; both answers of a pair."""
        rated = (one.episode for one in (*self.sampled, *self.unsampled))
        paired = (one for pair in self.pairs for one in (pair.chosen, pair.rejected))
        return (*rated, *paired, *self.corrections)

    @property
    def empty(self) -> bool:
        return not (self.sampled or self.unsampled or self.pairs or self.corrections)


def select(job: TrainJob, n_vocab: int) -> Selection:
    """Sort out what no objective of the job can use."""
    feeds = {OBJECTIVES[name] for name in job.objectives}
    by_policy, by_thumbs = bool(feeds & {"rated", "groups"}), "thumbs" in feeds
    dropped: collections.Counter[str] = collections.Counter()

    def keep(items: Sequence[T], complaint: Callable[[T], str | None]) -> tuple[T, ...]:
        kept = []
        for item in items:
            if reason := complaint(item):
                dropped[reason] += 1
            else:
                kept.append(item)
        return tuple(kept)

    seen: set[int] = set()

    def about_rated(rated: RatedEpisode) -> str | None:
        reason = unusable(rated, n_vocab) or (None if by_thumbs else without_sampler(rated.episode))
        if reason is None and rated.episode.episode_id in seen:
            reason = "repeated"
        seen.add(rated.episode.episode_id)
        return reason

    rated = keep(job.episodes if by_policy or by_thumbs else (), about_rated)
    return Selection(
        sampled=tuple(one for one in rated if without_sampler(one.episode) is None),
        unsampled=tuple(one for one in rated if without_sampler(one.episode) is not None),
        pairs=keep(job.pairs if "pairs" in feeds else (), lambda pair: unusable_pair(pair, n_vocab)),
        corrections=keep(
            job.corrections if "corrections" in feeds else (), lambda episode: malformed(episode, n_vocab)
        ),
        dropped=dict(dropped),
        thumbs_take_all=by_thumbs and not by_policy,
    )


def unusable_pair(pair: PreferredPair, n_vocab: int) -> str | None:
    """Why a pair cannot be trained on, or None."""
    if pair.chosen.completion_ids == pair.rejected.completion_ids:
        return "equal_answers"
    return malformed(pair.chosen, n_vocab) or malformed(pair.rejected, n_vocab)


def unusable(rated: RatedEpisode, n_vocab: int) -> str | None:
    """Why a rated answer cannot be trained on at all, or None. Reasons are stable words, for counters."""
    if not math.isfinite(rated.reward):
        return "reward_not_finite"
    return malformed(rated.episode, n_vocab)


def malformed(episode: EpisodeTokens, n_vocab: int) -> str | None:
    """What is wrong with an answer's tokens, or None."""
    if not episode.prompt_ids:
        return "no_prompt"
    if not episode.completion_ids:
        return "empty"
    if not all(0 <= token < n_vocab for token in episode.prompt_ids + episode.completion_ids):
        return "unknown_token"
    if not (math.isfinite(episode.temperature) and episode.temperature >= 0):
        return "bad_temperature"
    return None


def without_sampler(episode: EpisodeTokens) -> str | None:
    """Why a policy gradient cannot use an answer that is well formed, or None."""
    if episode.temperature == 0:
        return "greedy"  # no distribution was sampled from
    # Servers report the lowest float for "probability 0", and rounding can give a tiny positive number.
    known = [p for p in episode.logprobs if p is not None and math.isfinite(p) and -1e4 < p < 1e-3]
    if len(known) != len(episode.completion_ids) or len(episode.logprobs) != len(episode.completion_ids):
        return "no_behaviour_logprob"
    return None


def split_minibatches(n_episodes: int, n_minibatches: int, generator: torch.Generator) -> list[list[int]]:
    """Episode numbers of each optimizer step of one epoch: a fresh shuffle, cut into nearly equal parts, none empty."""
    order = torch.randperm(n_episodes, generator=generator).tolist()
    n = min(n_minibatches, n_episodes)
    bounds = [round(i * n_episodes / n) for i in range(n + 1)]
    return [order[start:stop] for start, stop in itertools.pairwise(bounds)]


def split_micro_batches(lengths: Sequence[int], most_tokens: int) -> list[list[int]]:
    """Cut one optimizer step into micro-batches of about equal size; positions in `lengths` (tokens of each episode).

    An even number of them where there are episodes enough, so that two lanes finish together. An episode is never cut:
    one longer than `most_tokens` is a micro-batch of its own size.
    """
    if not lengths:
        return []
    n = math.ceil(sum(lengths) / most_tokens)
    n = min(n + n % 2, len(lengths))
    bins: list[list[int]] = [[] for _ in range(n)]
    loads = [0] * n
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        lightest = loads.index(min(loads))
        bins[lightest].append(i)
        loads[lightest] += lengths[i]
    return [sorted(one) for one in bins if one]
