"""When the reference of the KL penalty moves."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from edged.learn.anchor import Rated, Rules, in_force, moves
from edged.records import Anchor

ANCHOR = Anchor(version=4, since=1.0, ratings=20, mean_rating=0.5, before=0, configured=0, base_sha256="b")
RULES = Rules(configured=0, ratings=16)
rated = st.builds(
    Rated,
    version=st.integers(0, 3),
    ratings=st.integers(0, 40),
    mean=st.floats(-1.0, 1.0),
)


@given(live=rated, reference=rated, needed=st.integers(0, 40))
def test_it_moves_to_another_version_that_is_rated_often_enough_and_no_worse_and_to_no_other(
    live: Rated, reference: Rated, needed: int
) -> None:
    deserved = live.version != reference.version and live.ratings >= needed and live.mean >= reference.mean
    assert moves(live, reference, Rules(configured=0, ratings=needed)) == (needed > 0 and deserved)


def test_a_version_that_pleases_less_than_the_reference_does_not_become_it() -> None:
    reference = Rated(version=0, ratings=100, mean=0.25)
    assert not moves(Rated(version=3, ratings=500, mean=0.2), reference, RULES)
    assert moves(Rated(version=3, ratings=500, mean=0.25), reference, RULES)


def test_a_reference_that_nobody_rated_counts_as_neither_liked_nor_disliked() -> None:
    unrated = Rated(version=2, ratings=0, mean=0.0)
    assert moves(Rated(version=3, ratings=16, mean=0.0), unrated, RULES)
    assert not moves(Rated(version=3, ratings=16, mean=-0.1), unrated, RULES)


def test_what_the_operator_says_since_then_has_the_last_word() -> None:
    assert in_force(ANCHOR, "b", RULES) == ANCHOR
    assert in_force(None, "b", RULES) is None
    assert in_force(ANCHOR, "another base", RULES) is None
    assert in_force(ANCHOR, "b", dataclasses.replace(RULES, configured=2)) is None
    assert in_force(ANCHOR, "b", dataclasses.replace(RULES, ratings=0)) is None
