"""How many cells of a unified KV pool are held, when sequences share prefixes. Pure.

A sequence holds a chain of segments; copying a prefix shares its segments, so a common prompt costs its cells once, as
in llama.cpp's unified cache. A cell is free again when no chain holds it.

Invariants: `held` is the number of distinct cells over all chains; a chain's length is the sum of its segments.
"""

from __future__ import annotations

from collections.abc import Iterable


class _Segment:
    __slots__ = ("length", "sharers")

    def __init__(self, length: int, sharers: int) -> None:
        self.length = length
        self.sharers = sharers


class Cells:
    """Counts the cells of one pool."""

    def __init__(self) -> None:
        self.held = 0
        self._chains: dict[int, list[_Segment]] = {}

    def extend(self, sequence: int, n: int) -> None:
        """`sequence` takes `n` fresh cells at its end."""
        if n == 0:
            return
        chain = self._chains.setdefault(sequence, [])
        if chain and chain[-1].sharers == 1:
            chain[-1].length += n
        else:
            chain.append(_Segment(n, 1))
        self.held += n

    def share(self, source: int, target: int, n: int) -> None:
        """`target`, which holds nothing, also holds the first `n` cells of `source`."""
        if self._chains.get(target):
            raise ValueError(f"sequence {target} holds cells already")
        self._split(source, n)
        shared: list[_Segment] = []
        for segment in self._chains.get(source, ()):
            if n == 0:
                break
            segment.sharers += 1
            n -= segment.length
            shared.append(segment)
        if n != 0:
            raise ValueError(f"sequence {source} holds {n} cells less than are to be shared")
        self._chains[target] = shared

    def release(self, sequence: int) -> None:
        """`sequence` holds nothing any more."""
        for segment in self._chains.pop(sequence, ()):
            segment.sharers -= 1
            if segment.sharers == 0:
                self.held -= segment.length

    def held_by(self, sequences: Iterable[int], source: int | None, n: int) -> int:
        """The distinct cells that would be held if only `sequences` and the first `n` cells of `source` were kept."""
        kept = {id(segment): segment.length for s in sequences for segment in self._chains.get(s, ())}
        held = sum(kept.values())
        for segment in self._chains.get(source, ()) if source is not None else ():
            length = min(n, segment.length)
            n -= length
            if id(segment) not in kept:
                held += length
        return held

    def _split(self, source: int, at: int) -> None:
        """Make cell `at` of `source` the first of a segment, in every chain that holds that segment."""
        for segment in self._chains.get(source, ()):
            if at < segment.length:
                if at > 0:
                    self._cut(segment, at)
                return
            at -= segment.length

    def _cut(self, segment: _Segment, at: int) -> None:
        rest = _Segment(segment.length - at, segment.sharers)
        segment.length = at
        for chain in self._chains.values():
            for index, other in enumerate(chain):
                if other is segment:
                    chain.insert(index + 1, rest)
                    break
