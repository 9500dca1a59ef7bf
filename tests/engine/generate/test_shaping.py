"""Bias and penalties against the formulas, token by token in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.generate.shaping import Shape, Shaper

N_VOCAB = 12
TOKENS = st.lists(st.integers(0, N_VOCAB - 1), max_size=8)


def textbook(logits: list[float], shape: Shape, prompt: list[int], completion: list[int]) -> list[float]:
    shaped = []
    for token, logit in enumerate(logits):
        value = logit + sum(by for biased, by in shape.bias if biased == token)
        if token in prompt or token in completion:
            value = value / shape.repetition_penalty if value > 0 else value * shape.repetition_penalty
        count = completion.count(token)
        shaped.append(value - count * shape.frequency_penalty - (count > 0) * shape.presence_penalty)
    return shaped


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=N_VOCAB, max_size=N_VOCAB),
    st.dictionaries(st.integers(0, N_VOCAB - 1), st.floats(-100, 100, width=32), max_size=4),
    st.floats(0.5, 2.0, width=32),
    st.floats(-2, 2, width=32),
    st.floats(-2, 2, width=32),
    TOKENS,
    TOKENS,
)
def test_shaped_logits_are_those_of_the_formulas(
    logits: list[float],
    bias: dict[int, float],
    repetition: float,
    frequency: float,
    presence: float,
    prompt: list[int],
    completion: list[int],
) -> None:
    shape = Shape(tuple(bias.items()), repetition, frequency, presence)
    shaper = Shaper(shape, prompt)
    for token in completion:
        shaper.note(token)
    given_logits = np.array(logits, np.float32)
    found = shaper.apply(given_logits)
    assert found.tolist() == pytest.approx(textbook(logits, shape, prompt, completion), rel=1e-4, abs=1e-4)
    assert given_logits.tolist() == logits


def test_a_shape_that_changes_nothing_gives_the_same_array() -> None:
    logits = np.zeros(N_VOCAB, np.float32)
    assert not Shape(bias=((3, 0.0),)).changes
    assert Shaper(Shape(), [1, 2]).apply(logits) is logits


def test_prompts_are_penalised_for_repetition_only() -> None:
    logits = np.ones(N_VOCAB, np.float32)
    by_count = Shaper(Shape(frequency_penalty=1.0, presence_penalty=1.0), [4])
    assert by_count.apply(logits)[4] == 1.0
    by_repetition = Shaper(Shape(repetition_penalty=2.0), [4])
    assert by_repetition.apply(logits)[4] == 0.5
