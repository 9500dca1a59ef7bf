"""What a flow cannot do is refused when it is made, with the name of what is wrong."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import annotated_types
import pytest

from edged.config import Settings
from engine.flow import Flow, ranges
from engine.protocol import LoraSettings, PpoSettings, PreferenceSettings, Sampling


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"objectives": {"dpo": 1.0}}, "'dpo': a flow has rated answers only; use one of ppo"),
        ({"objectives": {}}, "objectives: got none; give one or more of ppo"),
        ({"objectives": {"ppo": -1.0}}, "'ppo': got the weight -1.0, expected a finite one above 0"),
        ({"objectives": {"ppo": float("nan")}}, "'ppo': got the weight nan"),
        ({"ppo": PpoSettings(critic="big")}, "critic: got 'big', expected one of 'head', 'lora'"),  # type: ignore[arg-type]
        ({"dtype": "float16"}, "dtype: got 'float16', expected one of 'bfloat16', 'float32'"),
        ({"reference": 7}, "reference: .* holds no version 7; expected one of "),
        ({"threads": 0}, "threads: got 0"),
        ({"devices": {"critics": "cpu"}}, "'critics' is no role"),
        ({"ppo": PpoSettings(minibatches=0)}, "ppo.minibatches: got 0, expected a whole number >= 1 and <= 64"),
        ({"ppo": PpoSettings(epochs=0)}, "ppo.epochs: got 0, expected a whole number >= 1 and <= 32"),
        ({"ppo": PpoSettings(clip_low=1.0)}, "ppo.clip_low: got 1.0, expected a number > 0 and < 1"),
        (
            {"ppo": PpoSettings(learning_rate=float("nan"))},
            "ppo.learning_rate: got nan, expected a number > 0 and <= 1",
        ),
        ({"ppo": PpoSettings(kl_target=-1.0)}, "ppo.kl_target: got -1.0, expected a number >= 0 and <= 100"),
        ({"ppo": PpoSettings(kl_target=0.1, kl_coef=0.0)}, "ppo.kl_coef: got 0, expected > 0 beside a kl_target"),
        ({"preference": PreferenceSettings(kto_beta=0.0)}, "preference.kto_beta: got 0.0, expected a number > 0"),
        ({"actor": LoraSettings(rank=0, alpha=1.0, layers=1)}, "actor.rank: got 0, expected a whole number >= 1"),
        ({"sampling": Sampling(temperature=-1.0)}, "sampling.temperature: got -1.0, expected a number >= 0"),
        ({"sampling": Sampling(temperature=0.0)}, "sampling.temperature: got 0, but ppo learns from what was drawn"),
        (
            {"sampling": Sampling(top_p=0.5)},
            "sampling.top_p: got 0.5, but ppo learns from answers of the policy itself",
        ),
        (
            {"sampling": Sampling(top_k=5), "objectives": {"grpo": 1.0, "kto": 1.0}},
            "sampling.top_k: got 5, but grpo learns from .* leave it at 0, or learn with kto alone",
        ),
    ],
)
def test_what_a_flow_cannot_do_is_refused_before_anything_starts(
    change: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"model": "m.gguf", "folder": tmp_path, "reward": lambda answers: [], **change}
    with pytest.raises(ValueError, match=complaint):
        Flow(**settings)


def test_a_reference_may_be_any_version_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "adapters" / "v7-0123abcd").mkdir(parents=True)
    assert Flow(model="m.gguf", folder=tmp_path, reward=lambda answers: [], reference=7).reference == 7


@pytest.mark.parametrize("option", [*ranges.PLAIN, "temperature"])
def test_answers_that_are_no_plain_samples_are_for_kto(option: str, tmp_path: Path) -> None:
    odd: Any = {"temperature": 0.0, "top_k": 5, "logit_bias": ((3, 1.0),)}.get(option, 0.5)
    sampling = dataclasses.replace(Sampling(), **{option: odd})
    settings: dict[str, Any] = {"model": "m.gguf", "folder": tmp_path, "reward": lambda answers: []}
    assert Flow(**settings, objectives={"kto": 1.0}, sampling=sampling).sampling == sampling
    for name in ("ppo", "grpo", "rloo", "reinforce_pp"):
        with pytest.raises(ValueError, match=f"sampling.{option}: got "):
            Flow(**settings, objectives={name: 1.0, "kto": 1.0}, sampling=sampling)


def test_a_flow_takes_the_numbers_that_the_daemon_takes() -> None:
    settings = Settings()
    for section, of_flow in ((settings.learn, {**ranges.PPO, **ranges.PREFERENCE}), (settings.lora, ranges.LORA)):
        for name, wanted in of_flow.items():
            if (section, name) == (settings.lora, "layers"):  # words there
                continue
            least, most, above, below = -math.inf, math.inf, False, False
            for limit in type(section).model_fields[name].metadata:
                match limit:
                    case annotated_types.Ge(ge=bound):
                        least = bound
                    case annotated_types.Gt(gt=bound):
                        least, above = bound, True
                    case annotated_types.Le(le=bound):
                        most = bound
                    case annotated_types.Lt(lt=bound):
                        most, below = bound, True
            assert wanted == ranges.Range(least, most, above, below), name


@pytest.mark.parametrize(
    ("settings", "of_it"),
    [
        (PpoSettings(), ranges.PPO),
        (PreferenceSettings(), ranges.PREFERENCE),
        (LoraSettings(rank=1, alpha=1.0, layers=0), ranges.LORA),
    ],
)
def test_every_number_of_the_settings_has_a_range(settings: Any, of_it: dict[str, ranges.Range]) -> None:
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    assert set(of_it) == {name for name, value in values.items() if not isinstance(value, str)}
    assert {name for name in ranges.COUNTS if name in values} == {n for n, v in values.items() if isinstance(v, int)}
    ranges.check_settings(settings)
