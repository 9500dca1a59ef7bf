"""How many tokens waiting pieces have in common with sequences. Pure.

A piece that cannot be admitted is looked at again in every step, and with many sequences comparing tokens would then
cost more than everything else that is planned. But sequences only grow: what was compared once is remembered, and only
tokens that came since are looked at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

FIRST_BLOCK = 32  # tokens compared at once at first; then twice as many each time


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
    """Of one sequence: its first `n_common` of `n_seen` tokens begin the piece."""

    n_common: int
    n_seen: int


class Prefixes:
    """What is known of the pieces that were looked at and have not been forgotten."""

    def __init__(self) -> None:
        self._known: dict[Hashable, dict[int, Shared]] = {}

    def common(self, key: Hashable, tokens: Sequence[int], sequence: int, other: Sequence[int]) -> int:
        """Length of the common prefix of the piece `key` and of a sequence.

        Args:
            tokens: of the piece, always the same.
            sequence: its number. If it was seen before, `other` has got longer since, or lost tokens at its end.
        """
        of_piece = self._known.setdefault(key, {})
        before = of_piece.get(sequence)
        if before is not None and (before.n_common < before.n_seen or before.n_common == len(tokens)):
            return min(before.n_common, len(other))
        n_before = 0 if before is None else min(before.n_common, len(other))
        n_common = common_prefix(tokens, other, n_before, min(len(tokens), len(other)))
        of_piece[sequence] = Shared(n_common, len(other))
        return n_common

    def gone(self, sequence: int) -> None:
        """The sequence holds nothing any more; its number may come back."""
        for of_piece in self._known.values():
            of_piece.pop(sequence, None)

    def forget(self, key: Hashable) -> None:
        """The piece waits no longer."""
        self._known.pop(key, None)


def common_prefix(a: Sequence[int], b: Sequence[int], low: int, high: int) -> int:
    """Length of the common prefix of two token lists, which have `low` tokens in common and `high` at least each."""
    block = FIRST_BLOCK
    while low < high:  # slices compare in C: growing blocks, and a bisection of the one that differs, beat a loop
        end = min(high, low + block)
        if list(a[low:end]) != list(b[low:end]):
            break
        low, block = end, 2 * block
    else:
        return low
    while low < end:
        middle = (low + end + 1) // 2
        if list(a[low:middle]) == list(b[low:middle]):
            low = middle
        else:
            end = middle - 1
    return low
