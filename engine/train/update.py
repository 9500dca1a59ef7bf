"""One PPO update, read from top to bottom: a batch of rated answers in, a better adapter and critic out.

    gather      trunk states, parent and reference log-probabilities of every episode (cached where scored ahead)
    warm up     a fresh critic is fitted to the batch before anything is judged by it; the actor does not move
    judge       values, advantages (GAE), whitened over the batch
    optimise    epochs x minibatches: clipped policy loss and KL to the reference on the actor, clipped value loss on
                the critic; it ends early when the policy has moved `live_kl_max` away from the parent
    measure     the new policy once more over the whole batch; if it went beyond `live_kl_max` in its last steps, the
                move is shortened until it did not

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
import time
from collections.abc import Callable, Sequence

import torch

from engine.lora import Lora
from engine.protocol import PpoSettings, RatedEpisode, TrainJob
from engine.train import adamw, decoder
from engine.train.batch import split_micro_batches, split_minibatches
from engine.train.critic import Critic, critic_step
from engine.train.logprobs import measure_tokens, token_logprobs
from engine.train.objectives import ppo
from engine.train.rollout import Judged, Rollout, batch_metrics, gather, judge, warm_up
from engine.train.scorer import Scorer

Tick = Callable[[str, int, int], None]  # stage, done, total
MAX_SHORTENINGS = 4  # halvings of a move that went too far


class NotFinite(Exception):
    """Raised when a loss or gradient is NaN or infinite: the update is void, nothing of it may be kept."""


@dataclasses.dataclass(frozen=True, slots=True)
class Learner:
    """What an update moves, in place: the adapter with its optimizer state, and the critic with its own."""

    lora: Lora
    adam: adamw.AdamState
    critic: Critic


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """metrics: finite floats by the field's names. seconds: by stage."""

    metrics: dict[str, float]
    seconds: dict[str, float]


def run_update(job: TrainJob, used: Sequence[RatedEpisode], learner: Learner, scorer: Scorer, tick: Tick) -> Outcome:
    """Train `learner` on `used`.

    Raises:
        NotFinite: `learner` is then in an undefined state; throw it away.
        EngineFault: an adapter of an episode cannot be read.
    """
    clock = _Stopwatch()
    rollouts = gather(job, used, learner.lora, scorer, lambda: tick("gather", 0, len(used)))
    clock.lap("gather")
    critic_metrics = warm_up(job.ppo, rollouts, learner.critic)
    judged = judge(job.ppo, rollouts, learner.critic)
    clock.lap("critic")
    before = [parameter.clone() for parameter in learner.lora.parameters()]
    step_metrics = optimise(job, judged, learner, scorer, tick)
    clock.lap("optimise")
    final_metrics = settle(job, judged, learner.lora, before, scorer, tick)
    clock.lap("measure")
    metrics = {**batch_metrics(judged, learner.critic), **critic_metrics, **step_metrics, **final_metrics}
    return Outcome(metrics, clock.seconds)


def optimise(job: TrainJob, judged: Sequence[Judged], learner: Learner, scorer: Scorer, tick: Tick) -> dict[str, float]:
    """The epochs. Moves `learner` in place; the figures of the steps. Raises NotFinite."""
    settings, parameters = job.ppo, learner.lora.parameters()
    generator = torch.Generator().manual_seed(job.seed)
    total = settings.epochs * min(settings.minibatches, len(judged))
    steps: list[dict[str, float]] = []
    stopped_early = 0.0
    for _ in range(settings.epochs):
        for minibatch in split_minibatches(len(judged), settings.minibatches, generator):
            tick("optimise", len(steps), total)
            chosen = [judged[i] for i in minibatch]
            gradients, figures = _actor_gradients(settings, chosen, learner.lora, scorer, tick)
            if figures["ppo/approx_kl"] > settings.live_kl_max:
                stopped_early = 1.0
                break
            figures["grad_norm"] = adamw.clip_by_norm(gradients, settings.max_grad_norm)
            if not all(map(_is_finite, figures.values())):
                raise NotFinite(f"optimizer step {len(steps) + 1} of {total}: {figures}")
            adamw.adamw_step(
                parameters,
                gradients,
                learner.adam,
                learning_rate=settings.learning_rate,
                weight_decay=settings.weight_decay,
            )
            figures.update(_critic_figures(settings, chosen, learner.critic))
            steps.append(figures)
        if stopped_early:
            break
    return {**_summary(steps), "ppo/steps": float(len(steps)), "ppo/stopped_early": stopped_early}


