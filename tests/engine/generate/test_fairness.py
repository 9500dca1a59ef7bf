"""Users take turns: nobody starves, nobody is served much more than another who waits, and nothing is kept for ever."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.generate.fairness import FORGET_EVERY, SAMPLED_WEIGHT, FairQueue, Service

USERS = ("ann", "bob", "cid", "dee")
PROMPT_MAX, SAMPLED_MAX = 20, 10


@dataclasses.dataclass(frozen=True)
class Piece:
    key: int
    user: str
    prompt: int = 10


def queue(*pieces: Piece) -> FairQueue[Piece]:
    line: FairQueue[Piece] = FairQueue(Service())
    for piece in pieces:
        line.push(piece)
    return line


def serve(line: FairQueue[Piece]) -> Piece:
    piece = line.head()
    assert piece is not None
    line.admit(piece, piece.prompt)
    return piece


class FairQueueRuns(RuleBasedStateMachine):
    """Two queues of one service, as the two contexts of a worker have them; the second one only drains."""

    def __init__(self) -> None:
        super().__init__()
        self.service = Service()
        self.line: FairQueue[Piece] = FairQueue(self.service)
        self.waiting: dict[str, list[Piece]] = {user: [] for user in USERS}
        self.running: list[Piece] = []
        self.next_key = 0

    @rule(user=st.sampled_from(USERS), prompt=st.integers(1, PROMPT_MAX))
    def push(self, user: str, prompt: int) -> None:
        piece = Piece(self.next_key, user, prompt)
        self.next_key += 1
        self.line.push(piece)
        self.waiting[user].append(piece)

    @precondition(lambda self: any(self.waiting.values()))
    @rule()
    def admit(self) -> None:
        piece = self.line.head()
        assert piece is not None, "somebody waits and nobody is next"
        assert piece is self.waiting[piece.user][0], "not the oldest one of its user"
        counters = {user: self.service.served(user) for user, pieces in self.waiting.items() if pieces}
        assert counters[piece.user] == min(counters.values())
        self.line.admit(piece, piece.prompt)
        self.waiting[piece.user].pop(0)
        self.running.append(piece)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def sample(self, data: st.DataObject) -> None:
        self.service.sample(data.draw(st.sampled_from(self.running)).user)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.running) - 1))
        self.service.leave(self.running.pop(index).user)

    @rule(user=st.sampled_from(USERS))
    def move(self, user: str) -> None:
        moved = self.line.withdraw(lambda piece: piece.user == user)
        assert moved == self.waiting[user]
        for piece in moved:
            self.line.push(piece)

    @rule(user=st.sampled_from(USERS))
    def cancel(self, user: str) -> None:
        assert self.line.withdraw(lambda piece: piece.user == user) == self.waiting[user]
        self.waiting[user] = []

    @invariant()
    def knows_who_waits(self) -> None:
        assert bool(self.line) == any(self.waiting.values())
        passed = [user for user, pieces in self.waiting.items() if pieces]
        assert self.line.head(passed) is None
        if not self.line and not self.running:
            assert self.service.n_known == 0


TestFairQueue = FairQueueRuns.TestCase
TestFairQueue.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_a_single_request_is_next_however_many_another_user_has() -> None:
    line = queue(*(Piece(number, "ann") for number in range(200)))
    for _ in range(20):
        serve(line)
    line.push(Piece(900, "bob", prompt=500))
    assert serve(line).key == 900


def test_users_alternate_and_a_short_prompt_costs_less_of_a_turn() -> None:
    line = queue(*(Piece(n, "ann", 10) for n in range(9)), *(Piece(n, "bob", 20) for n in range(9)))
    order = [serve(line).user for _ in range(9)]
    assert (order.count("ann"), order.count("bob")) == (6, 3)


def test_what_is_sampled_counts() -> None:
    service = Service()
    line: FairQueue[Piece] = FairQueue(service)
    for user in ("ann", "bob"):
        for number in range(3):
            line.push(Piece(number, user))
    assert (serve(line).user, serve(line).user) == ("ann", "bob")
    service.sample("ann")
    assert [serve(line).user for _ in range(2)] == ["bob", "ann"]


def test_who_was_away_has_saved_nothing_up() -> None:
    line = queue(*(Piece(n, "ann") for n in range(100)), Piece(0, "bob"))
    for _ in range(60):
        serve(line)
    for number in range(10):
        line.push(Piece(number, "bob"))
    order = [serve(line).user for _ in range(10)]
    assert 4 <= order.count("ann") <= 6


@given(prompts=st.lists(st.integers(1, PROMPT_MAX), min_size=1, max_size=60), before=st.integers(0, 5))
def test_newcomers_without_end_do_not_hold_up_who_waits(prompts: list[int], before: int) -> None:
    service = Service()
    line: FairQueue[Piece] = FairQueue(service)
    for number in range(before + 2):
        line.push(Piece(number, "ann"))
    for _ in range(before + 1):
        serve(line)
    for _ in range(50):  # what ran before counts against her, and is no reason to let her wait for ever
        service.sample("ann")
    turns = 0
    for number, prompt in enumerate(prompts):
        line.push(Piece(number, f"new {number}", prompt))
        turns += 1
        if serve(line).user == "ann":
            break
    else:
        assert turns < 2
    assert turns <= 2


@given(st.lists(st.tuples(st.integers(1, PROMPT_MAX), st.integers(0, SAMPLED_MAX)), min_size=10, max_size=80))
def test_two_users_who_always_wait_are_served_alike(work: list[tuple[int, int]]) -> None:
    service = Service()
    line: FairQueue[Piece] = FairQueue(service)
    served = {"ann": 0, "bob": 0}
    costs: dict[int, tuple[int, int]] = {}
    for number, (prompt, sampled) in enumerate(work * 2):
        line.push(Piece(number, "ann" if number < len(work) else "bob", prompt))
        costs[number] = (prompt, sampled)
    for _ in range(len(work)):
        piece = serve(line)
        prompt, sampled = costs[piece.key]
        served[piece.user] += prompt + SAMPLED_WEIGHT * sampled
        for _ in range(sampled):
            service.sample(piece.user)
        assert abs(served["ann"] - served["bob"]) <= PROMPT_MAX + SAMPLED_WEIGHT * SAMPLED_MAX


def test_users_that_have_gone_are_forgotten_once_they_owe_nothing() -> None:
    service = Service()
    line: FairQueue[Piece] = FairQueue(service)
    line.push(Piece(0, "stays"))
    for number in range(20 * FORGET_EVERY):
        line.push(Piece(number, f"guest {number}"))
        service.leave(serve(line).user)
        service.sample("stays") if service.n_known and not line else None
    assert service.n_known <= 3 * FORGET_EVERY


def test_only_the_first_of_a_user_can_be_admitted() -> None:
    first, second = Piece(0, "ann"), Piece(1, "ann")
    line = queue(first, second)
    with pytest.raises(ValueError, match="not the first"):
        line.admit(second, 1)
