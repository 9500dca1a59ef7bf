"""The scheduler against a model of a unified KV cache: every row must come out of the right tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.generate.fairness import SAMPLED_WEIGHT, Service
from engine.generate.scheduler import Admitted, Copy, Forget, Piece, RowOf, Scheduler, Step

SLOTS, SEQUENCES, POOL = 3, 5, 60
USERS = ("ann", "bob", "cid")


class Cache:
    """A unified KV cache: cells named by number, each sequence a list of (token, cell)."""

    def __init__(self, pool: int) -> None:
        self.pool = pool
        self.sequences: dict[int, list[tuple[int, int]]] = {}
        self.next_cell = 0

    def run(self, step: Step) -> list[tuple[RowOf, list[int]]]:
        """Perform the step; the tokens that each row has seen."""
        for move in step.moves:
            match move:
                case Copy(source, target, n):
                    assert not self.sequences.get(target), "copied onto a sequence that holds cells"
                    self.sequences[target] = self.sequences[source][:n]
                    assert len(self.sequences[target]) == n
                case Forget(sequence):
                    self.sequences.pop(sequence, None)
        seen = []
        rows = iter(step.rows)
        for entry in step.entries:
            chain = self.sequences.setdefault(entry.sequence, [])
            assert entry.position == len(chain), "a position was skipped or written twice"
            chain.append((entry.token, self.next_cell))
            self.next_cell += 1
            if entry.wants_row:
                seen.append((next(rows), [token for token, _ in chain]))
        assert next(rows, None) is None
        used = {cell for chain in self.sequences.values() for _, cell in chain}
        assert len(used) <= self.pool, "the pool overflowed"
        return seen


def piece(key: Hashable, tokens: tuple[int, ...], room: int = 4, user: str = "", group: str = "") -> Piece:
    return Piece(key, tokens, rows_from=len(tokens) - 1, room=room, user=user, group=group)


def scheduler(slots: int = SLOTS, pool: int = POOL, sequences: int = SEQUENCES, kept: int = POOL) -> Scheduler:
    return Scheduler(slots=slots, n_sequences=sequences, pool_tokens=pool, kept_tokens=kept)


@dataclasses.dataclass
class Running:
    tokens: list[int]
    room: int
    user: str
    started: bool = False


class SchedulerRuns(RuleBasedStateMachine):
    """Arbitrary pieces, sampling, finishing and cancelling; the caller obeys the contract and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = scheduler(kept=20)
        self.cache = Cache(POOL)
        self.work: dict[int, Running] = {}
        self.submitted: dict[str, list[int]] = {user: [] for user in USERS}
        self.admitted: dict[str, list[int]] = {user: [] for user in USERS}
        self.next_key = 0

    # Few distinct tokens: common prefixes are frequent.
    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=25),
        room=st.integers(1, 15),
        user=st.sampled_from(USERS),
    )
    def submit(self, tokens: list[int], room: int, user: str) -> None:
        key = self.next_key
        self.next_key += 1
        self.scheduler.submit(piece(key, tuple(tokens), room, user, group="".join(map(str, tokens))))
        self.work[key] = Running(list(tokens), room, user)
        self.submitted[user].append(key)

    @rule(prompt_tokens=st.integers(1, 12), token=st.integers(0, 1), ends=st.booleans())
    def step(self, prompt_tokens: int, token: int, ends: bool) -> None:
        step = self.scheduler.plan(prompt_tokens)
        for admitted in step.admitted:
            assert isinstance(admitted.key, int)
            self.admitted[self.work[admitted.key].user].append(admitted.key)
            self.work[admitted.key].started = True
        seen = self.cache.run(step)
        for row, tokens in seen:
            assert isinstance(row.key, int)
            running = self.work[row.key]
            assert tokens == running.tokens, "a row was computed from other tokens than the piece's"
            if running.room == 0 or ends:
                self.scheduler.finish(row.key)
                del self.work[row.key]
            else:
                self.scheduler.append(row.key, token)
                running.tokens.append(token)
                running.room -= 1
        if not step.entries:
            assert not self.scheduler.has_work, "work waits but nothing is planned"

    @precondition(lambda self: self.work)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.work)))
        if self.work[key].started:
            self.scheduler.finish(key)
        else:
            assert [p.key for p in self.scheduler.withdraw(lambda p: p.key == key)] == [key]
            self.submitted[self.work[key].user].remove(key)
        del self.work[key]

    @precondition(lambda self: not self.scheduler.active_keys())
    @rule()
    def change_adapter(self) -> None:
        self.scheduler.forget_all()
        self.cache.sequences.clear()

    @invariant()
    def never_promises_more_than_the_pool(self) -> None:
        assert self.scheduler.cells_reserved <= POOL

    @invariant()
    def uses_no_more_slots_than_it_has(self) -> None:
        assert len(self.scheduler.active_keys()) <= SLOTS

    @invariant()
    def admits_in_the_order_of_submission_within_a_user(self) -> None:
        for user in USERS:
            assert self.admitted[user] == self.submitted[user][: len(self.admitted[user])]

    def teardown(self) -> None:
        for _ in range(10_000):
            if not self.scheduler.has_work:
                break
            self.step(prompt_tokens=3, token=1, ends=False)
        assert not self.work, "a piece never ended"


