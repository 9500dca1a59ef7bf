"""What crosses between ranks comes out as it went in, bit by bit, and nothing else crosses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.fault import EngineFault
from engine.train.learner import NotFinite, NothingToLearn
from engine.train.logprobs import TokenMeasure
from engine.train.optimise import Part
from engine.train.ranks.freight import Setback, pack, setback_of, unpack
from engine.train.shortage import OutOfMemory

CPU = torch.device("cpu")
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=12,
)


def shapes(value: Any) -> Any:
    """The value with the types of its containers, which == does not look at."""
    if isinstance(value, list | tuple):
        return type(value), [shapes(one) for one in value]
    return {key: shapes(one) for key, one in value.items()} if isinstance(value, dict) else value


@given(PLAIN)
def test_plain_values_come_out_as_they_went_in(value: Any) -> None:
    assert shapes(unpack(pack(value), CPU)) == shapes(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_keep_every_bit_and_share_no_memory(dtype: torch.dtype) -> None:
    one = torch.tensor([[0, 1], [2, 3]]).to(dtype)
    value = {"odd": "x" * 7, "tensors": [one, torch.empty(0, 3), one.t(), torch.tensor(math.nan)]}
    data = pack(value)
    found = unpack(data, CPU)["tensors"]
    assert found[0].dtype == dtype
    assert torch.equal(found[0], one)
    assert found[1].shape == (0, 3)
    assert torch.equal(found[2], one.t())
    assert bool(found[3].isnan())
    data.zero_()
    assert torch.equal(found[0], one)


def test_records_come_out_as_records() -> None:
    measure = TokenMeasure(torch.rand(3), torch.rand(3), torch.rand(3))
    part = Part([torch.rand(2, 2)], {"ppo": {"loss": 0.1 + 0.2}}, (3, 0.5, 1.5, math.inf))
    found, (other, number) = unpack(pack([part, (measure, 7)]), CPU)
    assert isinstance(found, Part)
    assert isinstance(other, TokenMeasure)
    assert torch.equal(found.gradients[0], part.gradients[0])
    assert (found.sums, found.moved) == (part.sums, part.moved)
    assert torch.equal(other.entropy, measure.entropy)
    assert number == 7


def test_what_is_not_listed_does_not_cross() -> None:
    with pytest.raises(TypeError, match="set does not cross"):
        pack({"a": {1, 2}})


@pytest.mark.parametrize(
    "error",
    [
        NotFinite("loss nan"),
        NothingToLearn("no", {"equal": 3}),
        EngineFault("adapter_unreadable", "v3"),
        OutOfMemory("1 GB"),
        MemoryError("1 GB"),
    ],
)
def test_the_known_ways_to_fail_cross_as_what_they_are(error: Exception) -> None:
    setback = setback_of(error)
    assert setback is not None
    crossed = unpack(pack(setback), CPU)
    assert isinstance(crossed, Setback)
    found = crossed.exception()
    assert type(found) is (OutOfMemory if isinstance(error, MemoryError) else type(error))
    assert str(found) == str(error)
    assert getattr(found, "skipped", None) == getattr(error, "skipped", None)
    assert getattr(found, "code", None) == getattr(error, "code", None)


def test_a_bug_does_not_cross() -> None:
    assert setback_of(ValueError("a bug")) is None
