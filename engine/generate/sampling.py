"""Draw tokens from logits, and say how likely each drawn token was.

Two log-probabilities are recorded for every token: under the distribution that it was drawn from (bias, penalties,
temperature and cuts applied, renormalised), which is the behaviour policy of learning, and under the full softmax of
the model's own logits at temperature 1. At temperature 0 the distribution is a point: its log-probability is 0 by
definition.

Order: bias and penalties (`engine.generate.shaping`), temperature, min-p, top-k, then top-p over what top-k left. Equal
logits at the border of a cut are kept or dropped in an unspecified but repeatable order. Pure but for the random state
inside a `Sampler`; no llama.cpp.

An answer can be held to a constraint. A drawn token that does not fit is taken out and another one drawn, and after a
few of them all that do not fit are taken out: without cuts this is the distribution of the tokens that fit, since one
of those has p(t) + (1 - P) p(t)/P = p(t)/P, where P is the sum of p over what fits. Cuts are made anew for each draw.
P is known only where all tokens were tried, so the log-probability under the sampling distribution is unknown (None)
for every token of such an answer; policy gradients leave it out anyway.

Letters: V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from engine.generate.shaping import Row, Shape, Shaper

LEAST_LOGPROB = -9999.0  # as OpenAI's own API has it for what is too unlikely to tell

_BLOCK = 256  # the inverse CDF is walked over sums of blocks first: two short cumulative sums instead of one over V
_LIKELY = 1024  # top-p looks at this many most likely tokens before it sorts all
_SEED_MASK = 2**64 - 1
_DRAWS_MAX = 8  # tokens that are drawn before all that fit are looked for, which takes as long as a decode step


class NotFinite(ValueError):
    """Raised when logits hold a NaN or an infinity: the adapter or the model is broken."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """A drawn token. logprob: None under a constraint. top: (id, raw log-probability) of the most likely tokens, best
    first. A server elsewhere may not tell one or both of them; told: what it says in place of the raw one."""

    id: int
    logprob: float | None
    raw_logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    told: float | None = None

    @property
    def shown(self) -> float:
        """The log-probability that a user who asks for one is shown: the raw one where it is known."""
        known = (one for one in (self.raw_logprob, self.told, self.logprob) if one is not None)
        return next(known, LEAST_LOGPROB)


class ConstraintFailed(Exception):
    """Raised when an answer cannot begin or go on under what it is held to."""


class Constraint(Protocol):
    """What an answer is held to. Its methods raise ConstraintFailed."""

    def allows(self, token: int) -> bool:
        """Whether `token` fits here."""
        ...

    def allowed(self) -> npt.NDArray[np.integer[Any]]:
        """Every token that fits here; at least one."""
        ...

    def take(self, token: int) -> None:
        """`token`, which fits, comes next."""
        ...


class Sampler:
    """The sampling settings and the random state of one choice: the same seed and choice draw the same numbers."""

    __slots__ = ("_constraint", "_random", "_shaper", "min_p", "temperature", "top_k", "top_logprobs", "top_p")

    def __init__(
        self,
        *,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int,
        choice: int,
        top_logprobs: int,
        min_p: float = 0.0,
        shape: Shape | None = None,
        prompt_ids: Sequence[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        """min_p: tokens less likely than this share of the likeliest are left out. prompt_ids: for `shape`."""
        self._constraint = constraint
        self.temperature = temperature
        self.top_p = top_p
        self.top_k = top_k
        self.min_p = min_p
        self.top_logprobs = top_logprobs
        self._shaper = Shaper(shape, prompt_ids) if shape is not None and shape.changes else None
        self._random = np.random.Generator(np.random.PCG64([seed & _SEED_MASK, choice]))

    def draw(self, logits: Row) -> Sampled:
        """One token of float32[V] logits. Raises NotFinite, and what the constraint raises."""
        shifted = logits - _peak(logits)
        weights = np.exp(shifted)
        # float32 pairwise sums keep about six digits, more than the kernels that made the logits.
        log_total = math.log(float(weights.sum()))
        logprob: float | None
        if self._constraint is not None:
            shaped = logits if self._shaper is None else self._shaper.apply(logits)
            token, logprob = self._draw_fitting(shaped, self._constraint), None
        elif self._shaper is None:
            token, logprob = self._draw_from(shifted, weights)
        else:
            shaped = self._shaper.apply(logits)
            shaped_shifted = shaped - _peak(shaped)
            token, logprob = self._draw_from(shaped_shifted, np.exp(shaped_shifted))
        if self._shaper is not None:
            self._shaper.note(token)
        raw_logprob = float(shifted[token]) - log_total
        if self.temperature == 1 and self._shaper is None and self._constraint is None and not self._cuts():
            logprob = raw_logprob
        return Sampled(token, logprob, raw_logprob, most_likely(shifted, log_total, self.top_logprobs))

    def _cuts(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def _draw_fitting(self, logits: Row, constraint: Constraint) -> int:
        """A token that fits, as the constraint's next."""
        left = logits.copy()
        for _ in range(_DRAWS_MAX):
            shifted = left - _peak(left)
            token, _ = self._draw_from(shifted, np.exp(shifted))
            if constraint.allows(token):
                break
            left[token] = -np.inf
        else:
            allowed = constraint.allowed()
            left = np.full_like(logits, -np.inf)
            left[allowed] = logits[allowed]
            shifted = left - _peak(left)
            token, _ = self._draw_from(shifted, np.exp(shifted))
        constraint.take(token)
        return token

    def _draw_from(self, shifted: Row, weights: Row) -> tuple[int, float]:
        if self.temperature == 0:
            return int(shifted.argmax()), 0.0
        if self.temperature != 1:
            # Not in place: the caller still reads the unscaled values.
            scaled = shifted * np.float32(1 / self.temperature)
            weights = np.exp(scaled)
        else:
            scaled = shifted
        if self._cuts():
            if self.min_p > 0:
                weights = np.where(weights < self.min_p, np.float32(0), weights)  # the likeliest one weighs 1
            kept = _kept(weights, self.top_k, self.top_p)
            position = _inverse_cdf(weights[kept], self._random.random())
            token = int(kept[position])
            total = float(weights[kept].sum(dtype=np.float64))
        else:
            token = _inverse_cdf(weights, self._random.random())
            total = float(weights.sum())
        return token, float(scaled[token]) - math.log(total)


