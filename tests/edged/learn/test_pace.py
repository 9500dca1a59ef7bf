"""How much of the time training may take: less where it slows answers down, all of it where it does not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.learn.first_tokens import QUIET_MIN, TRAINING_MIN
from edged.learn.pace import SLOWDOWN_MAX, Pace, Targets, allowed, observe, slowdown_of
from engine.protocol import FirstToken, Gap

TARGETS = Targets(min_share=0.1, ttft_inflation=1.3)
QUIET = [Gap(answers=1, steps=50, seconds=0.5), Gap(answers=4, steps=20, seconds=0.5)]


def gaps(factor: float, steps: int = 20) -> list[Gap]:
    """Gaps of four answers that are `factor` times the quiet ones."""
    return [Gap(answers=4, steps=steps, seconds=0.025 * factor * steps)]


def paced(share: float = 1.0) -> Pace:
    return Pace(observe(Pace(), QUIET, is_training=False, targets=TARGETS).quiet_s, share)


def test_quiet_gaps_are_remembered_by_how_many_answers_ran() -> None:
    assert paced().quiet_s == {1: pytest.approx(0.01), 4: pytest.approx(0.025)}
    later = observe(paced(), [Gap(answers=4, steps=1, seconds=0.05)], is_training=False, targets=TARGETS)
    assert later.quiet_s == {1: pytest.approx(0.01), 4: pytest.approx(0.8 * 0.025 + 0.2 * 0.05)}


def test_a_slowdown_halves_the_share_down_to_the_least_that_learning_keeps() -> None:
    pace, shares = paced(), []
    for _ in range(6):
        pace = observe(pace, gaps(SLOWDOWN_MAX * 1.1), is_training=True, targets=TARGETS)
        shares.append(pace.share)
    assert shares == [0.5, 0.25, 0.125, 0.1, 0.1, 0.1]


def test_the_share_grows_back_once_answers_are_fast_again() -> None:
    pace, shares = paced(0.1), []
    for _ in range(7):
        pace = observe(pace, gaps(1.05), is_training=True, targets=TARGETS)
        shares.append(pace.share)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_between_the_two_bounds_the_share_stays() -> None:
    assert observe(paced(0.4), gaps(1.7), is_training=True, targets=TARGETS).share == 0.4


def test_gaps_that_cannot_be_compared_or_are_few_prove_nothing() -> None:
    unknown = [Gap(answers=9, steps=100, seconds=90.0)]
    assert slowdown_of(paced().quiet_s, unknown) is None
    assert observe(paced(), unknown, is_training=True, targets=TARGETS).share == 1.0
    assert observe(paced(), gaps(10.0, steps=7), is_training=True, targets=TARGETS).share == 1.0


def test_gaps_of_many_answers_are_compared_with_those_of_as_many() -> None:
    mixed = [Gap(answers=1, steps=10, seconds=0.1), Gap(answers=4, steps=10, seconds=0.25)]
    assert slowdown_of(paced().quiet_s, mixed) == pytest.approx(1.0)


def first(seconds: float) -> FirstToken:
    return FirstToken(queue_s=0.0, prefill_s=seconds, beside=0, evaluated_tokens=50)


def waited(pace: Pace, factor: float, *, slowdown: float = 1.7) -> Pace:
    """As many first tokens as prove something, `factor` times as late as usual, and gaps of middling length."""
    firsts = [first(0.2 * factor)] * TRAINING_MIN
    return observe(pace, gaps(slowdown), firsts, is_training=True, targets=TARGETS)


def known(share: float = 1.0) -> Pace:
    return observe(paced(share), [], [first(0.2)] * QUIET_MIN, is_training=False, targets=TARGETS)


def test_late_first_tokens_cost_training_its_time_while_somebody_waits_and_then_while_answers_run() -> None:
    pace, shares = known(), []
    for _ in range(6):
        pace = waited(pace, 1.5)
        shares.append((pace.first_share, pace.share))
    assert shares == [(0.25, 1.0), (0.1, 1.0), (0.1, 0.5), (0.1, 0.25), (0.1, 0.125), (0.1, 0.1)]
    assert pace.inflation == pytest.approx(1.5)


def test_first_tokens_within_the_target_cost_nothing() -> None:
    pace = waited(known(), 1.25)
    assert (pace.first_share, pace.share) == (1.0, 1.0)
    assert pace.inflation == pytest.approx(1.25)


def test_the_share_of_waits_grows_back_and_shares_wait_for_fresh_evidence() -> None:
    pace = waited(known(), 2.0)
    assert pace.first_share == 0.25
    few = observe(pace, [], [first(0.2 * 2.0)] * (TRAINING_MIN - 1), is_training=True, targets=TARGETS)
    assert few.first_share == 0.25, "what was waited under another share says nothing of this one"
    for _ in range(5):
        pace = waited(pace, 1.0)
    assert pace.first_share == 1.0


def test_answers_that_flow_do_not_give_back_what_late_first_tokens_took() -> None:
    pace = known(share=0.4)
    for _ in range(3):
        pace = waited(pace, 1.5, slowdown=1.0)
    assert pace.share < 0.4
    in_time = waited(waited(pace, 1.1, slowdown=1.0), 1.1, slowdown=1.0)
    assert in_time.share > pace.share


def test_what_is_allowed_depends_on_who_is_there() -> None:
    pace = Pace(share=0.5, first_share=0.25)
    assert allowed(pace, answers_run=False, somebody_waits=False) == 1.0
    assert allowed(pace, answers_run=True, somebody_waits=False) == 0.5
    assert allowed(pace, answers_run=True, somebody_waits=True) == 0.25
    assert allowed(pace, answers_run=False, somebody_waits=True) == 0.25
    assert allowed(Pace(share=0.5), answers_run=True, somebody_waits=True) == 0.5


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 60), st.floats(0, 10), st.booleans(), st.floats(0, 50)), max_size=40
    ),
    st.floats(0.01, 1.0),
    st.floats(1.01, 5.0),
)
def test_shares_never_leave_their_range_whatever_is_measured(
    reports: list[tuple[int, int, float, bool, float]], min_share: float, target: float
) -> None:
    pace, targets = Pace(), Targets(min_share=min_share, ttft_inflation=target)
    for answers, steps, seconds, is_training, wait_s in reports:
        gap = Gap(answers=answers, steps=steps, seconds=seconds)
        firsts = [first(wait_s)] * 3
        pace = observe(pace, [gap], firsts, is_training=is_training, targets=targets)
        assert min_share <= pace.share <= 1.0
        assert min_share <= pace.first_share <= 1.0
        for answers_run in (False, True):
            for waits in (False, True):
                assert min_share <= allowed(pace, answers_run=answers_run, somebody_waits=waits) <= 1.0


@settings(deadline=None)
@given(harm=st.floats(0.0, 4.0), rest=st.floats(0.0, 1.0), target=st.floats(1.05, 2.0))
def test_on_a_box_where_a_smaller_share_helps_the_target_is_held_or_training_is_at_its_floor(
    harm: float, rest: float, target: float
) -> None:
    """harm: how much later first tokens are beside training that never rests. rest: of it, what resting while somebody
    waits does not help against."""
    pace, targets = known(), Targets(min_share=0.1, ttft_inflation=target)
    late = []
    for _ in range(60):
        factor = 1.0 + harm * (rest * pace.share + (1.0 - rest) * min(pace.share, pace.first_share))
        late.append(factor > target)
        pace = observe(pace, [], [first(0.2 * factor)] * TRAINING_MIN, is_training=True, targets=targets)
    at_floor = (pace.first_share, pace.share) == (0.1, 0.1)
    assert at_floor or sum(late[-30:]) <= 12, "late for no longer than it takes to notice, between longer times in time"
