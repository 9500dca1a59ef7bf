"""One update, read from top to bottom: rated answers, pairs and corrections in, a better adapter and critic out.

    gather      trunk states, parent and reference log-probabilities of every answer (cached where scored ahead); the
                sequence filter leaves out what another policy gave
    value       a fresh critic is fitted to the batch before anything is judged by it (the actor does not move); values
    prepare     each objective of the job makes items with constants of its own (advantages, reference points)
    optimise    epochs x minibatches: the weighted mean losses of the items on the actor, clipped value loss on the
                critic; it ends early when the policy has moved `live_kl_max` away from the parent
    settle      the new policy measured once more over the rated answers; if it went beyond `live_kl_max` in its last
                steps, the move is shortened until it did not. That distance is KL(parent || new), as in TRPO and PPO

The result is a pure function of the job, the parent's and the checkpoint's tensors: same bytes on every replay with the
same threads, whatever was scored ahead. Nothing is written here (`engine.train.job`), and the base never changes.

Departures from the PPO paper: rewards are a person's, one a prompt, on the last token; the critic is apart from the
actor; separate clip bounds; a KL penalty in the loss. And PPO is decoupled: the clip bounds the move away from the
parent, whoever sampled the answer, and a truncated weight parent / behaviour corrects for the sampler (an older
adapter, another engine's rounding). Clipping against the sampler instead would stop a replayed answer from teaching as
soon as the policy has moved by the clip since it was given: with rare liked answers that costs most of the learning.

Dimension letters: N tokens of completions, D width of the stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from engine.lora import Lora
from engine.protocol import TrainJob
from engine.train.batch import Selection, split_micro_batches
from engine.train.course import Course, objective_of, prepare
from engine.train.critic import CriticState, state_of, take_over
from engine.train.figures import age_figures, batch_figures, hindsight, move_share, sampler_figures
from engine.train.forward import completion_states, n_tokens_of, packed_states, tokens_of
from engine.train.learner import Learner, NotFinite, NothingToLearn, SteeredPenalty
from engine.train.logprobs import divergences, measure_tokens
from engine.train.objectives import kl
from engine.train.objectives.objective import Rollout
from engine.train.optimise import Tick, is_finite, optimise
from engine.train.rollout import Gathered, gather
from engine.train.scorer import Scorer
from engine.train.stopwatch import Stopwatch

MAX_SHORTENINGS = 4  # halvings of a move that went too far
# Of the sampled tokens, after weighting. Below it the weights say more about the samplers than the ratings.
EFFECTIVE_SHARE_MIN = 0.3


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """metrics: finite floats by the field's names. skipped: reason -> answers that an objective left out. ahead_s:
    seconds that scoring its answers ahead has taken."""

    metrics: dict[str, float]
    skipped: dict[str, int]
    ahead_s: float


def run_update(
    job: TrainJob, selection: Selection, learner: Learner, scorer: Scorer, tick: Tick, clock: Stopwatch
) -> Outcome:
    """Train `learner` on `selection`, with a lap of `clock` for each stage.

    Raises:
        NothingToLearn: the actor has not moved; its critic may have.
        NotFinite: `learner` is then in an undefined state; throw it away.
        EngineFault: an adapter of an episode cannot be read.
    """
    ahead_s = scorer.scored_ahead_s(selection.episodes)
    began_at = job.ppo.kl_coef
    job = _with_steered_penalty(job, learner)
    gathered = _gather(job, selection, learner, scorer, tick)
    metrics = sampler_figures(gathered.sampled.rated, job.ppo.importance_cap)
    metrics |= batch_figures(gathered.answers, scorer.base.eos_ids) | age_figures(job, selection)
    _check_effective_share(metrics, len(gathered.sampled.rated), gathered.left_out)
    clock.lap("gather")
    course, figures = prepare(job, gathered, learner, scorer, lambda: tick("value", 0, 0))
    metrics |= figures
    clock.lap("value")
    before = [parameter.clone() for parameter in learner.lora.parameters()]
    metrics |= optimise(job, course, learner, scorer, tick)
    clock.lap("optimise")
    metrics |= _look_back(job, gathered, course, learner, before, scorer, tick)
    metrics |= _steer_penalty(job, learner, metrics, began_at)
    clock.lap("measure")
    return Outcome(metrics, dict(course.skipped), ahead_s)


def _look_back(
    job: TrainJob,
    gathered: Gathered,
    course: Course,
    learner: Learner,
    before: Sequence[torch.Tensor],
    scorer: Scorer,
    tick: Tick,
) -> dict[str, float]:
    """What became of actor and critic, which come to where their steps have brought them in every process."""

    def critic() -> tuple[dict[str, float], CriticState]:
        seen = hindsight(learner.critic, course.targets, scorer, lambda: tick("measure", 0, 0))
        return seen, state_of(learner.critic)

    settling = scorer.lanes.on("actor", lambda: settle(job, gathered, learner.lora, before, scorer, tick))
    looking = scorer.lanes.on("critic", critic) if course.targets else None
    metrics = settling()
    metrics["lora/move_share"] = move_share(before, learner.lora.parameters())
    if looking is not None:
        seen, state = looking()
        take_over(learner.critic, state)
        metrics |= seen
    return metrics


def _gather(job: TrainJob, selection: Selection, learner: Learner, scorer: Scorer, tick: Tick) -> Gathered:
    mismatched = any(objective_of(name).uses_mismatched for name in job.objectives)
    return gather(job, selection, learner.lora, scorer, lambda: tick("gather", 0, 0), mismatched=mismatched)


def _check_effective_share(metrics: dict[str, float], n_answers: int, left_out: Mapping[str, int]) -> None:
    share = metrics.get("is/ess", 1.0)
    if share < EFFECTIVE_SHARE_MIN:
        raise NothingToLearn(
            f"after importance weighting the sampled answers are worth {share:.0%} of their tokens, at least "
            f"{EFFECTIVE_SHARE_MIN:.0%} are wanted: they come from another policy",
            {**left_out, "low_effective_share": n_answers},
        )


def _with_steered_penalty(job: TrainJob, learner: Learner) -> TrainJob:
    """The job with the weight that the controller has come to; with its own where that was set anew since."""
    steered = learner.penalty
    if job.ppo.kl_target == 0.0 or steered is None or steered.began_at != job.ppo.kl_coef:
        return job
    return dataclasses.replace(job, ppo=dataclasses.replace(job.ppo, kl_coef=steered.coef))


def _steer_penalty(job: TrainJob, learner: Learner, metrics: dict[str, float], began_at: float) -> dict[str, float]:
    """The weight of the penalty in the next update, by what this one measured.

    Args:
        job: with the weight that was in force. began_at: the setting, at which the controller began.
    """
    if job.ppo.kl_target == 0.0 or "kl/reference" not in metrics:
        return {}
    coef = kl.adapt(job.ppo.kl_coef, metrics["kl/reference"], job.ppo.kl_target, int(metrics["episodes"]))
    learner.penalty = SteeredPenalty(coef, began_at)
    return {"kl/coef": job.ppo.kl_coef}


def settle(
    job: TrainJob,
    gathered: Gathered,
    lora: Lora,
    before: Sequence[torch.Tensor],
    scorer: Scorer,
    tick: Tick,
) -> dict[str, float]:
    """Measure the new policy over the rated answers, and shorten the move while it is beyond `live_kl_max`.

    The distance is KL(parent || policy), because the answers are the parent's. Without rated answers it is measured
    over what people wrote: nobody sampled that, so it is the distance of the whole distributions there, and not an
    estimate from tokens. `kl/reference` is KL(policy || reference), with the same answers as if the policy had given
    them, which holds within `live_kl_max`.
    """
    answers = gathered.answers
    parent = torch.cat([rollout.parent for rollout in answers]) if answers else torch.empty(0)
    share = 1.0
    for attempt in range(MAX_SHORTENINGS + 1):
        if answers:
            logprobs, entropy = measure_policy(answers, lora, scorer, tick)
            kl_live = float(kl.k3(parent, logprobs).mean())
        else:
            kl_live = float(measure_distance(gathered.texts, lora, scorer.adapter(job.parent), scorer, tick).mean())
        if kl_live <= job.ppo.live_kl_max or attempt == MAX_SHORTENINGS:
            break
        share /= 2
        with torch.no_grad():
            for parameter, start in zip(lora.parameters(), before, strict=True):
                parameter.lerp_(start, 0.5)
    if not is_finite(kl_live):
        raise NotFinite(f"the new policy's log-probabilities: mean KL to the parent is {kl_live}")
    figures = {"kl/live": kl_live, "policy/move_share": share}
    if not answers:
        return figures
    reference = torch.cat([rollout.reference for rollout in answers])
    return figures | {"kl/reference": float(kl.k3(logprobs, reference).mean()), "entropy": float(entropy.mean())}


@torch.no_grad()
def measure_distance(
    rollouts: Sequence[Rollout], lora: Lora, parent: Lora | None, scorer: Scorer, tick: Tick
) -> torch.Tensor:
    """float32[N]: KL(parent || policy) before every completion token, in an order of its own."""
    micro_batches = split_micro_batches([one.trunk.shape[0] for one in rollouts], scorer.micro_batch_tokens)

    def work(members: list[int]) -> torch.Tensor:
        with torch.no_grad():
            chosen = [rollouts[i] for i in members]
            _, temperatures = tokens_of(chosen)
            trunks, prompts = [one.trunk for one in chosen], [one.prompt_ids for one in chosen]
            first = scorer.first_layer(lora)
            now, then = (packed_states(scorer.base, first, trunks, prompts, one) for one in (lora, parent))
            return divergences(then, now, scorer.base.head, temperatures)

    return torch.cat(scorer.lanes.map(work, micro_batches, lambda: tick("measure", 0, 0)))


@torch.no_grad()
def measure_policy(
    rollouts: Sequence[Rollout], lora: Lora, scorer: Scorer, tick: Tick
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32[N] log-probabilities and entropies of all completion tokens, in the order of the rollouts."""
    micro_batches = split_micro_batches([rollout.trunk.shape[0] for rollout in rollouts], scorer.micro_batch_tokens)

    def work(members: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            chosen = [rollouts[i] for i in members]
            tokens, temperatures = tokens_of(chosen)
            hidden = completion_states(chosen, lora, scorer)
            measure = measure_tokens(hidden, scorer.base.head, tokens, temperatures)
        return measure.scaled, measure.entropy

    results = scorer.lanes.map(work, micro_batches, lambda: tick("measure", 0, 0))
    pieces: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for members, (logprobs, entropy) in zip(micro_batches, results, strict=True):
        lengths = n_tokens_of([rollouts[i] for i in members])
        pieces.update(zip(members, zip(logprobs.split(lengths), entropy.split(lengths), strict=True), strict=True))
    ordered = [pieces[i] for i in range(len(rollouts))]
    return torch.cat([one for one, _ in ordered]), torch.cat([one for _, one in ordered])
