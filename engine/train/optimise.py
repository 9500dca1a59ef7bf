"""The epochs of an update: minibatches of items, micro-batches in lanes, one optimizer step after the other.

An optimizer step minimises the sum, over the job's objectives, of weight times the mean loss of the step's items, a
mean over what the objective counts (tokens, or items). The denominators are those of the whole step, so that the
gradient does not depend on how it is cut into micro-batches.

Dimension letters: N tokens of completions, R of one.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from engine.lora import Lora
from engine.protocol import TrainJob
from engine.train import adamw
from engine.train.batch import split_micro_batches, split_minibatches
from engine.train.course import Course, objective_of
from engine.train.figures import summarise
from engine.train.forward import add_gradients, completion_states, n_tokens_of, tokens_of, with_leaves
from engine.train.learner import Learner, NotFinite
from engine.train.logprobs import token_logprobs, token_scores
from engine.train.objectives import kl
from engine.train.objectives.objective import Item, Rollout, TokenScores
from engine.train.scorer import Scorer

Tick = Callable[[str, int, int], None]  # stage, done, total
Step = dict[str, list[int]]  # objective -> numbers of the items that one optimizer step works on
Sums = dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A share of an optimizer step. gradients: in the order of the adapter's parameters. sums: of figures, by
    objective and name. moved: over the sampled answers, tokens, sum of the estimates of KL(parent || policy),
    sum and maximum of the ratio."""

    gradients: list[torch.Tensor]
    sums: dict[str, Sums]
    moved: tuple[int, float, float, float]


def optimise(job: TrainJob, course: Course, learner: Learner, scorer: Scorer, tick: Tick) -> dict[str, float]:
    """Move `learner` in place; the figures of the steps. Raises NotFinite.

    The critic's step needs nothing of the actor's but that it was taken, so with a critic elsewhere the two go on side
    by side, the critic one step behind.
    """
    steps, of_critic, stopped_early = [], [], 0.0
    planned = plan_steps(job, course)
    for done, step in enumerate(planned):
        tick("optimise", done, len(planned))
        taking = scorer.lanes.on("actor", functools.partial(_actor_step, job, course, step, learner, scorer, tick))
        figures = taking()
        if figures is None:
            stopped_early = 1.0
            break
        steps.append(figures)
        work = functools.partial(_critic_step, job, course, step, learner, scorer, lambda: tick("optimise", 0, 0))
        of_critic.append(scorer.lanes.on("critic", work))
    for figures, taken in zip(steps, of_critic, strict=True):
        figures |= taken()
    return {**summarise(steps), "policy/steps": float(len(steps)), "policy/stopped_early": stopped_early}


def _actor_step(
    job: TrainJob, course: Course, step: Step, learner: Learner, scorer: Scorer, tick: Tick
) -> dict[str, float] | None:
    """One optimizer step of the actor and its figures; None, and no step, where the policy has moved too far."""
    gradients, figures = actor_gradients(job, course, step, learner.lora, scorer, tick)
    if figures.get("policy/approx_kl", 0.0) > job.ppo.live_kl_max:
        return None
    figures["grad_norm"] = adamw.clip_by_norm(gradients, job.ppo.max_grad_norm)
    if not all(map(is_finite, figures.values())):
        raise NotFinite(f"optimizer step {learner.adam.steps + 1}: {figures}")
    adamw.adamw_step(
        learner.lora.parameters(),
        gradients,
        learner.adam,
        learning_rate=job.ppo.learning_rate,
        weight_decay=job.ppo.weight_decay,
    )
    return figures


def plan_steps(job: TrainJob, course: Course) -> list[Step]:
    """The optimizer steps in their order: in each epoch every item once, each objective's spread over the steps."""
    generator = torch.Generator().manual_seed(job.seed)
    planned: list[Step] = []
    for _ in range(job.ppo.epochs):
        epoch: list[Step] = [{} for _ in range(job.ppo.minibatches)]
        for name, items in course.items.items():
            parts = split_minibatches(len(items), job.ppo.minibatches, generator) if items else []
            for step, part in zip(epoch, parts, strict=False):
                step[name] = part
        planned += [step for step in epoch if step]
    return planned


def _critic_step(
    job: TrainJob, course: Course, step: Step, learner: Learner, scorer: Scorer, tick: Callable[[], None]
) -> dict[str, float]:
    targets = [course.targets[i] for name in step if objective_of(name).uses_critic for i in step[name]]
    if not targets:
        return {}
    taken = learner.critic.step(targets, job.ppo, job.ppo.value_clip, scorer, tick)
    if not (is_finite(taken.loss) and is_finite(taken.grad_norm)):
        raise NotFinite(f"critic: loss {taken.loss}, gradient norm {taken.grad_norm}")
    return {"critic/loss": taken.loss, "critic/grad_norm": taken.grad_norm}