TestScheduler = SchedulerRuns.TestCase
TestScheduler.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_choices_of_one_prompt_evaluate_it_once() -> None:
    s, prompt = scheduler(slots=4, pool=400, sequences=6), tuple(range(50))
    for choice in range(4):
        s.submit(piece(("r", choice), prompt))
    first = s.plan(100)
    assert len(first.entries) == 50
    assert first.admitted == (Admitted(("r", 0), 0),)
    s.append(("r", 0), 7)
    second = s.plan(100)
    assert [a.n_cached for a in second.admitted] == [49, 49, 49]
    assert len(second.entries) == 1 + 3  # the first choice's token, and the last prompt token of each other choice
    assert s.cells_reserved == 50 + 3 + 4 * 4


def test_a_burst_with_a_common_beginning_evaluates_it_once() -> None:
    s, common = scheduler(slots=4, pool=400, sequences=6), tuple(range(30))
    for number in range(3):
        s.submit(piece(number, (*common, 100 + number, 200 + number)))
    assert len(s.plan(100).entries) == 32
    s.append(0, 1)
    assert len(s.plan(100).entries) == 1 + 2 * 2


def test_a_short_common_beginning_is_not_waited_for() -> None:
    s = scheduler()
    s.submit(piece(0, (1, 2, 3, 4)))
    s.submit(piece(1, (1, 2, 9, 9)))
    assert len(s.plan(100).admitted) == 2


def test_a_long_prompt_does_not_stall_the_answers_that_run() -> None:
    s = scheduler(pool=1000)
    s.submit(piece("running", (1,), room=50))
    s.plan(8)
    s.append("running", 5)
    s.submit(piece("long", tuple(range(100, 200))))
    for _ in range(5):
        step = s.plan(8)
        assert [e.token for e in step.entries if e.wants_row] == [5]
        assert len(step.entries) == 1 + 8
        s.append("running", 5)


def test_the_next_turn_of_a_conversation_finds_its_history() -> None:
    s = scheduler(pool=200)
    s.submit(piece("turn 1", (1, 2, 3, 4), room=3))
    s.plan(100)
    for token in (5, 6):
        s.append("turn 1", token)
        s.plan(100)
    s.finish("turn 1")
    s.submit(piece("turn 2", (1, 2, 3, 4, 5, 6, 7, 8)))
    step = s.plan(100)
    assert step.admitted == (Admitted("turn 2", 6),)
    assert [entry.token for entry in step.entries] == [7, 8]


def test_an_exact_repeat_still_evaluates_its_last_token_for_the_row() -> None:
    s = scheduler()
    s.submit(piece(0, (1, 2, 3)))
    s.plan(100)
    s.finish(0)
    s.submit(piece(1, (1, 2, 3)))
    step = s.plan(100)
    assert [(e.token, e.wants_row) for e in step.entries] == [(3, True)]


def test_a_text_to_score_gets_every_row_from_where_it_asks() -> None:
    s = scheduler()
    s.submit(Piece("probe", (1, 2, 3, 4, 5), rows_from=2, room=0))
    step = s.plan(100)
    assert [row.index for row in step.rows] == [2, 3, 4]