def raw_logprob(logits: Row, token: int) -> float:
    """Log-probability of `token` under the softmax of float32[V] logits. Raises NotFinite."""
    shifted = logits - _peak(logits)
    return float(shifted[token]) - math.log(float(np.exp(shifted).sum()))


def _peak(logits: Row) -> np.float32:
    """The largest logit; one NaN anywhere makes it NaN."""
    peak: np.float32 = logits.max()
    if not math.isfinite(peak):
        raise NotFinite("the logits hold NaN or infinity")
    return peak


def most_likely(shifted: Row, log_total: float, n: int) -> tuple[tuple[int, float], ...]:
    """The `n` most likely tokens of `shifted` (logits less a constant), best first, with log-probabilities."""
    if n <= 0:
        return ()
    ids = _largest(shifted, n)
    return tuple((int(i), float(shifted[i]) - log_total) for i in ids)


def _kept(weights: Row, top_k: int, top_p: float) -> npt.NDArray[np.intp]:
    """Ids that survive the cuts, most likely first; at least one."""
    n_vocab = len(weights)
    if 0 < top_k < n_vocab:
        ids = _largest(weights, top_k)
        return ids if top_p >= 1 else ids[: _nucleus(weights[ids], float(weights[ids].sum(dtype=np.float64)), top_p)]
    total = float(weights.sum(dtype=np.float64))
    ids = _largest(weights, min(_LIKELY, n_vocab))
    if float(weights[ids].sum(dtype=np.float64)) < top_p * total:
        ids = _largest(weights, n_vocab)
    return ids[: _nucleus(weights[ids], total, top_p)]


def _nucleus(descending: Row, total: float, top_p: float) -> int:
    """How many of the most likely tokens reach the share `top_p` of `total`."""
    reached = descending.cumsum(dtype=np.float64)
    return min(len(descending), int(reached.searchsorted(top_p * total)) + 1)


def _largest(values: Row, n: int) -> npt.NDArray[np.intp]:
    n_values = len(values)
    ids = np.argpartition(values, n_values - n)[-n:] if n < n_values else np.arange(n_values)
    return ids[np.argsort(-values[ids], kind="stable")]


def _inverse_cdf(weights: Row, u: float) -> int:
    """The index at which the running sum of `weights` passes the share `u` in [0, 1)."""
    n_whole = len(weights) // _BLOCK * _BLOCK
    sums = weights[:n_whole].reshape(-1, _BLOCK).sum(axis=1).astype(np.float64)
    reached = np.append(sums, weights[n_whole:].sum(dtype=np.float64)).cumsum()
    block = int(reached.searchsorted(u * reached[-1], side="right"))
    if block == len(reached):  # u * total was rounded up to the total
        return int(np.flatnonzero(weights)[-1])
    start = block * _BLOCK
    inner = weights[start : start + _BLOCK].cumsum(dtype=np.float64)
    before = reached[block - 1] if block else 0.0
    offset = int(inner.searchsorted(u * reached[-1] - before, side="right"))
    if offset == len(inner):  # float32 and float64 sums of the block differ in the last digits
        offset = int(np.flatnonzero(inner == inner[-1])[0])
    return start + offset