def _critic_figures(settings: PpoSettings, chosen: Sequence[Judged], critic: Critic) -> dict[str, float]:
    step = critic_step(
        critic,
        torch.cat([one.rollout.features for one in chosen]),
        old_values=torch.cat([one.values for one in chosen]),
        returns=torch.cat([one.returns for one in chosen]),
        value_clip=settings.value_clip,
        value_coef=settings.value_coef,
        learning_rate=settings.critic_learning_rate,
        max_grad_norm=settings.max_grad_norm,
    )
    if not (_is_finite(step.loss) and _is_finite(step.grad_norm)):
        raise NotFinite(f"critic: loss {step.loss}, gradient norm {step.grad_norm}")
    return {"critic/loss": step.loss, "critic/grad_norm": step.grad_norm}


def _actor_gradients(
    settings: PpoSettings, chosen: Sequence[Judged], lora: Lora, scorer: Scorer, tick: Tick
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Gradients of one optimizer step, in the order of the adapter's parameters, and its figures (token means)."""
    n_tokens = sum(one.rollout.tokens.shape[0] for one in chosen)
    micro_batches = split_micro_batches([one.rollout.trunk.shape[0] for one in chosen])

    def work(members: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
        return _micro_step(settings, [chosen[i] for i in members], lora, scorer, n_tokens)

    results = scorer.lanes.map(work, micro_batches, lambda: tick("optimise", 0, 0))
    gradients = results[0][0]
    sums = results[0][1]
    for more, figures in results[1:]:
        for gradient, other in zip(gradients, more, strict=True):
            gradient.add_(other)
        sums = torch.cat(((sums[:-1] + figures[:-1]), torch.maximum(sums[-1:], figures[-1:])))
    names = ("ppo/policy_loss", "kl/reference_loss", "ppo/approx_kl", "ppo/clip_frac", "ppo/ratio_mean")
    means = dict(zip(names, (sums[:-1] / n_tokens).tolist(), strict=True))
    return gradients, {**means, "ppo/ratio_max": float(sums[-1])}


def _micro_step(
    settings: PpoSettings, members: Sequence[Judged], lora: Lora, scorer: Scorer, n_tokens: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Gradients of the members' share of the step, and the sums of its figures (the last entry is a maximum)."""
    rollouts = [one.rollout for one in members]
    # Leaves of this lane's own: gradients of one graph must not meet another lane's.
    leaves = [parameter.detach().requires_grad_() for parameter in lora.parameters()]
    pairs = zip(leaves[0::2], leaves[1::2], strict=True)
    own = dataclasses.replace(lora, matrices=dict(zip(lora.matrices, pairs, strict=True)))
    with torch.enable_grad():
        logprobs = completion_logprobs(rollouts, own, scorer)
        old = torch.cat([rollout.parent for rollout in rollouts])
        policy = ppo.policy_loss(
            logprobs,
            old,
            torch.cat([one.advantages for one in members]),
            torch.cat([one.weights for one in members]),
            settings.clip_low,
            settings.clip_high,
        )
        penalty = settings.kl_coef * ppo.kl_k3(logprobs, torch.cat([rollout.reference for rollout in rollouts]))
        gradients = list(torch.autograd.grad((policy.loss + penalty).sum() / n_tokens, leaves))
    moved = ppo.kl_k3(logprobs.detach(), old)
    sums = (policy.loss.detach(), penalty.detach(), moved, policy.clipped.float(), policy.ratio)
    return gradients, torch.stack([*(one.sum() for one in sums), policy.ratio.max()])


def completion_logprobs(rollouts: Sequence[Rollout], lora: Lora, scorer: Scorer) -> torch.Tensor:
    """float32[N]: log pi of every completion token at its sampling temperature, differentiable by the adapter."""
    hidden, tokens, temperatures = _completion_states(rollouts, lora, scorer)
    return token_logprobs(hidden, scorer.base.head, tokens, temperatures)


def _completion_states(
    rollouts: Sequence[Rollout], lora: Lora, scorer: Scorer
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Through the adapted blocks: hidden[N, D] before each completion token, int64[N] tokens, float32[N]
    temperatures."""
    base = scorer.base
    lengths = [rollout.trunk.shape[0] for rollout in rollouts]
    stream = decoder.run_blocks(
        base,
        torch.cat([r.trunk for r in rollouts]),
        decoder.pack(base, lengths),
        lora,
        scorer.first_layer(lora),
        base.config.shape.n_layers,
    )
    states = torch.cat([one[r.prompt_tokens - 1 : -1] for r, one in zip(rollouts, stream.split(lengths), strict=True)])
    tokens = torch.cat([r.tokens for r in rollouts])
    temperatures = torch.cat([torch.full(r.tokens.shape, r.temperature, device=base.device) for r in rollouts])
    return decoder.final_norm(base, states), tokens, temperatures


def settle(
    job: TrainJob,
    judged: Sequence[Judged],
    lora: Lora,
    before: Sequence[torch.Tensor],
    scorer: Scorer,
    tick: Tick,
) -> dict[str, float]:
    """Measure the new policy over the batch, and shorten the move while it is beyond `live_kl_max`."""
    rollouts = [one.rollout for one in judged]
    parent = torch.cat([rollout.parent for rollout in rollouts])
    reference = torch.cat([rollout.reference for rollout in rollouts])
    share = 1.0
    for attempt in range(MAX_SHORTENINGS + 1):
        logprobs, entropy = measure_policy(rollouts, lora, scorer, tick)
        kl_live = float(ppo.kl_k3(logprobs, parent).mean())
        if kl_live <= job.ppo.live_kl_max or attempt == MAX_SHORTENINGS:
            break
        share /= 2
        with torch.no_grad():
            for parameter, start in zip(lora.parameters(), before, strict=True):
                parameter.lerp_(start, 0.5)
    if not _is_finite(kl_live):
        raise NotFinite(f"the new policy's log-probabilities: mean KL to the parent is {kl_live}")
    return {
        "kl/live": kl_live,
        "kl/reference": float(ppo.kl_k3(logprobs, reference).mean()),
        "entropy": float(entropy.mean()),
        "ppo/move_share": share,
    }


@torch.no_grad()
def measure_policy(
    rollouts: Sequence[Rollout], lora: Lora, scorer: Scorer, tick: Tick
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32[N] log-probabilities and entropies of all completion tokens, in the order of the rollouts."""
    micro_batches = split_micro_batches([rollout.trunk.shape[0] for rollout in rollouts])

    def work(members: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            hidden, tokens, temperatures = _completion_states([rollouts[i] for i in members], lora, scorer)
            measure = measure_tokens(hidden, scorer.base.head, tokens, temperatures)
        return measure.scaled, measure.entropy

    results = scorer.lanes.map(work, micro_batches, lambda: tick("measure", 0, 0))
    pieces: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for members, (logprobs, entropy) in zip(micro_batches, results, strict=True):
        lengths = [rollouts[i].tokens.shape[0] for i in members]
        pieces.update(zip(members, zip(logprobs.split(lengths), entropy.split(lengths), strict=True), strict=True))
    ordered = [pieces[i] for i in range(len(rollouts))]
    return torch.cat([one for one, _ in ordered]), torch.cat([one for _, one in ordered])


def _summary(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over the steps; the largest ratio; the KLs of the last step, which saw the policy furthest away."""
    if not steps:
        return {}
    summary = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
    summary["ppo/ratio_max"] = max(step["ppo/ratio_max"] for step in steps)
    summary["ppo/approx_kl"] = steps[-1]["ppo/approx_kl"]
    summary["ppo/first_ratio_max"] = steps[0]["ppo/ratio_max"]
    summary["ppo/first_kl"] = steps[0]["ppo/approx_kl"]
    return summary


def _is_finite(value: float) -> bool:
    return -float("inf") < value < float("inf")


class _Stopwatch:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = now - self._last
        self._last = now
