"""The life of a worker as a pure state machine, against a model of the process it steers."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edged.system import supervise
from edged.system.supervise import AskToStop, Exited, Heard, Kill, Limits, Spawn, State, Tick, Unwant, Want

LIMITS = Limits(
    start_timeout_s=20.0,
    hang_timeout_s=10.0,
    stop_timeout_s=4.0,
    backoff_first_s=0.5,
    backoff_max_s=8.0,
    stable_s=60.0,
)

RUNNING = ("starting", "ready", "stopping")


def run(*events: tuple[float, supervise.Event], state: State | None = None) -> tuple[State, list[supervise.Action]]:
    """The state after (time, event)s, and every action on the way."""
    state = state or State()
    done: list[supervise.Action] = []
    for now, event in events:
        state, actions = supervise.step(state, event, now, LIMITS)
        done += actions
    return state, done


def crashed(n_times: int) -> tuple[State, float]:
    """A wanted worker that died `n_times` in a row while it started, and the time of its last death."""
    state, _ = run((0.0, Want()))
    now = 0.0
    for number in range(n_times):
        if number:
            now = state.retry_at
            state, _ = run((now, Tick()), state=state)
        now += 1.0
        state, _ = run((now, Exited(state.epoch, "exit code 1")), state=state)
    return state, now


class OneProcess(RuleBasedStateMachine):
    """Random events, on a worker process that obeys, dies or ignores what it is told, at any time."""

    @initialize()
    def begin(self) -> None:
        self.state = State()
        self.now = 0.0
        self.alive: int | None = None
        self.told_to_end: set[int] = set()
        self.spawned: list[int] = []

    def feed(self, event: supervise.Event) -> None:
        self.state, actions = supervise.step(self.state, event, self.now, LIMITS)
        for action in actions:
            match action:
                case Spawn():
                    assert self.alive is None
                    self.alive = action.epoch
                    self.spawned.append(action.epoch)
                case AskToStop() | Kill():
                    assert action.epoch == self.alive
                    self.told_to_end.add(action.epoch)

    @rule()
    def want(self) -> None:
        self.feed(Want())

    @rule()
    def unwant(self) -> None:
        self.feed(Unwant())

    @rule(after_s=st.integers(0, 90).map(float))
    def time_passes(self, after_s: float) -> None:
        self.now += after_s
        self.feed(Tick())

    @rule()
    def tick_when_it_is_due(self) -> None:
        at = supervise.next_tick_at(self.state, LIMITS)
        if at is not None and at > self.now:
            before = self.state
            self.now = at - 0.25
            if self.now >= before.since:
                self.feed(Tick())
                assert self.state == before
            self.now = at
            self.feed(Tick())
            assert self.state != before

    @precondition(lambda self: self.alive is not None)
    @rule(ready=st.booleans())
    def the_process_speaks(self, ready: bool) -> None:
        assert self.alive is not None
        self.feed(Heard(self.alive, ready=ready))

    @precondition(lambda self: self.alive is not None)
    @rule()
    def the_process_dies(self) -> None:
        assert self.alive is not None
        epoch, self.alive = self.alive, None
        self.feed(Exited(epoch, "exit code 1"))

    @rule(behind=st.integers(1, 3), ready=st.booleans())
    def an_old_process_is_heard(self, behind: int, ready: bool) -> None:
        before = self.state
        self.feed(Heard(self.state.epoch - behind, ready=ready))
        self.feed(Exited(self.state.epoch - behind, "exit code 1"))
        assert self.state == before

    @invariant()
    def a_process_is_alive_exactly_in_the_phases_that_have_one(self) -> None:
        assert (self.alive is not None) == (self.state.phase in RUNNING)
        assert self.alive in (None, self.state.epoch)

    @invariant()
    def every_incarnation_has_an_epoch_of_its_own(self) -> None:
        assert self.spawned == list(range(1, len(self.spawned) + 1))

    @invariant()
    def a_wait_before_a_restart_is_bounded(self) -> None:
        if self.state.phase == "waiting":
            wait_s = self.state.retry_at - self.state.since
            assert LIMITS.backoff_first_s <= wait_s <= LIMITS.backoff_max_s

    @invariant()
    def an_unwanted_worker_is_on_its_way_out(self) -> None:
        if not self.state.wanted:
            assert self.state.phase in ("stopping", "stopped")

    def teardown(self) -> None:
        """Whatever happened: an unwanted process is told to end, and killed if it does not listen."""
        self.feed(Unwant())
        if self.alive is not None:
            assert self.alive in self.told_to_end
            self.now += LIMITS.stop_timeout_s
            self.told_to_end.clear()
            self.feed(Tick())
            assert self.alive in self.told_to_end
            self.the_process_dies()
        assert self.state.phase == "stopped"


TestOneProcess = OneProcess.TestCase
TestOneProcess.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)


def test_a_wanted_worker_is_started_once() -> None:
    state, actions = run((0.0, Want()), (1.0, Want()))
    assert (state.phase, actions) == ("starting", [Spawn(1)])


def test_a_worker_that_is_not_ready_in_time_is_killed() -> None:
    state, actions = run((0.0, Want()), (15.0, Heard(1)), (19.5, Tick()))
    assert actions == [Spawn(1)]
    state, actions = run((20.0, Tick()), state=state)
    assert actions == [Kill(1, "not ready within 20 s")]


def test_a_silent_worker_is_killed() -> None:
    state, _ = run((0.0, Want()), (2.0, Heard(1, ready=True)), (8.0, Heard(1)), (17.5, Tick()))
    assert state.phase == "ready"
    _, actions = run((18.0, Tick()), state=state)
    assert actions == [Kill(1, "silent for 10 s")]


def test_a_worker_that_ignores_the_request_to_stop_is_killed() -> None:
    state, actions = run((0.0, Want()), (1.0, Heard(1, ready=True)), (2.0, Unwant()), (5.0, Heard(1)))
    assert actions == [Spawn(1), AskToStop(1, 4.0)]
    _, actions = run((6.0, Tick()), state=state)
    assert actions == [Kill(1, "did not stop within 4 s")]


def test_a_kill_is_repeated_only_after_another_timeout() -> None:
    state, _ = run((0.0, Want()), (20.0, Tick()))
    _, actions = run((21.0, Tick()), (39.5, Tick()), (40.0, Tick()), state=state)
    assert actions == [Kill(1, "not ready within 20 s")]


def test_a_worker_that_died_is_started_again_after_a_wait() -> None:
    state, actions = run((0.0, Want()), (1.0, Exited(1, "exit code 1")), (1.25, Tick()))
    assert (state.phase, state.why, actions) == ("waiting", "exit code 1", [Spawn(1)])
    state, actions = run((1.5, Tick()), state=state)
    assert (state.phase, actions) == ("starting", [Spawn(2)])


@pytest.mark.parametrize(("n_times", "wait_s"), [(1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (5, 8.0), (6, 8.0), (60, 8.0)])
def test_the_wait_doubles_with_every_failure_in_a_row_up_to_the_maximum(n_times: int, wait_s: float) -> None:
    state, died_at = crashed(n_times)
    assert state.retry_at - died_at == wait_s


def test_failures_are_forgotten_after_a_worker_was_ready_long_enough() -> None:
    state, _ = crashed(5)
    now = state.retry_at
    state, _ = run((now, Tick()), (now, Heard(6, ready=True)), (now + 60.0, Exited(6, "killed")), state=state)
    assert state.retry_at == now + 60.0 + LIMITS.backoff_first_s


def test_failures_are_kept_while_a_worker_was_ready_for_a_short_time_only() -> None:
    state, _ = crashed(2)
    now = state.retry_at
    state, _ = run((now, Tick()), (now, Heard(3, ready=True)), (now + 59.0, Exited(3, "killed")), state=state)
    assert state.retry_at == now + 59.0 + 2.0


def test_a_long_start_does_not_count_as_stable() -> None:
    patient = dataclasses.replace(LIMITS, start_timeout_s=1000.0)
    state, _ = supervise.step(State(), Want(), 0.0, patient)
    state, _ = supervise.step(state, Exited(1, "exit code 1"), 500.0, patient)
    state, _ = supervise.step(state, Tick(), 500.5, patient)
    state, _ = supervise.step(state, Exited(2, "exit code 1"), 900.0, patient)
    assert state.failures == 2


def test_a_worker_wanted_again_while_it_stops_is_started_as_soon_as_it_is_gone() -> None:
    state, actions = run((0.0, Want()), (1.0, Unwant()), (1.5, Want()), (2.0, Exited(1, "exit code 0")))
    assert (state.phase, state.failures, actions) == ("starting", 0, [Spawn(1), AskToStop(1, 4.0), Spawn(2)])


def test_a_worker_that_is_unwanted_while_it_waits_is_not_started() -> None:
    state, actions = run((0.0, Want()), (1.0, Exited(1, "exit code 1")), (1.25, Unwant()), (99.0, Tick()))
    assert (state.phase, actions) == ("stopped", [Spawn(1)])