def test_finished_sequences_make_room_when_the_pool_is_needed() -> None:
    s = scheduler(pool=20)
    s.submit(piece(0, tuple(range(12)), room=2))
    s.plan(100)
    s.finish(0)
    s.submit(piece(1, tuple(range(100, 115)), room=2))
    step = s.plan(100)
    assert step.moves == (Forget(0),)
    assert [a.key for a in step.admitted] == [1]


def test_finished_sequences_hold_no_more_than_is_good_for_the_running_ones_but_the_latest_stays() -> None:
    one = scheduler(slots=1, pool=1000, sequences=10, kept=25)
    cache = Cache(1000)
    for number in range(6):
        one.submit(piece(number, tuple(range(100 * number, 100 * number + 10)), room=0))
        cache.run(one.plan(100))
        one.finish(number)
    assert one.cells_kept == 20 + 10, "what finished since the last admission is looked at by the next one"
    assert len([chain for chain in cache.sequences.values() if chain]) == 3
    one.submit(piece("long", tuple(range(1000, 1080)), room=0))
    cache.run(one.plan(100))
    one.finish("long")
    one.submit(piece("next", (*range(1000, 1080), 5), room=0))
    (admitted,) = one.plan(100).admitted
    assert admitted.n_cached == 80, "longer than all that may be kept, but the latest"


def test_the_head_of_the_queue_is_not_overtaken_by_one_that_would_fit() -> None:
    s = scheduler(pool=20)
    s.submit(piece("running", (1, 2), room=8))
    s.plan(100)
    s.append("running", 3)
    s.submit(piece("large", tuple(range(10, 25)), room=3))
    s.submit(piece("small", (50,), room=1))
    assert s.plan(100).admitted == ()


def test_one_request_of_another_user_passes_two_hundred_that_wait_and_takes_the_next_slot() -> None:
    s = scheduler(slots=2, pool=1000)
    for number in range(200):
        s.submit(piece(("ann", number), (number, 7), room=3, user="ann"))
    s.plan(100)
    s.submit(piece("bob's", (900, 901, 902), user="bob"))
    assert s.plan(100).admitted == (), "both slots are taken"
    s.finish(s.active_keys()[0])
    (admitted,) = s.plan(100).admitted
    assert admitted.key == "bob's"


def test_what_a_user_was_served_in_one_context_counts_in_the_other() -> None:
    service = Service()
    old, new = (Scheduler(slots=1, n_sequences=2, pool_tokens=200, service=service) for _ in range(2))
    old.submit(piece("long", tuple(range(50)), user="ann"))
    old.plan(100)
    new.submit(piece("ann's", (1, 2), user="ann"))
    new.submit(piece("bob's", (3, 4), user="bob"))
    assert [a.key for a in new.plan(100).admitted] == ["bob's"]
    alone = Scheduler(slots=1, n_sequences=2, pool_tokens=200)
    alone.submit(piece("ann's", (1, 2), user="ann"))
    alone.submit(piece("bob's", (3, 4), user="bob"))
    assert [a.key for a in alone.plan(100).admitted] == ["ann's"]


def test_proofs_take_no_turn_and_put_no_newcomer_back() -> None:
    service = Service()
    live, spare = (Scheduler(slots=1, n_sequences=2, pool_tokens=200, service=service) for _ in range(2))
    for number in range(2):
        live.submit(piece(number, (number, 7), user="ann"))
    live.plan(100)
    spare.submit(Piece("proof", tuple(range(100)), rows_from=50, room=0))
    assert spare.plan(200).rows
    spare.finish("proof")
    live.submit(piece("bob's", (3, 4), user="bob"))
    live.finish(0)
    assert [a.key for a in live.plan(100).admitted] == ["bob's"]


