"""Common prefixes that are remembered are those that a fresh look would find."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.generate.prefixes import Prefixes, common_prefix

TOKENS = st.lists(st.integers(0, 1), max_size=200)


def counted(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@given(TOKENS, TOKENS, st.lists(st.integers(0, 1), max_size=150), st.integers(0, 150))
def test_common_prefix_equals_counting(a: list[int], b: list[int], common: list[int], known: int) -> None:
    a, b = common + a, common + b
    assert common_prefix(a, b, min(known, len(common)), min(len(a), len(b))) == counted(a, b)


@given(piece=TOKENS.filter(bool), data=st.data())
def test_a_sequence_that_grows_or_loses_its_end_is_not_mistaken(piece: list[int], data: st.DataObject) -> None:
    prefixes = Prefixes()
    sequence = piece[: data.draw(st.integers(0, len(piece)))]
    for _ in range(6):
        assert prefixes.common("p", piece, 3, sequence) == counted(piece, sequence)
        if data.draw(st.booleans()):
            sequence = sequence + piece[len(sequence) : len(sequence) + 2] + data.draw(TOKENS)
        else:
            sequence = sequence[: max(0, len(sequence) - 1)]
            assert prefixes.common("p", piece, 3, sequence) == counted(piece, sequence)
            break  # a sequence that is over grows no more


def test_a_number_that_comes_back_is_another_sequence() -> None:
    prefixes = Prefixes()
    assert prefixes.common("p", (1, 2, 3), 0, [9]) == 0
    prefixes.gone(0)
    assert prefixes.common("p", (1, 2, 3), 0, [1, 2]) == 2


def test_a_key_that_comes_back_is_another_piece() -> None:
    prefixes = Prefixes()
    assert prefixes.common("p", (1, 2, 3), 0, [9]) == 0
    prefixes.forget("p")
    assert prefixes.common("p", (9, 2, 3), 0, [9]) == 1
