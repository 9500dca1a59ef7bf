"""How many requests may be under way."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from edged.serve.admission import Full, Limits, admit

LIMITS = Limits(slots=4, max_queue=6)
COUNTS = st.integers(0, 300)


def test_a_request_that_fits_the_queue_is_taken() -> None:
    assert admit(LIMITS, under_way=9, asked=1, sequence_s=5.0) is None


def test_a_request_that_does_not_fit_is_told_when_a_slot_is_expected_to_be_free() -> None:
    assert admit(LIMITS, under_way=10, asked=4, sequence_s=5.0) == Full(retry_after_s=5.0)


def test_nobody_is_told_to_come_back_within_a_second() -> None:
    assert admit(LIMITS, under_way=10, asked=1, sequence_s=0.01) == Full(retry_after_s=1.0)


@settings(deadline=None)
@given(slots=st.integers(1, 64), max_queue=COUNTS, requests=st.lists(st.integers(1, 20), max_size=60))
def test_never_more_sequences_are_taken_than_slots_and_queue_hold(
    slots: int, max_queue: int, requests: list[int]
) -> None:
    limits, under_way = Limits(slots=slots, max_queue=max_queue), 0
    for asked in requests:
        full = admit(limits, under_way=under_way, asked=asked, sequence_s=1.0)
        assert (full is None) == (under_way + asked <= slots + max_queue)
        under_way += asked if full is None else 0


@settings(deadline=None)
@given(under_way=COUNTS, asked=st.integers(1, 50), more=st.integers(0, 50), sequence_s=st.floats(0.01, 100))
def test_a_longer_queue_never_means_a_shorter_wait(under_way: int, asked: int, more: int, sequence_s: float) -> None:
    shorter = admit(LIMITS, under_way=under_way, asked=asked, sequence_s=sequence_s)
    longer = admit(LIMITS, under_way=under_way + more, asked=asked, sequence_s=sequence_s)
    if shorter is not None:
        assert longer is not None
        assert longer.retry_after_s >= shorter.retry_after_s
