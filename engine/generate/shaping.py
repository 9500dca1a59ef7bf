"""Logits changed on request before a token is drawn: a bias on given tokens, and penalties on tokens that came before.

    l1_j = l0_j + bias_j                                    OpenAI's logit_bias
    l2_j = l1_j / r if l1_j > 0 else l1_j * r               repetition penalty (arXiv 1909.05858, 4.1), for j in the
                                                            prompt or the completion
    l3_j = l2_j - c_j * f - [c_j > 0] * p                   OpenAI's frequency and presence penalties; c_j: how often j
                                                            is in the completion

An answer that was drawn from changed logits is no sample of the policy; who learns from it has to know
(`Shape.changes`). The logits that are given stay as they are. No random state, no llama.cpp.

Letters: V vocabulary.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]  # float32[V] logits


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """bias: (token, what is added). The defaults change nothing."""

    bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    @property
    def changes(self) -> bool:
        """Whether logits come out other than they went in."""
        penalised = self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        return penalised or any(value != 0 for _, value in self.bias)


class Shaper:
    """The shape of one choice, and what has come so far."""

    __slots__ = ("_bias", "_bias_ids", "_counts", "_seen", "_shape")

    def __init__(self, shape: Shape, prompt_ids: Iterable[int]) -> None:
        """prompt_ids: what the repetition penalty is on before anything is drawn."""
        self._shape = shape
        self._bias_ids = np.array([token for token, _ in shape.bias], np.intp)
        self._bias = np.array([value for _, value in shape.bias], np.float32)
        self._seen = dict.fromkeys(prompt_ids)  # in the order of their first appearance
        self._counts: collections.Counter[int] = collections.Counter()

    def apply(self, logits: Row) -> Row:
        """float32[V], of float32[V]. Biases on tokens beyond V are left out."""
        if not self._shape.changes:
            return logits
        shaped = logits.copy()
        known = self._bias_ids < len(shaped)
        shaped[self._bias_ids[known]] += self._bias[known]
        if self._shape.repetition_penalty != 1 and self._seen:
            seen = np.fromiter(self._seen, np.intp, len(self._seen))
            values, by = shaped[seen], np.float32(self._shape.repetition_penalty)
            shaped[seen] = np.where(values > 0, values / by, values * by)
        if self._counts and (self._shape.frequency_penalty or self._shape.presence_penalty):
            ids = np.fromiter(self._counts, np.intp, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            shaped[ids] -= counts * np.float32(self._shape.frequency_penalty) + np.float32(self._shape.presence_penalty)
        return shaped

    def note(self, token: int) -> None:
        """`token` is part of the completion now."""
        self._seen.setdefault(token)
        self._counts[token] += 1
