"""Cell accounting against a model that names every single cell."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.generate.cells import Cells

SEQUENCES = st.integers(0, 4)


class CellsAgainstSets(RuleBasedStateMachine):
    """`chains` holds each sequence's cells by name, as llama.cpp's unified cache does."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = Cells()
        self.chains: dict[int, list[int]] = {}
        self.next_cell = 0

    @rule(sequence=SEQUENCES, n=st.integers(0, 9))
    def extend(self, sequence: int, n: int) -> None:
        self.cells.extend(sequence, n)
        self.chains.setdefault(sequence, []).extend(range(self.next_cell, self.next_cell + n))
        self.next_cell += n

    @rule(source=SEQUENCES, onto=SEQUENCES, share=st.floats(0, 1))
    def share(self, source: int, onto: int, share: float) -> None:
        if self.chains.get(onto) or source == onto:
            return
        n = int(share * len(self.chains.get(source, [])))
        self.cells.share(source, onto, n)
        self.chains[onto] = self.chains.get(source, [])[:n]

    @rule(sequence=SEQUENCES)
    def release(self, sequence: int) -> None:
        self.cells.release(sequence)
        self.chains.pop(sequence, None)

    @rule(kept=st.sets(SEQUENCES), source=SEQUENCES, share=st.floats(0, 1))
    def held_by_some(self, kept: set[int], source: int, share: float) -> None:
        prefix = self.chains.get(source, [])
        prefix = prefix[: int(share * len(prefix))]
        expected = {cell for sequence in kept for cell in self.chains.get(sequence, [])} | set(prefix)
        assert self.cells.held_by(kept, source, len(prefix)) == len(expected)

    @invariant()
    def counts_distinct_cells(self) -> None:
        assert self.cells.held == len({cell for chain in self.chains.values() for cell in chain})


TestCells = CellsAgainstSets.TestCase
TestCells.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
