"""Which adapter made an answer, told by its log-probabilities alone. Pure.

An answer names a version, and so does its episode, but both come from one place. The log-probabilities do not: a
greedy answer with logprobs is compared, token by token, with what the named version said of the same prompt at rest.
Kernels round differently in other batches, so the two differ a little, and where two tokens are nearly level another
one may be taken; the comparison ends there. Anything else was computed by other weights. What is compared is the mean,
so an answer whose weights changed near its end may go unnoticed.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

BOUND_MIN_NATS = 0.05  # single steps of one version differed by up to 0.26, means over 12 steps by up to 0.10
TOP_LOGPROBS = 5  # what the traces are asked with: enough to know both tokens where two are level


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A token, its log-probability in nats, and those of the likeliest ones, itself among them."""

    token: str
    logprob: float
    top: dict[str, float]


Trace = tuple[Step, ...]


def trace_of(content: Sequence[dict[str, Any]]) -> Trace:
    """The `logprobs.content` of a greedy choice, asked with TOP_LOGPROBS."""
    return tuple(
        Step(
            token=entry["token"],
            logprob=float(entry["logprob"]),
            top={top["token"]: float(top["logprob"]) for top in entry["top_logprobs"]},
        )
        for entry in content
    )


def deviation(answer: Trace, reference: Trace) -> float:
    """By how much the two differ, in nats, in the mean over the steps that can be compared; 0 if there is none.

    A token that the reference would not have taken by far makes it infinite.
    """
    found = []
    for said, expected in zip(answer, reference, strict=False):
        if said.token != expected.token:
            # A tie taken the other way: what the reference gave to this token lacks little of its best.
            found.append(expected.logprob - expected.top.get(said.token, -math.inf))
            break
        found.append(abs(said.logprob - expected.logprob))
    return statistics.fmean(found) if found else 0.0


def bound(alone: Mapping[str, Trace], in_a_crowd: Mapping[str, Trace]) -> float:
    """The largest deviation, in nats, that other batches explain: what one version says to prompts, twice."""
    return max(BOUND_MIN_NATS, 3 * max(deviation(trace, alone[prompt]) for prompt, trace in in_a_crowd.items()))
