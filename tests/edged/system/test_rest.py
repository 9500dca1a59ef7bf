"""A worker that holds a card sleeps after so long without work, never while it works, and wakes when it is needed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edged.system.rest import Rest, step

KEEP_S = 10.0


def test_it_sleeps_once_its_time_without_work_is_over() -> None:
    state, action = step(Rest(used_at=0.0), in_use=False, keep_warm_s=KEEP_S, now=9.9)
    assert action is None
    state, action = step(state, in_use=False, keep_warm_s=KEEP_S, now=10.0)
    assert (action, state.asleep) == ("sleep", True)
    assert step(state, in_use=False, keep_warm_s=KEEP_S, now=99.0) == (state, None)


def test_it_wakes_when_it_is_needed_and_its_time_begins_anew() -> None:
    state, action = step(Rest(used_at=0.0, asleep=True), in_use=True, keep_warm_s=KEEP_S, now=50.0)
    assert (action, state) == ("wake", Rest(used_at=50.0))
    assert step(state, in_use=False, keep_warm_s=KEEP_S, now=59.0)[1] is None


def test_a_worker_that_holds_no_card_any_more_wakes_and_stays() -> None:
    state, action = step(Rest(used_at=0.0, asleep=True), in_use=False, keep_warm_s=None, now=5.0)
    assert (action, state.asleep) == ("wake", False)
    assert step(state, in_use=False, keep_warm_s=None, now=1e9)[1] is None


@given(st.lists(st.tuples(st.floats(0, 20), st.booleans()), max_size=40))
def test_it_is_never_asleep_while_used_and_always_after_long_rest(looks: list[tuple[float, bool]]) -> None:
    state, now, used_at, asleep = Rest(used_at=0.0), 0.0, 0.0, False
    for passed_s, in_use in looks:
        now += passed_s
        used_at = now if in_use else used_at
        state, action = step(state, in_use=in_use, keep_warm_s=KEEP_S, now=now)
        asleep = {"sleep": True, "wake": False, None: asleep}[action]
        assert state.asleep == asleep == (not in_use and now - used_at >= KEEP_S)
