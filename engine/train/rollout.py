"""What an update knows of its episodes before the first step: collected, and judged by the critic.

Nothing here has a gradient. Everything is a function of the job and the critic, whatever was scored ahead.

Dimension letters: R tokens of one completion, T tokens of a whole episode, D width of the stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from engine.lora import Lora
from engine.protocol import PpoSettings, RatedEpisode, TrainJob
from engine.train import advantages
from engine.train.critic import Critic, critic_step, explained_variance, predict_values
from engine.train.objectives import ppo
from engine.train.scorer import Scorer


@dataclasses.dataclass(frozen=True, slots=True)
class Rollout:
    """One usable episode with what is known before training. All float32; [R] a completion token, [T] any token."""

    prompt_tokens: int
    tokens: torch.Tensor  # int64[R]
    temperature: float
    reward: float
    replay: bool
    trunk: torch.Tensor  # [T, D]
    features: torch.Tensor  # [R, D + 2]
    on_policy: bool  # the parent itself sampled it
    behaviour: torch.Tensor  # [R], by the serving engine under whichever adapter sampled
    parent: torch.Tensor  # [R], by the trainer: pi_old
    reference: torch.Tensor  # [R]
    entropy: torch.Tensor  # [R], of the parent


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """A rollout with what the critic makes of it; all float32[R]."""

    rollout: Rollout
    values: torch.Tensor
    returns: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor


def gather(
    job: TrainJob, used: Sequence[RatedEpisode], lora: Lora, scorer: Scorer, tick: Callable[[], None]
) -> list[Rollout]:
    """Everything about the episodes that does not change during the update. Raises EngineFault."""
    episodes = [rated.episode for rated in used]
    scorer.remember(episodes, [scorer.first_layer(lora)] * len(episodes), tick)
    parent = scorer.measure(episodes, [job.parent] * len(episodes), tick)
    reference = scorer.measure(episodes, [job.reference] * len(episodes), tick)
    device = scorer.base.device
    return [
        Rollout(
            prompt_tokens=len(rated.episode.prompt_ids),
            tokens=torch.tensor(rated.episode.completion_ids, dtype=torch.int64, device=device),
            temperature=rated.episode.temperature,
            reward=rated.reward,
            replay=rated.replay,
            trunk=scorer.trunk(rated.episode, lora),
            features=scorer.features(rated.episode),
            on_policy=rated.episode.adapter.version == job.parent.version,
            behaviour=torch.tensor(rated.episode.logprobs, dtype=torch.float32, device=device),
            parent=parent_.scaled,
            reference=reference_.scaled,
            entropy=parent_.entropy,
        )
        for rated, parent_, reference_ in zip(used, parent, reference, strict=True)
    ]


def warm_up(settings: PpoSettings, rollouts: Sequence[Rollout], critic: Critic) -> dict[str, float]:
    """Fit a critic that has never stepped to the batch's returns: full-batch steps, no actor involved."""
    if critic.adam.steps > 0 or settings.critic_warmup_steps == 0:
        return {"critic/warmup_steps": 0.0}
    features = torch.cat([rollout.features for rollout in rollouts])
    # The target does not need the critic: with nothing bootstrapped it is the discounted reward still to come.
    returns = torch.cat([_discounted_rewards(rollout, settings.gamma) for rollout in rollouts])
    for _ in range(settings.critic_warmup_steps):
        critic_step(
            critic,
            features,
            old_values=torch.zeros_like(returns),
            returns=returns,
            value_clip=float("inf"),
            value_coef=settings.value_coef,
            learning_rate=settings.critic_learning_rate,
            max_grad_norm=settings.max_grad_norm,
        )
    return {"critic/warmup_steps": float(settings.critic_warmup_steps)}


def _discounted_rewards(rollout: Rollout, gamma: float) -> torch.Tensor:
    remaining = torch.arange(rollout.tokens.shape[0] - 1, -1, -1, device=rollout.tokens.device)
    return rollout.reward * gamma ** remaining.float()


def judge(settings: PpoSettings, rollouts: Sequence[Rollout], critic: Critic) -> list[Judged]:
    """Values, advantages, returns and importance weights of every completion token."""
    values = [predict_values(critic, rollout.features) for rollout in rollouts]
    estimated = []
    for rollout, value in zip(rollouts, values, strict=True):
        rewards = advantages.terminal_rewards(rollout.tokens.shape[0], rollout.reward)
        estimated.append(advantages.estimate_advantages(rewards, value.cpu(), settings.gamma, settings.gae_lambda))
    whitened = advantages.whiten([advantage for advantage, _ in estimated])
    return [
        Judged(
            rollout=rollout,
            values=value,
            returns=returns.to(value.device),
            advantages=advantage.to(value.device),
            weights=ppo.importance_weights(rollout.parent, rollout.behaviour, settings.importance_cap),
        )
        for rollout, value, (_, returns), advantage in zip(rollouts, values, estimated, whitened, strict=True)
    ]


def batch_metrics(judged: Sequence[Judged], critic: Critic) -> dict[str, float]:
    """Figures of the batch itself, as it came."""
    # Of the new ratings only: what people think of the answers now, not of those that are replayed.
    rewards = torch.tensor([one.rollout.reward for one in judged if not one.rollout.replay] or [0.0])
    returns = torch.cat([one.returns for one in judged])
    weights = torch.cat([one.weights for one in judged])
    fitted = torch.cat([predict_values(critic, one.rollout.features) for one in judged])
    # What is left between two logprobs of one adapter is the engines' rounding; of two adapters, also their distance.
    gaps = [one.rollout.parent - one.rollout.behaviour for one in judged if one.rollout.on_policy]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "episodes": float(len(judged)),
        "episodes/replayed": float(sum(one.rollout.replay for one in judged)),
        "tokens": float(returns.numel()),
        "tokens/prompt": float(sum(one.rollout.prompt_tokens for one in judged)),
        "is/weight_mean": float(weights.mean()),
        "is/ess": ppo.effective_sample_share(weights),
        "is/on_policy": len(gaps) / len(judged),
        **({"is/engine_gap": float(torch.cat(gaps).abs().mean())} if gaps else {}),
        "entropy/parent": float(torch.cat([one.rollout.entropy for one in judged]).mean()),
        "critic/value_mean": float(torch.cat([one.values for one in judged]).mean()),
        "critic/explained_variance": explained_variance(torch.cat([one.values for one in judged]), returns),
        "critic/explained_variance_after": explained_variance(fitted, returns),
    }
