"""How many requests may be under way."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from edged.serve.admission import Full, Limits, admit

LIMITS = Limits(slots=4, max_queue=6)
BOX = Limits(slots=16, max_queue=256)
COUNTS = st.integers(0, 300)


def test_a_request_that_fits_the_queue_is_taken() -> None:
    assert admit(LIMITS, under_way=9, own=0, asked=1, sequence_s=5.0) is None


def test_a_request_that_does_not_fit_is_told_when_a_slot_is_expected_to_be_free() -> None:
    assert admit(LIMITS, under_way=10, own=0, asked=4, sequence_s=5.0) == Full(retry_after_s=5.0)


def test_nobody_is_told_to_come_back_within_a_second() -> None:
    assert admit(LIMITS, under_way=10, own=0, asked=1, sequence_s=0.01) == Full(retry_after_s=1.0)


def taken(limits: Limits, under_way: Counter[str], user: str, asked: int = 1) -> Full | None:
    full = admit(limits, under_way=under_way.total(), own=under_way[user], asked=asked, sequence_s=1.0)
    under_way[user] += asked if full is None else 0
    return full


def fill(limits: Limits, under_way: Counter[str], user: str) -> Full:
    while (full := taken(limits, under_way, user)) is None:
        pass
    return full


def test_a_user_who_asks_without_end_leaves_room_for_others() -> None:
    under_way: Counter[str] = Counter()
    assert fill(BOX, under_way, "ann").own
    assert under_way["ann"] == 242
    assert [taken(BOX, under_way, "bob") for _ in range(20)] == [None] * 20
    assert taken(BOX, under_way, "cid") is None


def test_two_users_who_ask_without_end_have_equal_parts_in_the_end() -> None:
    under_way: Counter[str] = Counter()
    fill(BOX, under_way, "ann")
    for _ in range(600):  # what ends is the oldest work; both ask again at once
        fill(BOX, under_way, "bob")
        under_way[max(under_way, key=lambda user: under_way[user])] -= 1
    assert abs(under_way["ann"] - under_way["bob"]) <= 2
    assert taken(BOX, under_way, "cid") is None


def test_what_would_start_at_once_is_never_refused() -> None:
    assert admit(Limits(slots=64, max_queue=0), under_way=63, own=63, asked=1, sequence_s=5.0) is None


@settings(deadline=None)
@given(
    slots=st.integers(1, 64),
    max_queue=COUNTS,
    requests=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 20)), max_size=60),
)
def test_never_more_sequences_are_taken_than_slots_and_queue_hold_and_newcomers_have_any_room_there_is(
    slots: int, max_queue: int, requests: list[tuple[str, int]]
) -> None:
    limits, under_way = Limits(slots=slots, max_queue=max_queue), Counter[str]()
    for user, asked in requests:
        fits = under_way.total() + asked <= slots + max_queue
        is_new = under_way[user] == 0
        full = taken(limits, under_way, user, asked)
        assert fits or full is not None
        if is_new:
            assert (full is None) == fits
        if full is not None:
            assert full.own == fits


@settings(deadline=None)
@given(
    under_way=COUNTS,
    others=COUNTS,
    asked=st.integers(1, 50),
    more=st.integers(0, 50),
    sequence_s=st.floats(0.01, 100),
)
def test_a_longer_queue_never_means_a_shorter_wait(
    under_way: int, others: int, asked: int, more: int, sequence_s: float
) -> None:
    own = max(0, under_way - others)
    shorter = admit(LIMITS, under_way=under_way, own=own, asked=asked, sequence_s=sequence_s)
    longer = admit(LIMITS, under_way=under_way + more, own=own, asked=asked, sequence_s=sequence_s)
    if shorter is not None and not shorter.own:
        assert longer is not None
        assert longer.retry_after_s >= shorter.retry_after_s
