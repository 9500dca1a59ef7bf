"""The two-context swap: no request changes its adapter, and the routed version is what new requests get."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.generate.swap import MAX_WAITING_STAGES, Action, Decline, Free, Place, Restore, Swap, SwapError


class Machine:
    """What the actions do to contexts and loaded adapters, with the rules of llama.cpp as assertions."""

    def __init__(self, version: int) -> None:
        self.set_on = {0: version, 1: version}
        self.loaded = {version}
        self.proving: dict[str, int] = {}
        self.declined: list[str] = []

    def perform(self, actions: tuple[Action, ...], requests: dict[int, tuple[int, int]]) -> None:
        for action in actions:
            match action:
                case Place(context, version, job_id):
                    assert not any(c == context for c, _ in requests.values()), "adapter changed under a request"
                    self.loaded.add(version)
                    self.set_on[context] = version
                    self.proving[job_id] = version
                case Restore(context, version):
                    assert not any(c == context for c, _ in requests.values()), "adapter changed under a request"
                    assert version in self.loaded, "restored an adapter that was freed"
                    self.set_on[context] = version
                case Free(version):
                    assert version not in self.set_on.values(), "freed an adapter that is set"
                    self.loaded.discard(version)
                case Decline(job_id, _):
                    self.declined.append(job_id)


class SwapRuns(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.swap = Swap(0)
        self.machine = Machine(0)
        self.requests: dict[int, tuple[int, int]] = {}  # request -> (context, version that it began on)
        self.routed = 0
        self.number = 0

    def perform(self, actions: tuple[Action, ...]) -> None:
        self.machine.perform(actions, self.requests)

    @rule()
    def begin(self) -> None:
        self.number += 1
        context = self.swap.begin()
        assert self.swap.version(context) == self.routed
        self.requests[self.number] = (context, self.routed)

    @rule(version=st.integers(0, 5))
    def begin_on(self, version: int) -> None:
        self.number += 1
        context = self.swap.begin_on(version)
        if context is None:
            assert version != self.routed
        else:
            assert self.swap.version(context) == version
            self.requests[self.number] = (context, version)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        context, _ = self.requests.pop(data.draw(st.sampled_from(sorted(self.requests))))
        self.perform(self.swap.end(context))

    @rule(version=st.integers(0, 5))
    def stage(self, version: int) -> None:
        self.number += 1
        self.perform(self.swap.stage(f"job-{self.number}", version))

    @precondition(lambda self: self.machine.proving)
    @rule(good=st.booleans())
    def prove(self, good: bool) -> None:
        (job_id,) = self.machine.proving
        del self.machine.proving[job_id]
        self.perform(self.swap.proved(job_id) if good else self.swap.failed(job_id))

    @rule(version=st.integers(0, 5))
    def route(self, version: int) -> None:
        other = 1 - self.swap.live
        ready = self.swap.version(other) == version and self.swap.role(other) != "staging"
        assert self.swap.route(version) == (ready or version == self.routed)
        if ready or version == self.routed:
            self.routed = version
        self.perform(self.swap.after_route())

    @invariant()
    def requests_decode_under_the_adapter_they_began_with(self) -> None:
        for context, version in self.requests.values():
            assert self.machine.set_on[context] == version

    @invariant()
    def one_context_is_live_and_holds_the_routed_version(self) -> None:
        assert [self.swap.role(c) for c in (0, 1)].count("live") == 1
        assert self.machine.set_on[self.swap.live] == self.routed

    @invariant()
    def set_adapters_are_loaded_and_few(self) -> None:
        assert set(self.machine.set_on.values()) <= self.machine.loaded
        assert len(self.machine.loaded) <= 3

    @invariant()
    def contexts_hold_what_the_swap_says(self) -> None:
        assert self.machine.set_on == {c: self.swap.version(c) for c in (0, 1)}

    @invariant()
    def a_draining_context_has_requests_and_a_spare_one_has_none(self) -> None:
        for context in (0, 1):
            has = any(c == context for c, _ in self.requests.values())
            assert self.swap.role(context) != "draining" or has
            assert self.swap.role(context) not in ("spare", "staging", "staged") or not has


TestSwap = SwapRuns.TestCase
TestSwap.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


def staged(swap: Swap, version: int) -> None:
    assert swap.stage(f"job-{version}", version) == (Place(1 - swap.live, version, f"job-{version}"),)
    swap.proved(f"job-{version}")


def test_a_route_back_needs_no_staging_even_while_the_old_context_drains() -> None:
    swap = Swap(0)
    old = swap.begin()
    staged(swap, 1)
    assert swap.route(1)
    assert swap.role(old) == "draining"
    assert swap.route(0)
    assert swap.live == old
    assert swap.begin() == old


def test_a_stage_waits_until_the_old_context_has_drained() -> None:
    swap = Swap(0)
    old = swap.begin()
    staged(swap, 1)
    swap.route(1)
    assert swap.stage("next", 2) == ()
    assert swap.end(old) == (Place(old, 2, "next"),)


def test_a_failed_stage_brings_back_what_the_context_held_and_frees_the_failure() -> None:
    swap = Swap(0)
    staged(swap, 1)
    swap.route(1)
    (place,) = swap.stage("bad", 2)
    assert isinstance(place, Place)
    assert swap.failed("bad") == (Restore(place.context, 0), Free(2))
    assert swap.route(0)


def test_a_version_that_is_being_proved_is_not_routed() -> None:
    swap = Swap(0)
    swap.stage("job", 1)
    assert not swap.route(1)
    assert swap.live_version == 0


def test_the_old_adapter_is_freed_only_when_the_next_one_is_proved() -> None:
    swap = Swap(0)
    staged(swap, 1)
    swap.route(1)
    swap.stage("job-2", 2)
    assert swap.proved("job-2") == (Free(0),)


def test_too_many_waiting_stages_are_declined() -> None:
    swap = Swap(0)
    swap.stage("first", 1)
    for number in range(MAX_WAITING_STAGES):
        assert swap.stage(f"waits-{number}", 2 + number) == ()
    assert swap.stage("too many", 9) == (Decline("too many", 9),)


def test_a_request_on_a_version_that_is_not_live_holds_its_context_and_gives_way_to_a_stage() -> None:
    swap = Swap(0)
    staged(swap, 1)
    assert swap.begin_on(1) == 1
    assert swap.begin_on(0) == swap.live
    assert swap.begin_on(2) is None
    assert swap.stage("next", 2) == ()
    assert swap.begin_on(1) is None
    assert swap.end(1) == (Place(1, 2, "next"),)
    assert swap.begin_on(2) is None


def test_an_end_without_a_request_is_a_bug() -> None:
    with pytest.raises(SwapError):
        Swap(0).end(0)