def test_choices_wait_for_their_prompt_and_other_users_do_not_wait_with_them() -> None:
    s, prompt = scheduler(slots=4, pool=400, sequences=6), tuple(range(50))
    for choice in range(3):
        s.submit(piece(("ann", choice), prompt, user="ann"))
    s.submit(piece("ann's next", (300,), user="ann"))
    s.submit(piece("bob's", (200, 201), user="bob"))
    first = s.plan(16)
    assert [a.key for a in first.admitted] == [("ann", 0), "bob's"]
    assert [row.key for row in first.rows] == ["bob's"], "a short prompt does not wait for the end of a long one"
    s.finish("bob's")
    for _ in range(2):
        assert s.plan(16).admitted == ()
    assert [row.key for row in s.plan(16).rows] == [("ann", 0)]
    s.append(("ann", 0), 1)
    step = s.plan(16)
    assert step.admitted == (Admitted(("ann", 1), 49), Admitted(("ann", 2), 49), Admitted("ann's next", 0))


def test_the_oldest_prompt_gets_half_of_the_prompt_tokens_however_many_short_ones_come() -> None:
    s = scheduler(slots=3, pool=1000, sequences=8)
    s.submit(piece("long", tuple(range(100, 180)), room=0, user="ann"))
    for number in range(100):
        s.submit(piece(number, tuple(range(1000 + 10 * number, 1000 + 10 * number + 8)), room=0))
    for _ in range(9):
        step = s.plan(16)
        by_long = [entry.token for entry in step.entries if entry.token < 1000]
        assert len(by_long) == (16 if by_long[-1] == 179 else 8), "until it has no more left than they"
        assert len(step.entries) == 16
        for row in step.rows:
            s.finish(row.key)
    assert "long" not in s.active_keys()


def test_eight_choices_evaluate_their_prompt_once_also_where_slots_are_few_and_others_ask() -> None:
    s, cache, prompt = scheduler(slots=2, pool=400, sequences=4, kept=0), Cache(400), tuple(range(50))
    for choice in range(8):
        s.submit(piece(("ann", choice), prompt, room=2, user="ann", group="r"))
    for number in range(4):
        s.submit(piece(("bob", number), (200 + number, 201), room=2, user="bob"))
    evaluated = 0
    while s.has_work:
        step = s.plan(16)
        cache.run(step)
        evaluated += sum(entry.token < 50 for entry in step.entries)
        for row in step.rows:
            if row.index < (52 if row.key[0] == "ann" else 4) - 1:  # type: ignore[index]
                s.append(row.key, 100)
            else:
                s.finish(row.key)
    assert evaluated == 50 + 7, "the prompt, and its last token again for each other choice's first row"


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    rooms=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    slots=st.integers(1, 6),
)
def test_users_who_always_have_work_get_the_same_service(
    lengths: tuple[int, int], rooms: tuple[int, int], slots: int
) -> None:
    pool = 40 * slots
    s = scheduler(slots=slots, pool=pool, sequences=slots + 2, kept=0)
    served, waiting, n = {"ann": 0, "bob": 0}, {"ann": 0, "bob": 0}, 0
    room_left: dict[Hashable, int] = {}
    for _ in range(300):
        for index, user in enumerate(waiting):
            while waiting[user] < slots + 1:
                n += 1
                s.submit(piece((user, n), tuple(range(100 * n, 100 * n + lengths[index])), rooms[index], user))
                room_left[user, n] = rooms[index]
                waiting[user] += 1
        step = s.plan(16)
        assert len(s.active_keys()) == slots or s.cells_reserved > pool - 40, "a slot is empty while somebody waits"
        for admitted in step.admitted:
            user = admitted.key[0]  # type: ignore[index]
            waiting[user] -= 1
            served[user] += lengths[user == "bob"]
        for row in step.rows:
            if room_left[row.key] == 0:
                s.finish(row.key)
                continue
            room_left[row.key] -= 1
            s.append(row.key, 1)
            served[row.key[0]] += SAMPLED_WEIGHT  # type: ignore[index]
        assert abs(served["ann"] - served["bob"]) <= 2 * max(*lengths, SAMPLED_WEIGHT * pool)


def test_what_can_never_fit_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="never fit"):
        scheduler(pool=10).submit(piece("huge", tuple(range(8)), room=3))


def test_memory_is_not_cleared_under_a_running_piece() -> None:
    s = scheduler()
    s.submit(piece(0, (1, 2)))
    s.plan(10)
    with pytest.raises(ValueError, match="active"):
        s.forget_all()