def actor_gradients(
    job: TrainJob, course: Course, step: Step, lora: Lora, scorer: Scorer, tick: Tick
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Gradients of one optimizer step, in the order of the adapter's parameters, and its figures (means)."""
    chosen = [(name, course.items[name][i]) for name in step for i in step[name]]
    counts: collections.Counter[str] = collections.Counter()
    for name, item in chosen:
        counts[name] += item.count
    scales = {name: job.objectives[name] / counts[name] for name in counts}
    lengths = [sum(rollout.trunk.shape[0] for rollout in item.rollouts) for _, item in chosen]
    micro_batches = split_micro_batches(lengths, scorer.micro_batch_tokens)

    def work(members: list[int]) -> Part:
        return micro_step(job, [chosen[i] for i in members], scales, lora, scorer)

    parts = scorer.lanes.map(work, micro_batches, lambda: tick("optimise", 0, 0))
    gradients = parts[0].gradients
    for part in parts[1:]:
        add_gradients(gradients, part.gradients)
    return gradients, _figures(parts, counts)


def _figures(parts: Sequence[Part], counts: Mapping[str, int]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for part in parts:
        for name, sums in part.sums.items():
            for figure, value in sums.items():
                key = f"{name}/{figure}"
                figures[key] = figures.get(key, 0.0) + value / counts[name]
    n_tokens = sum(part.moved[0] for part in parts)
    if n_tokens:
        figures["policy/approx_kl"] = sum(part.moved[1] for part in parts) / n_tokens
        figures["policy/ratio_mean"] = sum(part.moved[2] for part in parts) / n_tokens
        figures["policy/ratio_max"] = max(part.moved[3] for part in parts)
    return figures


def micro_step(
    job: TrainJob, members: Sequence[tuple[str, Item]], scales: Mapping[str, float], lora: Lora, scorer: Scorer
) -> Part:
    """The members' share of a step.

    Args:
        members: objective and item. scales: by objective, what a unit of its items' summed loss weighs.
    """
    rollouts = [rollout for _, item in members for rollout in item.rollouts]
    own, leaves = with_leaves(lora)
    sums: dict[str, Sums] = {}
    with torch.enable_grad():
        scores = score_tokens(rollouts, own, scorer, with_entropy=job.ppo.entropy_coef > 0.0)
        remaining = iter(scores)
        of_items = [
            (name, objective_of(name).loss(item, [next(remaining) for _ in item.rollouts], job))
            for name, item in members
        ]
        total = torch.stack([scales[name] * one.loss for name, one in of_items]).sum()
        gradients = list(torch.autograd.grad(total, leaves))
    for name, one in of_items:
        of_objective = sums.setdefault(name, {})
        for figure, value in one.figures.items():
            of_objective[figure] = of_objective.get(figure, 0.0) + float(value)
    return Part(gradients, sums, _moved(rollouts, scores))


def score_tokens(
    rollouts: Sequence[Rollout], lora: Lora, scorer: Scorer, *, with_entropy: bool = False
) -> list[TokenScores]:
    """Of each answer, differentiable by the adapter."""
    hidden, (tokens, temperatures) = completion_states(rollouts, lora, scorer), tokens_of(rollouts)
    lengths = n_tokens_of(rollouts)
    if not with_entropy:
        logprobs = token_logprobs(hidden, scorer.base.head, tokens, temperatures)
        return [TokenScores(one) for one in logprobs.split(lengths)]
    logprobs, entropy = token_scores(hidden, scorer.base.head, tokens, temperatures)
    return [TokenScores(*both) for both in zip(logprobs.split(lengths), entropy.split(lengths), strict=True)]


def _moved(rollouts: Sequence[Rollout], scores: Sequence[TokenScores]) -> tuple[int, float, float, float]:
    sampled = [(r, s.logprobs.detach()) for r, s in zip(rollouts, scores, strict=True) if r.behaviour is not None]
    if not sampled:
        return 0, 0.0, 0.0, 0.0
    parent = torch.cat([rollout.parent for rollout, _ in sampled])
    logprobs = torch.cat([of_tokens for _, of_tokens in sampled])
    ratio = (logprobs - parent).clamp(-kl.MAX_LOG_RATIO, kl.MAX_LOG_RATIO).exp()
    distance = kl.k3(parent, logprobs)  # the tokens were sampled from the parent, as far as from anybody
    return parent.shape[0], float(distance.sum()), float(ratio.sum()), float(ratio.max())


def is_finite(value: float) -> bool:
    """Neither NaN nor infinite."""
    return -float("inf") < value < float("inf")
