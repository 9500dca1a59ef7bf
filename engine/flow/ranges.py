"""Which numbers a flow takes: those that the daemon takes for its keys of the same names, and why others are refused.

Pure. A number that is out of range would be found out in the middle of a round, or not at all: an update of no epochs
makes a version that has learned nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping

from engine.protocol import LoraSettings, PpoSettings, PreferenceSettings, Sampling

# What a policy gradient's answers are drawn with: the policy itself, of which these would make another distribution.
PLAIN = (
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """From least to most, both included, but for the bounds that are said to be open."""

    least: float
    most: float = math.inf
    above: bool = False  # the least is open
    below: bool = False  # the most is

    def holds(self, value: float) -> bool:
        """Whether `value` is a number in the range; NaN and infinity are in none."""
        over = value > self.least if self.above else value >= self.least
        return over and (value < self.most if self.below else value <= self.most) and math.isfinite(value)

    def __str__(self) -> str:
        least = f"{'>' if self.above else '>='} {self.least:g}"
        return least if self.most == math.inf else f"{least} and {'<' if self.below else '<='} {self.most:g}"


PPO: Mapping[str, Range] = {
    "learning_rate": Range(0, 1, above=True),
    "critic_learning_rate": Range(0, 1, above=True),
    "epochs": Range(1, 32),
    "minibatches": Range(1, 64),
    "clip_low": Range(0, 1, above=True, below=True),
    "clip_high": Range(0, 10, above=True),
    "value_clip": Range(0, 100, above=True),
    "value_coef": Range(0, 100),
    "gamma": Range(0, 1),
    "gae_lambda": Range(0, 1),
    "kl_coef": Range(0, 100),
    "live_kl_max": Range(0, 100, above=True),
    "importance_cap": Range(1, 100),
    "drift_max": Range(0, 20, above=True),
    "max_grad_norm": Range(0, 1000, above=True),
    "critic_warmup_steps": Range(0, 10_000),
    "weight_decay": Range(0, 1),
    "kl_target": Range(0, 100),
    "entropy_coef": Range(0, 10),
    "dual_clip": Range(1, 1000, above=True),
}
PREFERENCE: Mapping[str, Range] = {
    "dpo_beta": Range(0, 10, above=True),
    "kto_beta": Range(0, 10, above=True),
    "liked_weight": Range(1e-3, 1e3),
    "disliked_weight": Range(1e-3, 1e3),
}
LORA: Mapping[str, Range] = {"rank": Range(1, 256), "alpha": Range(0, 1024, above=True), "layers": Range(0)}
SAMPLING: Mapping[str, Range] = {"temperature": Range(0, 100)}

COUNTS = frozenset({"epochs", "minibatches", "critic_warmup_steps", "rank", "layers"})


def check_settings(settings: PpoSettings | PreferenceSettings | LoraSettings | Sampling) -> None:
    """Raises ValueError: a number is out of its range, with the name of both."""
    match settings:
        case PpoSettings():
            group, ranges = "ppo", PPO
        case PreferenceSettings():
            group, ranges = "preference", PREFERENCE
        case LoraSettings():
            group, ranges = "actor", LORA
        case Sampling():
            group, ranges = "sampling", SAMPLING
    for name, wanted in ranges.items():
        value = getattr(settings, name)
        kinds = int if name in COUNTS else int | float
        if isinstance(value, bool) or not isinstance(value, kinds) or not wanted.holds(value):
            number = "a whole number" if name in COUNTS else "a number"
            raise ValueError(f"{group}.{name}: got {value!r}, expected {number} {wanted}")
    if isinstance(settings, PpoSettings) and settings.kl_target > 0 and settings.kl_coef == 0:
        raise ValueError("ppo.kl_coef: got 0, expected > 0 beside a kl_target: 0 stays 0 however it is multiplied")


def check_drawn_from_the_policy(sampling: Sampling, objectives: Collection[str]) -> None:
    """Raises ValueError if answers so sampled are none that policy gradients can learn from.

    Args:
        objectives: of the flow, those that are policy gradients.
    """
    if not objectives:
        return
    names, plain = ", ".join(objectives), Sampling()
    if sampling.temperature == 0:
        raise ValueError(f"sampling.temperature: got 0, but {names} learns from what was drawn; expected a number > 0")
    for name in PLAIN:
        value, usual = getattr(sampling, name), getattr(plain, name)
        if value != usual:
            raise ValueError(
                f"sampling.{name}: got {value!r}, but {names} learns from answers of the policy itself; "
                f"leave it at {usual!r}, or learn with kto alone"
            )
