"""Blobs of ids and log-probabilities: exact, and None never becomes a number."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.store import blobs

_float32 = st.floats(width=32, allow_nan=False)


@settings(deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_ids_come_back_as_they_were(ids: list[int]) -> None:
    blob = blobs.pack_ids(ids)
    assert len(blob) == 4 * len(ids)
    assert blobs.unpack_ids(blob) == tuple(ids)


@settings(deadline=None)
@given(st.lists(st.none() | _float32))
def test_float32_logprobs_and_none_come_back_as_they_were(logprobs: list[float | None]) -> None:
    assert blobs.unpack_logprobs(blobs.pack_logprobs(logprobs)) == tuple(logprobs)


@settings(deadline=None)
@given(st.lists(st.none() | st.floats()))
def test_any_float_is_stored_and_what_came_back_is_stable(logprobs: list[float | None]) -> None:
    once = blobs.unpack_logprobs(blobs.pack_logprobs(logprobs))
    assert [value is None for value in once] == [value is None or math.isnan(value) for value in logprobs]
    assert blobs.unpack_logprobs(blobs.pack_logprobs(once)) == once


def test_blobs_are_little_endian() -> None:
    assert blobs.pack_ids([1, -2]) == bytes.fromhex("01000000feffffff")
    assert blobs.pack_logprobs([-0.5, None]) == bytes.fromhex("000000bf0000c07f")


def test_an_id_beyond_int32_is_an_error() -> None:
    with pytest.raises(OverflowError):
        blobs.pack_ids([2**31])


def test_numbers_that_are_not_finite_are_left_out() -> None:
    assert blobs.finite({"a": 1, "b": math.nan, "c": -math.inf, "d": 0.5}) == {"a": 1.0, "d": 0.5}
