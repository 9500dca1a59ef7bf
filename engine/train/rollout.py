"""What an update knows of its answers before the first step: which can be used, and everything about them that stays.

Nothing here has a gradient. Everything is a function of the job, whatever was scored ahead.

Dimension letters: R tokens of one completion, T tokens of a whole episode, D width of the stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from engine.lora import Lora
from engine.protocol import EpisodeTokens, RatedEpisode, TrainJob
from engine.train.batch import Selection
from engine.train.logprobs import TokenMeasure
from engine.train.objectives.objective import Batch, Rollout
from engine.train.scorer import Scorer
from engine.train.sequence_filter import sort_out

# Ids of answers behind another answer's prompt: below those that the daemon gives to written answers.
FIRST_MISMATCHED_ID = -(1 << 48)


@dataclasses.dataclass(frozen=True, slots=True)
class Gathered:
    """sampled: what policy gradients learn from, and thumbs: what KTO learns from, each with its `rated` and the pairs
    and corrections of the job. left_out: reason -> answers that are in neither, by the sequence filter."""

    sampled: Batch
    thumbs: Batch
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def texts(self) -> tuple[Rollout, ...]:
        """What people wrote or compared: the members of pairs, and corrections."""
        return (*(one for pair in self.sampled.pairs for one in pair), *self.sampled.corrections)

    @property
    def answers(self) -> tuple[Rollout, ...]:
        """Every rated answer, once."""
        alone = [rollout for rollout in self.thumbs.rated if rollout.behaviour is None]
        return (*self.sampled.rated, *alone) if self.sampled.rated else self.thumbs.rated


def gather(
    job: TrainJob, selection: Selection, lora: Lora, scorer: Scorer, tick: Callable[[], None], *, mismatched: bool
) -> Gathered:
    """Everything about the answers that does not change during the update. Raises EngineFault.

    Args:
        mismatched: whether KTO's reference point is wanted.
    """
    rated = [one.episode for one in (*selection.sampled, *selection.unsampled)]
    paired = [member for pair in selection.pairs for member in (pair.chosen, pair.rejected)]
    rollouts = _rollouts(job, [*rated, *paired, *selection.corrections], lora, scorer, tick)
    remaining = iter(rollouts)
    sampled = tuple(_with_rating(next(remaining), one, sampled=True) for one in selection.sampled)
    unsampled = tuple(_with_rating(next(remaining), one, sampled=False) for one in selection.unsampled)
    members = [next(remaining) for _ in paired]
    pairs = tuple(zip(members[0::2], members[1::2], strict=True))
    corrections = tuple(remaining)
    left_out: Mapping[str, int] = {}
    if not selection.thumbs_take_all:  # thumbs need no sampler, so it is nothing to them what the sampler was
        sampled, left_out = sort_out(sampled, job.noise, job.ppo.drift_max)
    batch = Batch(rated=sampled, pairs=pairs, corrections=corrections)
    # Answers that a policy gradient learns from are not judged by KTO as well.
    of_thumbs = (*selection.sampled, *selection.unsampled) if selection.thumbs_take_all else selection.unsampled
    liked = (*sampled, *unsampled) if selection.thumbs_take_all else unsampled
    distances = _mismatched(job, [one.episode for one in of_thumbs], scorer, tick) if mismatched else ()
    return Gathered(
        sampled=dataclasses.replace(batch, rated=() if selection.thumbs_take_all else sampled),
        thumbs=dataclasses.replace(batch, rated=liked, mismatched=distances),
        left_out=left_out,
    )


def _rollouts(
    job: TrainJob, episodes: Sequence[EpisodeTokens], lora: Lora, scorer: Scorer, tick: Callable[[], None]
) -> list[Rollout]:
    scorer.remember(episodes, [scorer.first_layer(lora)] * len(episodes), tick)
    parent, reference = _under_both(job, episodes, scorer, tick)
    return [
        Rollout(
            prompt_ids=episode.prompt_ids,
            tokens=torch.tensor(episode.completion_ids, dtype=torch.int64, device=scorer.base.device),
            temperature=episode.temperature or 1.0,
            reward=0.0,
            replay=False,
            group="",
            trunk=scorer.trunk(episode, lora),
            features=scorer.features(episode),
            on_policy=episode.adapter.version == job.parent.version,
            behaviour=None,
            parent=parent_.scaled,
            reference=reference_.scaled,
            entropy=parent_.entropy,
        )
        for episode, parent_, reference_ in zip(episodes, parent, reference, strict=True)
    ]


def _with_rating(rollout: Rollout, rated: RatedEpisode, *, sampled: bool) -> Rollout:
    behaviour = None
    if sampled:
        behaviour = torch.tensor(rated.episode.logprobs, dtype=torch.float32, device=rollout.parent.device)
    return dataclasses.replace(
        rollout, reward=rated.reward, replay=rated.replay, group=rated.group, behaviour=behaviour
    )


def _under_both(
    job: TrainJob, episodes: Sequence[EpisodeTokens], scorer: Scorer, tick: Callable[[], None]
) -> tuple[list[TokenMeasure], list[TokenMeasure]]:
    own = scorer.measuring(episodes, [job.parent] * len(episodes), tick, "actor")
    if job.reference.version == job.parent.version:
        both = own()
        return both, both
    referred = scorer.measuring(episodes, [job.reference] * len(episodes), tick, "reference")
    return own(), referred()


def mismatched_answers(episodes: Sequence[EpisodeTokens]) -> tuple[EpisodeTokens, ...]:
    """Each answer behind the next prompt that is not its own, with a number of its own; () where all prompts are one.

    The prompts are those of the answers in their order, the first behind the last. An answer behind its own would be no
    mismatch: of groups of answers to one prompt that would be most of them.
    """
    prompts = [one.prompt_ids for one in episodes]
    if len(set(prompts)) < 2:
        return ()
    return tuple(
        dataclasses.replace(answer, episode_id=FIRST_MISMATCHED_ID - i, prompt_ids=_next_other(prompts, i))
        for i, answer in enumerate(episodes)
    )


def _next_other(prompts: Sequence[tuple[int, ...]], at: int) -> tuple[int, ...]:
    return next(other for other in (*prompts[at + 1 :], *prompts[:at]) if other != prompts[at])


def _mismatched(
    job: TrainJob, episodes: Sequence[EpisodeTokens], scorer: Scorer, tick: Callable[[], None]
) -> tuple[float, ...]:
    """log(pi_parent / pi_reference) of each of the mismatched answers."""
    shifted = mismatched_answers(episodes)
    if not shifted:
        return ()
    parent, reference = _under_both(job, shifted, scorer, tick)
    return tuple(float((p.scaled - r.scaled).sum()) for p, r in zip(parent, reference, strict=True))
