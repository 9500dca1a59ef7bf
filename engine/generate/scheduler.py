"""Which tokens of which sequences one context evaluates next. Pure: no llama.cpp, no clock.

A unit of work is a `Piece`: tokens to evaluate and room to append sampled ones (one choice of an answer, or a text to
score). Pieces wait in order within a user, and users take turns (`engine.generate.fairness`). The next one is admitted
once a slot is free and the KV pool has cells for all that it may ever need, so admitted work never runs out of cells,
and nothing smaller overtakes it for ever. A step evaluates one token of every piece that is being sampled and a bounded
number of prompt tokens, so that long prompts do not stall running answers. Half of these are the oldest prompt's, the
others go to whichever has least left, so that a short one does not wait for the end of a long one.

Prefixes are reused: a new piece shares the cells of the longest common prefix with any sequence of the same context,
running or finished. Finished sequences stay, least recently used first to go, until their ids or cells are needed, or
together they hold KEPT_TOKENS: every decode step reads all cells that are held, whoever needs them. The last one of a
group of which a piece still waits is the last to go. If a running prompt will soon hold a much longer common prefix, a
piece waits for it instead of evaluating the same tokens again: n choices of one prompt, or a burst of prompts with one
system text, evaluate it once. Other users go on meanwhile.

The caller owns one context: it performs `Step.moves` in order, evaluates `Step.entries` in one decode, and for every
piece that got its last row calls `append` or `finish` before the next `plan`. It calls `forget_all` whenever the
context's memory is cleared.

Invariants: a sequence id has one piece; held cells plus reserved growth never exceed the pool; pieces of a user are
admitted in the order of `submit`; a sequence's cells hold exactly the first `n_held` of its tokens.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable
from typing import NamedTuple

from engine.generate.cells import Cells
from engine.generate.fairness import FairQueue, Service
from engine.generate.prefixes import Prefixes

# A common prefix is worth waiting for if it saves this many tokens: about the cost of the step that is waited. If it is
# all of the prompt, it always is: there may be many choices of it.
WORTH_WAITING_TOKENS = 8
# Of finished sequences, the latest excepted: a step of one sequence takes a fifth longer with 1,900 cells held and half
# as long again with 3,600, and a prefix that comes back is mostly a system text or the latest turn of a chat.
KEPT_TOKENS = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Work for one sequence. rows_from: index of the first token whose logits row is wanted.

    room: how many tokens may be appended after `tokens`. user: who is served; None: nobody but the worker. group: of
    pieces with the same prompt, "" if there is no other.
    """

    key: Hashable
    tokens: tuple[int, ...]
    rows_from: int
    room: int
    user: str | None = None
    group: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.rows_from < len(self.tokens) or self.room < 0:
            raise ValueError(f"piece {self.key!r}: rows from {self.rows_from} of {len(self.tokens)} tokens")


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """Share the first `n_tokens` cells of `source` with the empty sequence `target`."""

    source: int
    target: int
    n_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Forget:
    """Free what only `sequence` holds."""

    sequence: int


class Entry(NamedTuple):  # there are thousands a second: a tuple is made three times as fast as a frozen dataclass
    """One token to evaluate."""

    sequence: int
    position: int
    token: int
    wants_row: bool


