"""Rewards from a function become plain numbers in [-1, 1], the daemon's range, and what they were is not hidden."""

from __future__ import annotations

import math

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.flow.verdicts import verdicts

finite = st.floats(allow_nan=False, allow_infinity=False)


def test_numbers_of_numpy_and_torch_pass_as_pythons_own() -> None:
    kinds = [np.float32(0.5), np.int64(1), torch.tensor(-0.25), True, 0.125, None]
    found = verdicts(kinds, 6)
    assert found.rewards == (0.5, 1.0, -0.25, 1.0, 0.125, None)
    assert {type(reward) for reward in found.rewards} == {float, type(None)}
    assert msgpack.unpackb(msgpack.packb(found.rewards)) == list(found.rewards)
    assert verdicts(np.array([0.5, -0.5], dtype=np.float32), 2).rewards == (0.5, -0.5)


@given(st.lists(finite | st.none()))
def test_what_lies_beyond_the_range_is_limited_and_counted(given_rewards: list[float | None]) -> None:
    found = verdicts(given_rewards, len(given_rewards))
    assert found.clipped == sum(one is not None and abs(one) > 1.0 for one in given_rewards)
    for before, after in zip(given_rewards, found.rewards, strict=True):
        assert after == (None if before is None else max(-1.0, min(1.0, before)))


def test_what_is_not_finite_is_left_for_the_update_to_count_and_is_in_no_mean() -> None:
    found = verdicts([math.nan, math.inf, 0.5, None, -3.0], 5)
    assert str(found.rewards) == "(nan, inf, 0.5, None, -1.0)"
    assert (found.clipped, found.mean) == (1, -0.25)
    assert math.isnan(verdicts([None, math.nan], 2).mean)


def test_too_few_rewards_and_what_is_no_number_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="gave 1 rewards for 2 answers"):
        verdicts([1.0], 2)
    with pytest.raises(TypeError, match="gave 'good' for answer 1, expected a number or None"):
        verdicts([1.0, "good"], 2)  # type: ignore[list-item]
