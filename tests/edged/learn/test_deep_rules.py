"""Which version is looked at, against which, over how many answers; and what is rolled back."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from edged.learn import deep_rules
from edged.records import Adapter, DeepVerdict, Live

PASSED = DeepVerdict(verdict="passed", against=0, at=1.0, reason="good")
REFUSED = DeepVerdict(verdict="refused", against=0, at=1.0, reason="bad")


def adapter(version: int, parent: int | None, deep: DeepVerdict | None = None) -> Adapter:
    return Adapter(
        version=version,
        parent_version=parent,
        origin="trained",
        state="published",
        created_at=1.0,
        sha256=None,
        folder=None,
        reason=None,
        kept=False,
        metrics={},
        deep=deep,
    )


def live(version: int, **changes: Any) -> Live:
    values: dict[str, Any] = {"since": 1.0, "why": "published", "caller": "learner", "pinned": False}
    return Live(version=version, **{**values, **changes})


def test_what_went_live_is_due_until_it_has_a_verdict_and_a_refused_one_until_that_is_carried_out() -> None:
    assert deep_rules.is_due(live(3), adapter(3, 2))
    assert not deep_rules.is_due(live(3), adapter(3, 2, PASSED))
    assert deep_rules.is_due(live(3), adapter(3, 2, REFUSED))
    assert not deep_rules.is_due(live(3), adapter(3, 2, dataclasses.replace(REFUSED, rolled_back_to=2)))
    assert not deep_rules.is_due(live(3), adapter(3, 2, dataclasses.replace(REFUSED, kept_why="it is pinned")))
    assert not deep_rules.is_due(live(0), adapter(0, None))


def test_a_version_is_compared_with_the_nearest_that_passed_or_else_with_its_parent() -> None:
    chain = {
        0: adapter(0, None),
        1: adapter(1, 0, PASSED),
        2: adapter(2, 1),
        3: adapter(3, 2, REFUSED),
        4: adapter(4, 3),
    }
    assert deep_rules.compared_with(4, chain, {1, 2, 3, 4}) == 1
    assert deep_rules.compared_with(4, chain, {2, 3, 4}) == 0
    assert deep_rules.compared_with(1, chain, {1}) == 0
    assert deep_rules.compared_with(9, {9: adapter(9, None)}, {9}) == 0
    long = {version: adapter(version, version - 1) for version in range(1, 40)}
    assert deep_rules.compared_with(39, long, set(long)) == 38
    assert deep_rules.compared_with(39, long, {39}) == 0


@given(st.integers(0, 60), st.integers(1024, 100_000))
def test_the_answers_stay_within_the_budget_and_take_prompts_first(known: int, budget: int) -> None:
    prompts, samples = deep_rules.shape(known, budget)
    assert 2 * deep_rules.ANSWER_TOKENS * prompts * samples <= budget
    assert prompts == min(known, deep_rules.PROMPTS_MAX, budget // (2 * deep_rules.ANSWER_TOKENS))
    assert (samples >= 1) == (prompts >= 1)
    assert samples <= deep_rules.SAMPLES_MAX


def test_only_a_version_that_is_live_and_nobodys_explicit_wish_is_rolled_back() -> None:
    assert deep_rules.objection(live(3), 3) == deep_rules.objection(live(3, why="rolled_back"), 3) == ""
    assert "not live any more, v4 is" in deep_rules.objection(live(4), 3)
    assert "pinned" in deep_rules.objection(live(3, pinned=True), 3)
    assert "uid:0 promoted" in deep_rules.objection(live(3, why="promoted", caller="uid:0"), 3)
