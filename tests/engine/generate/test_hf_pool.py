"""The pool of cells: who holds which, and that nothing is lost or held twice."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.generate.cells import Cells
from engine.generate.hf_pool import Chains

N_SEQUENCES, N_CELLS = 4, 24
MOVES = st.lists(
    st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 3), st.integers(0, 3), st.integers(0, 9)),
    max_size=40,
)


@given(MOVES)
def test_a_cell_is_free_exactly_if_nobody_holds_it_and_as_many_are_held_as_the_scheduler_counts(moves):
    chains, counted = Chains(N_SEQUENCES, N_CELLS), Cells()
    model: dict[int, list[int]] = {sequence: [] for sequence in range(N_SEQUENCES)}
    for move, sequence, other, n in moves:
        if move == "take" and n <= chains.n_free and len(model[sequence]) + n <= N_CELLS:
            model[sequence] += chains.take(sequence, n).tolist()
            counted.extend(sequence, n)
        elif move == "share" and not model[sequence] and n <= len(model[other]):
            chains.share(other, sequence, n)
            counted.share(other, sequence, n)
            model[sequence] = model[other][:n]
        elif move == "release":
            chains.release(sequence)
            counted.release(sequence)
            model[sequence] = []
        held = {cell for chain in model.values() for cell in chain}
        assert chains.n_free == N_CELLS - len(held)
        assert counted.held == len(held)
        for one, chain in model.items():
            assert chains.lengths[one] == len(chain)
            assert np.array_equal(chains.of([one], len(chain))[0], chain)
    chains.release_all()
    assert chains.n_free == N_CELLS
