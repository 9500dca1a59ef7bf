"""How far versions lie from the live one: by hand, and what holds for every lineage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.learn.ages import ages

# 1, 2, 3 in a row; 5 made from 1 after a rollback, 9 from 5; 7 names no parent. 4, 6 and 8 went to candidates.
LINEAGE: dict[int, int | None] = {0: None, 1: 0, 2: 1, 3: 2, 5: 1, 7: None, 9: 5}


@pytest.mark.parametrize(
    ("live", "steps", "behind"),
    [
        (0, {0: 0, 1: 1, 2: 2, 3: 3, 5: 2, 7: 1, 9: 3}, {0}),
        (1, {0: 1, 1: 0, 2: 1, 3: 2, 5: 1, 7: 2, 9: 2}, {0, 1}),
        (3, {0: 3, 1: 2, 2: 1, 3: 0, 5: 3, 7: 4, 9: 4}, {0, 1, 2, 3}),
        (9, {0: 3, 1: 2, 2: 3, 3: 4, 5: 1, 7: 4, 9: 0}, {0, 1, 5, 9}),
    ],
)
def test_steps_are_counted_through_the_nearest_common_ancestor(
    live: int, steps: dict[int, int], behind: set[int]
) -> None:
    found = ages(LINEAGE, live)
    assert (found.live, found.steps, found.behind) == (live, steps, behind)
    assert found.within(1) == {version for version, age in steps.items() if age <= 1}


LINEAGES = st.lists(st.integers(0, 10**6), max_size=25).map(
    lambda draws: {0: None} | {2 * n: 2 * (draw % n) for n, draw in enumerate(draws, start=1)}
)


@given(LINEAGES, st.data())
def test_ages_are_the_distances_of_a_tree(parents: dict[int, int | None], data: st.DataObject) -> None:
    first, second = (data.draw(st.sampled_from(sorted(parents))) for _ in range(2))
    assert ages(parents, first).steps[first] == 0
    assert ages(parents, first).steps[second] == ages(parents, second).steps[first]
    child = max(parents) + 1
    longer = parents | {child: first}
    assert ages(longer, child).steps == {v: age + 1 for v, age in ages(parents, first).steps.items()} | {child: 0}
    assert ages(parents | {child: None}, first).steps.items() >= ages(parents, first).steps.items()