@dataclasses.dataclass(frozen=True, slots=True)
class RowOf:
    """Whose logits row it is: the row after token `index` of piece `key`."""

    key: Hashable
    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Admitted:
    """`key` has a slot now; `n_cached` of its tokens need no evaluation."""

    key: Hashable
    n_cached: int


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What to do now. `rows` is aligned with the entries that want a row."""

    moves: tuple[Copy | Forget, ...]
    entries: tuple[Entry, ...]
    rows: tuple[RowOf, ...]
    admitted: tuple[Admitted, ...]


class _Sequence:
    """A sequence that holds cells. tokens[:n_held] are evaluated."""

    __slots__ = ("id", "n_held", "n_prompt", "piece", "room", "tokens")

    def __init__(self, sequence_id: int, piece: Piece, n_held: int) -> None:
        self.id = sequence_id
        self.piece = piece
        self.tokens = list(piece.tokens)
        self.n_held = n_held
        self.n_prompt = len(piece.tokens)
        self.room = piece.room

    @property
    def n_waiting(self) -> int:
        return len(self.tokens) - self.n_held

    @property
    def growth(self) -> int:
        """Cells that it may still take."""
        return self.n_waiting + self.room

    @property
    def is_prompting(self) -> bool:
        return self.n_held < self.n_prompt


class Scheduler:
    """The queue and the sequences of one context."""

    def __init__(
        self,
        *,
        slots: int,
        n_sequences: int,
        pool_tokens: int,
        kept_tokens: int = KEPT_TOKENS,
        service: Service | None = None,
    ) -> None:
        """n_sequences: sequence ids of the context, more than `slots`: the rest keeps finished sequences.

        kept_tokens: that finished sequences may hold together, the latest used one excepted.
        service: what users were served, if other contexts serve them too.
        """
        if n_sequences <= slots:
            raise ValueError(f"{slots} slots need more sequence ids than {n_sequences}")
        self._slots = slots
        self._pool_tokens = pool_tokens
        self._kept_tokens = kept_tokens
        self._n_sequences = n_sequences
        self._service = Service() if service is None else service
        self._queue: FairQueue[Piece] = FairQueue(self._service)
        self._prefixes = Prefixes()
        self._groups: collections.Counter[str] = collections.Counter()  # how many pieces of each wait
        self._active: dict[Hashable, _Sequence] = {}  # in order of admission
        self._finished: dict[int, _Sequence] = {}  # least recently used first
        self._free_ids = list(range(n_sequences - 1, -1, -1))
        self._cells = Cells()

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._active)

    @property
    def cells_reserved(self) -> int:
        """Cells held or promised; at most the pool."""
        return self._cells.held + sum(sequence.growth for sequence in self._active.values())

    @property
    def cells_kept(self) -> int:
        """Cells held by finished sequences alone."""
        return self._cells.held - self._cells.held_by(
            (sequence.id for sequence in self._active.values()), source=None, n=0
        )

    def submit(self, piece: Piece) -> None:
        """Queue `piece`. It must fit into the empty pool."""
        if len(piece.tokens) + piece.room > self._pool_tokens:
            raise ValueError(f"piece {piece.key!r} can never fit into a pool of {self._pool_tokens} tokens")
        self._queue.push(piece)
        self._groups[piece.group] += 1

    def withdraw(self, chosen: Callable[[Piece], bool]) -> list[Piece]:
        """Take the chosen pieces out of the queue, in the order in which they came."""
        taken = self._queue.withdraw(chosen)
        for piece in taken:
            self._waits_no_more(piece)
        return taken

    def active_keys(self) -> tuple[Hashable, ...]:
        """Keys of the pieces that have a slot, in order of admission."""
        return tuple(self._active)

    def append(self, key: Hashable, token: int) -> None:
        """The token sampled from the last row of `key`: it is evaluated in the next step."""
        sequence = self._active[key]
        if sequence.n_waiting or sequence.room == 0:
            raise ValueError(f"piece {key!r} takes no token now")
        sequence.tokens.append(token)
        sequence.room -= 1
        self._service.sample(sequence.piece.user)

    def finish(self, key: Hashable) -> None:
        """`key` is done, at any point of its life; what was evaluated stays for prefix reuse."""
        sequence = self._active.pop(key)
        self._service.leave(sequence.piece.user)
        del sequence.tokens[sequence.n_held :]
        if sequence.n_held:
            self._finished[sequence.id] = sequence
        else:
            self._prefixes.gone(sequence.id)
            self._free_ids.append(sequence.id)

    def forget_all(self) -> None:
        """The context's memory was cleared. Nothing may be active."""
        if self._active:
            raise ValueError(f"{len(self._active)} sequences are active")
        self._finished.clear()
        self._prefixes = Prefixes()
        self._free_ids = list(range(self._n_sequences - 1, -1, -1))
        self._cells = Cells()

    def plan(self, prompt_tokens: int) -> Step:
        """The next step, evaluating at most `prompt_tokens` (at least 1) tokens of prompts."""
        moves: list[Copy | Forget] = []
        admitted = self._admit_waiting(moves)
        entries: list[Entry] = []
        rows: list[RowOf] = []
        prompting: list[_Sequence] = []
        for sequence in self._active.values():
            if sequence.is_prompting:
                prompting.append(sequence)
            elif sequence.n_waiting:
                self._evaluate(sequence, 1, entries, rows)
        for sequence, n in _shares(prompting, prompt_tokens):
            self._evaluate(sequence, n, entries, rows)
        return Step(tuple(moves), tuple(entries), tuple(rows), tuple(admitted))

    def _evaluate(self, sequence: _Sequence, n: int, entries: list[Entry], rows: list[RowOf]) -> None:
        for index in range(sequence.n_held, sequence.n_held + n):
            wants_row = index >= sequence.piece.rows_from
            entries.append(Entry(sequence.id, index, sequence.tokens[index], wants_row))
            if wants_row:
                rows.append(RowOf(sequence.piece.key, index))
        sequence.n_held += n
        self._cells.extend(sequence.id, n)

    def _admit_waiting(self, moves: list[Copy | Forget]) -> list[Admitted]:
        """Give slots to who can have them. Appends the moves that this takes."""
        admitted: list[Admitted] = []
        passed: set[str | None] = set()  # users whose next piece waits for a prefix, which costs nobody else a slot
        while len(self._active) < self._slots and (piece := self._queue.head(passed)) is not None:
            source, n_shared, is_early = self._longest_prefix(piece)
            if is_early:
                passed.add(piece.user)
            elif self._can_hold(piece, source, n_shared):
                self._queue.admit(piece, len(piece.tokens) - n_shared)
                self._waits_no_more(piece)
                admitted.append(self._admit(piece, source, n_shared, moves))
            else:
                break
        return admitted

    def _admit(self, piece: Piece, source: int | None, n_shared: int, moves: list[Copy | Forget]) -> Admitted:
        """Give `piece` a sequence that shares its first `n_shared` tokens with `source`."""
        if not self._free_ids:
            self._evict(self._dispensable(source), moves)
        target = self._free_ids.pop()
        if source is not None:
            moves.append(Copy(source, target, n_shared))
            self._cells.share(source, target, n_shared)
            if source in self._finished:  # the most recently used one now
                self._finished[source] = self._finished.pop(source)
        self._active[piece.key] = _Sequence(target, piece, n_shared)
        while self.cells_reserved > self._pool_tokens:
            self._evict(self._dispensable(None), moves)
        while len(self._finished) > 1 and self.cells_kept > self._kept_tokens:
            oldest = self._dispensable(None)
            if self._is_wanted(self._finished[oldest]):
                break
            self._evict(oldest, moves)
        return Admitted(piece.key, n_shared)

    def _waits_no_more(self, piece: Piece) -> None:
        self._prefixes.forget(piece.key)
        self._groups[piece.group] -= 1
        if self._groups[piece.group] == 0:
            del self._groups[piece.group]

    def _dispensable(self, source: int | None) -> int:
        """The finished sequence to go first, which is not `source`."""
        others = [i for i in self._finished if i != source]
        return next((i for i in others if not self._is_wanted(self._finished[i])), others[0])

    def _is_wanted(self, finished: _Sequence) -> bool:
        """Whether a piece waits that only `finished` has the prompt of."""
        group = finished.piece.group
        if not group or group not in self._groups:
            return False
        newest = next(s for s in reversed((*self._finished.values(), *self._active.values())) if s.piece.group == group)
        return newest is finished

    def _evict(self, sequence_id: int, moves: list[Copy | Forget]) -> None:
        del self._finished[sequence_id]
        self._cells.release(sequence_id)
        self._prefixes.gone(sequence_id)
        self._free_ids.append(sequence_id)
        moves.append(Forget(sequence_id))

    def _longest_prefix(self, piece: Piece) -> tuple[int | None, int, bool]:
        """The sequence whose evaluated tokens share most with `piece`, or None; how many; and whether a prompt that is
        being evaluated will share enough more to be waited for."""
        best: int | None = None
        n_best = n_soon = 0
        for sequence in (*self._active.values(), *self._finished.values()):
            n_common = self._prefixes.common(piece.key, piece.tokens, sequence.id, sequence.tokens)
            n_common = min(n_common, piece.rows_from)
            n = min(n_common, sequence.n_held)
            if n > n_best:
                best, n_best = sequence.id, n
            if sequence.is_prompting:
                n_soon = max(n_soon, n_common)
        is_early = n_soon >= n_best + WORTH_WAITING_TOKENS or n_best < n_soon == piece.rows_from
        return best, n_best, is_early

    def _can_hold(self, piece: Piece, source: int | None, n_shared: int) -> bool:
        """Whether the pool has room for all of `piece` once every finished sequence is evicted."""
        held = self._cells.held_by((s.id for s in self._active.values()), source, n_shared)
        growth = sum(sequence.growth for sequence in self._active.values())
        return held + growth + len(piece.tokens) - n_shared + piece.room <= self._pool_tokens


def _shares(prompting: list[_Sequence], n_tokens: int) -> list[tuple[_Sequence, int]]:
    """Who evaluates how many of `n_tokens` prompt tokens. prompting: oldest first."""
    if not prompting:
        return []
    oldest = min(prompting[0].n_waiting, (n_tokens + 1) // 2)
    shares = {prompting[0].id: oldest}
    left = n_tokens - oldest
    for sequence in sorted(prompting, key=lambda sequence: sequence.n_waiting - shares.get(sequence.id, 0)):
        had = shares.get(sequence.id, 0)
        more = min(left, sequence.n_waiting - had)
        shares[sequence.id] = had + more
        left -= more
    return [(sequence, n) for sequence in prompting if (n := shares[sequence.id])]
