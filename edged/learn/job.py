"""What a training job is made of: everything that an update depends on, from what the store and the folders hold.

Pure. Gathering it is the work of `edged.learn.learner`, writing it down that of `edged.learn.folders`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence

from edged.learn import plan, reward
from edged.learn.scoring import tokens_of
from edged.learn.written import pairs_and_corrections, without_sampler
from edged.records import Episode, RatedChoice, Update, WrittenTokens
from engine import protocol


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LearnSettings:
    """What `[learn]`, `[lora]` and `[reward]` say, resolved for this model and machine."""

    enabled: bool
    rules: plan.Rules
    objectives: dict[str, float]
    ppo: protocol.PpoSettings
    preference: protocol.PreferenceSettings
    lora: protocol.LoraSettings
    reference: int
    reward_clip: float
    seed: int
    threads: int
    plan: protocol.TrainPlan = dataclasses.field(default_factory=protocol.TrainPlan)


def make_job(
    update: Update,
    settings: LearnSettings,
    view: plan.View,
    *,
    batch: Sequence[RatedChoice],
    replayed: Sequence[RatedChoice],
    episodes: Mapping[int, Episode],
    written: Sequence[WrittenTokens],
    adapter_of: Callable[[int], protocol.AdapterRef],
    checkpoint: str | None,
    probes: tuple[protocol.ProbeTokens, ...],
    noise: protocol.EngineNoise | None,
    base_sha256: str,
) -> protocol.TrainJob:
    """The job of `update`.

    Args:
        episodes: of the choices, by id; one that was deleted meanwhile is left out of the job.
        adapter_of: version -> where its adapter lies.
    """
    pairs, corrections = pairs_and_corrections(written, settings.rules)

    for_thumbs = _for_thumbs((*batch, *replayed), episodes, view, settings.rules)

    def tokens(choice: RatedChoice, episode: Episode) -> protocol.EpisodeTokens:
        if choice.episode_id in for_thumbs:
            return without_sampler(tokens_of(episode, protocol.BASE))
        return tokens_of(episode, adapter_of(choice.version))

    return protocol.TrainJob(
        job_id=f"update-{update.id}",
        version=update.version,
        parent=adapter_of(update.parent_version),
        reference=adapter_of(settings.reference),
        checkpoint=checkpoint,
        episodes=tuple(
            protocol.RatedEpisode(
                episode=tokens(choice, episodes[choice.episode_id]),
                reward=reward.reward_of(choice.rating, clip=settings.reward_clip),
                replay=index >= len(batch),
                group=group_of(episodes[choice.episode_id]),
            )
            for index, choice in enumerate((*batch, *replayed))
            if choice.episode_id in episodes
        ),
        probes=probes,
        objectives=settings.objectives,
        pairs=pairs,
        corrections=corrections,
        ppo=settings.ppo,
        preference=settings.preference,
        noise=noise,
        lora=settings.lora,
        seed=update.seed,
        threads=settings.threads,
        plan=settings.plan,
        base_sha256=base_sha256,
        created_at=update.created_at,
    )


def _for_thumbs(
    choices: Sequence[RatedChoice], episodes: Mapping[int, Episode], view: plan.View, rules: plan.Rules
) -> set[int]:
    """Ids of the choices that a policy gradient cannot use; where it compares groups, and KTO is there for the others,
    also of those that have nothing beside them."""
    fit = [choice for choice in choices if plan.unfit_for_policy(choice, view, rules) is None]
    if rules.compares_groups and "thumbs" in rules.feeds:
        there = [choice for choice in fit if choice.episode_id in episodes]
        grouped = [dataclasses.replace(one, group=group_of(episodes[one.episode_id])) for one in there]
        groups_only = dataclasses.replace(rules, feeds=rules.feeds - {"thumbs"})
        fit = [choice for part in plan.comparable(grouped, view, groups_only) for choice in part]
    return {choice.episode_id for choice in choices} - {choice.episode_id for choice in fit}


def group_of(episode: Episode) -> str:
    """What GRPO and RLOO compare: the same for answers to one prompt by one version, such as the choices of a request
    with n above 1."""
    prompt = hashlib.sha256(repr(episode.prompt_ids).encode()).hexdigest()
    return f"v{episode.version}-{prompt[:16]}"
