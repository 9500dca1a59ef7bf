"""Which episodes of a job can be trained on, and how they are cut into optimizer steps and micro-batches.

Pure: the same job gives the same batch, and nothing here depends on threads, devices or what was computed before. An
episode that is left out is counted under a reason; nothing is repaired (a missing log-probability never becomes 0).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch

from engine.protocol import RatedEpisode

# Tokens, prompts included, that go through the network together. Bounds the activations; large enough that products of
# a small model are efficient.
MICRO_BATCH_TOKENS = 640


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """used: the trainable episodes, in the job's order. dropped: reason -> how many were left out."""

    used: tuple[RatedEpisode, ...]
    dropped: dict[str, int]


def select(episodes: Sequence[RatedEpisode], n_vocab: int) -> Selection:
    """Sort out what PPO cannot use."""
    used: list[RatedEpisode] = []
    dropped: collections.Counter[str] = collections.Counter()
    seen: set[int] = set()
    for rated in episodes:
        reason = unusable(rated, n_vocab)
        if reason is None and rated.episode.episode_id in seen:
            reason = "repeated"
        if reason is None:
            seen.add(rated.episode.episode_id)
            used.append(rated)
        else:
            dropped[reason] += 1
    return Selection(tuple(used), dict(dropped))


def unusable(rated: RatedEpisode, n_vocab: int) -> str | None:
    """Why an episode cannot be trained on, or None. Reasons are stable words, for counters."""
    episode = rated.episode
    if not episode.prompt_ids:
        return "no_prompt"
    if not episode.completion_ids:
        return "empty"
    if not all(0 <= token < n_vocab for token in episode.prompt_ids + episode.completion_ids):
        return "unknown_token"
    if not math.isfinite(rated.reward):
        return "reward_not_finite"
    if not (math.isfinite(episode.temperature) and episode.temperature > 0):
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


def split_micro_batches(lengths: Sequence[int]) -> list[list[int]]:
    """Cut one optimizer step into micro-batches of about equal size; positions in `lengths` (tokens of each episode).

    An even number of them where there are episodes enough, so that two lanes finish together. An episode is never cut:
    one longer than MICRO_BATCH_TOKENS is a micro-batch of its own size.
    """
    if not lengths:
        return []
    n = math.ceil(sum(lengths) / MICRO_BATCH_TOKENS)
    n = min(n + n % 2, len(lengths))
    bins: list[list[int]] = [[] for _ in range(n)]
    loads = [0] * n
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        lightest = loads.index(min(loads))
        bins[lightest].append(i)
        loads[lightest] += lengths[i]
    return [sorted(one) for one in bins if one]
