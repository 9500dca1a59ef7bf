"""What a flow cannot do is refused when it is made, with the name of what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.flow import Flow
from engine.protocol import PpoSettings


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
