"""Which tokens of which sequences one context evaluates next. Pure: no llama.cpp, no clock.

A unit of work is a `Piece`: tokens to evaluate and room to append sampled ones (one choice of an answer, or a text to
score). Pieces wait in one FIFO queue. The head is admitted once a slot is free and the KV pool has cells for all that
it may ever need, so admitted work never runs out of cells. A step evaluates one token of every piece that is being
sampled and a bounded number of prompt tokens, oldest piece first, so that long prompts do not stall running answers.

Prefixes are reused: a new piece shares the cells of the longest common prefix with any sequence of the same context,
running or finished. Finished sequences stay, least recently used first to go, until their ids or cells are needed, or
together they hold KEPT_TOKENS: every decode step reads all cells that are held, whoever needs them. If
a running prompt will soon hold a much longer common prefix, the head of the queue waits for it instead of evaluating
the same tokens again: n choices of one prompt, or a burst of prompts with one system text, evaluate it once.

The caller owns one context: it performs `Step.moves` in order, evaluates `Step.entries` in one decode, and for every
piece that got its last row calls `append` or `finish` before the next `plan`. It calls `forget_all` whenever the
context's memory is cleared.

Invariants: a sequence id has one user; held cells plus reserved growth never exceed the pool; pieces are admitted in
the order of `submit`; a sequence's cells hold exactly the first `n_held` of its tokens.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Sequence

from engine.generate.cells import Cells

# A common prefix is worth waiting for if it saves this many tokens: about the cost of the step that is waited.
WORTH_WAITING_TOKENS = 8
# Of finished sequences, the latest excepted: a step of one sequence takes a fifth longer with 1,900 cells held and half
# as long again with 3,600, and a prefix that comes back is mostly a system text or the latest turn of a chat.
KEPT_TOKENS = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Work for one sequence. rows_from: index of the first token whose logits row is wanted.

    room: how many tokens may be appended after `tokens`.
    """

    key: Hashable
    tokens: tuple[int, ...]
    rows_from: int
    room: int

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


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
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

    def __init__(self, *, slots: int, n_sequences: int, pool_tokens: int, kept_tokens: int = KEPT_TOKENS) -> None:
        """n_sequences: sequence ids of the context, more than `slots`: the rest keeps finished sequences.

        kept_tokens: that finished sequences may hold together, the latest used one excepted.
        """
        if n_sequences <= slots:
            raise ValueError(f"{slots} slots need more sequence ids than {n_sequences}")
        self._slots = slots
        self._pool_tokens = pool_tokens
        self._kept_tokens = kept_tokens
        self._n_sequences = n_sequences
        self._queue: collections.deque[Piece] = collections.deque()
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
        self._queue.append(piece)

    def withdraw(self, chosen: Callable[[Piece], bool]) -> list[Piece]:
        """Take the chosen pieces out of the queue, in order."""
        taken = [piece for piece in self._queue if chosen(piece)]
        self._queue = collections.deque(piece for piece in self._queue if not chosen(piece))
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

    def finish(self, key: Hashable) -> None:
        """`key` is done, at any point of its life; what was evaluated stays for prefix reuse."""
        sequence = self._active.pop(key)
        del sequence.tokens[sequence.n_held :]
        if sequence.n_held:
            self._finished[sequence.id] = sequence
        else:
            self._free_ids.append(sequence.id)

    def forget_all(self) -> None:
        """The context's memory was cleared. Nothing may be active."""
        if self._active:
            raise ValueError(f"{len(self._active)} sequences are active")
        self._finished.clear()
        self._free_ids = list(range(self._n_sequences - 1, -1, -1))
        self._cells = Cells()

    def plan(self, prompt_tokens: int) -> Step:
        """The next step, evaluating at most `prompt_tokens` (at least 1) tokens of prompts."""
        moves: list[Copy | Forget] = []
        admitted: list[Admitted] = []
        while self._queue and (outcome := self._admit(self._queue[0], moves)) is not None:
            self._queue.popleft()
            admitted.append(outcome)
        entries: list[Entry] = []
        rows: list[RowOf] = []
        for sequence in self._active.values():
            if not sequence.is_prompting and sequence.n_waiting:
                self._evaluate(sequence, 1, entries, rows)
        for sequence in self._active.values():
            if sequence.is_prompting and prompt_tokens > 0:
                n = min(prompt_tokens, sequence.n_waiting)
                self._evaluate(sequence, n, entries, rows)
                prompt_tokens -= n
        return Step(tuple(moves), tuple(entries), tuple(rows), tuple(admitted))

    def _evaluate(self, sequence: _Sequence, n: int, entries: list[Entry], rows: list[RowOf]) -> None:
        for index in range(sequence.n_held, sequence.n_held + n):
            wants_row = index >= sequence.piece.rows_from
            entries.append(Entry(sequence.id, index, sequence.tokens[index], wants_row))
            if wants_row:
                rows.append(RowOf(sequence.piece.key, index))
        sequence.n_held += n
        self._cells.extend(sequence.id, n)

    def _admit(self, piece: Piece, moves: list[Copy | Forget]) -> Admitted | None:
        """Give `piece` a sequence, or None if it has to wait. Appends the moves that this takes."""
        if len(self._active) >= self._slots:
            return None
        source, n_shared = self._longest_prefix(piece)
        if self._soon_longer(piece, n_shared) or not self._can_hold(piece, source, n_shared):
            return None
        if not self._free_ids:
            self._evict(next(i for i in self._finished if i != source), moves)
        target = self._free_ids.pop()
        if source is not None:
            moves.append(Copy(source, target, n_shared))
            self._cells.share(source, target, n_shared)
            if source in self._finished:  # the most recently used one now
                self._finished[source] = self._finished.pop(source)
        self._active[piece.key] = _Sequence(target, piece, n_shared)
        while self.cells_reserved > self._pool_tokens or (
            len(self._finished) > 1 and self.cells_kept > self._kept_tokens
        ):
            self._evict(next(iter(self._finished)), moves)
        return Admitted(piece.key, n_shared)

    def _evict(self, sequence_id: int, moves: list[Copy | Forget]) -> None:
        del self._finished[sequence_id]
        self._cells.release(sequence_id)
        self._free_ids.append(sequence_id)
        moves.append(Forget(sequence_id))

    def _longest_prefix(self, piece: Piece) -> tuple[int | None, int]:
        """The sequence whose evaluated tokens share most with `piece`, and how many; (None, 0) if none does."""
        best: int | None = None
        n_best = 0
        for sequence in (*self._active.values(), *self._finished.values()):
            n = common_prefix(piece.tokens, sequence.tokens, min(piece.rows_from, sequence.n_held))
            if n > n_best:
                best, n_best = sequence.id, n
        return best, n_best

    def _soon_longer(self, piece: Piece, n_shared: int) -> bool:
        """Whether a prompt that is being evaluated will share enough more to be waited for."""
        enough = n_shared + WORTH_WAITING_TOKENS
        return any(
            sequence.is_prompting
            and common_prefix(piece.tokens, sequence.tokens, min(piece.rows_from, sequence.n_prompt)) >= enough
            for sequence in self._active.values()
        )

    def _can_hold(self, piece: Piece, source: int | None, n_shared: int) -> bool:
        """Whether the pool has room for all of `piece` once every finished sequence is evicted."""
        held = self._cells.held_by((s.id for s in self._active.values()), source, n_shared)
        growth = sum(sequence.growth for sequence in self._active.values())
        return held + growth + len(piece.tokens) - n_shared + piece.room <= self._pool_tokens


def common_prefix(a: Sequence[int], b: Sequence[int], at_most: int) -> int:
    """Length of the common prefix of two token lists, at most `at_most`, which neither may be shorter than."""
    low, high = 0, at_most
    while low < high:  # slices compare in C: a bisection beats a loop over tokens
        middle = (low + high + 1) // 2
        if list(a[low:middle]) == list(b[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
