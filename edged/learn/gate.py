"""The gate: whether a candidate may be served. Pure: measurements and limits in, a judgement with its reason out.

The checks, in the order in which a refusal names them:

    finite    the norm, every canary log-probability and every other figure is a finite number, and all canaries are
              of the same probes
    norm      the effect of the adapter, |alpha/r BA| over all modules, is below a limit
    kl        KL of the candidate to its parent, as the trainer measured it on the batch, is below a limit
    canary    the served stack agrees with the trainer on fixed probes, and it moved as the trainer predicted
    fluency   answers sampled on the served stack to fixed prompts are plausible to the base, and not repetitive,
              against the answers of the live adapter

Every measurement goes into the judgement's metrics, refused or not.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

# A predicted move of the canary below this (nats a token) is inside the kernels' noise and proves nothing.
CANARY_MOVE_MIN = 0.1
CANARY_COSINE_MIN = 0.3

Canary = Sequence[Sequence[float]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`[gate]`. norm_max in units of |BA|; kl_max, canary_gap_max, fluency_* in nats a token; distinct_drop a share."""

    norm_max: float
    live_kl_max: float
    canary_gap_max: float
    fluency_drop: float
    fluency_floor: float
    distinct_drop: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fluency:
    """How a version answers the fixed prompts.

    logprob: mean log-probability of the answers' non-EOS tokens under the base at temperature 1.
    distinct_2: different token pairs / token pairs, within answers.
    empty_share: answers without a token of text.
    """

    logprob: float
    distinct_2: float
    empty_share: float
    mean_tokens: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of a candidate. None where it could not be known: an imported adapter has no trainer's KL and no
    prediction. base: the fluency of version 0."""

    norm: float
    kl_live: float | None
    served: Canary
    served_live: Canary
    predicted: Canary | None
    predicted_live: Canary | None
    fluency: Fluency
    live: Fluency
    base: Fluency


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """reason: a sentence for people; what was wrong, or what was found good."""

    accepted: bool
    reason: str
    metrics: dict[str, float]


def judge(evidence: Evidence, limits: Limits) -> Judgement:
    """The verdict on one candidate."""
    if complaint := _not_comparable(evidence):
        return Judgement(accepted=False, reason=complaint, metrics={})
    metrics = measure(evidence)
    complaint = (
        _not_finite(evidence)
        or _not_measured(evidence)
        or _too_large(evidence, limits)
        or _too_far(evidence, limits)
        or _not_as_trained(metrics, limits)
        or _not_fluent(evidence, limits)
    )
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    if complaint:
        return Judgement(accepted=False, reason=complaint, metrics=finite)
    return Judgement(accepted=True, reason="all checks passed", metrics=finite)


def measure(evidence: Evidence) -> dict[str, float]:
    """The figures that the checks look at."""
    metrics = {
        "gate/norm": evidence.norm,
        "gate/canary_moved": mean_gap(evidence.served, evidence.served_live),
        "gate/fluency_logprob": evidence.fluency.logprob,
        "gate/fluency_logprob_live": evidence.live.logprob,
        "gate/fluency_logprob_base": evidence.base.logprob,
        "gate/distinct_2": evidence.fluency.distinct_2,
        "gate/distinct_2_live": evidence.live.distinct_2,
        "gate/empty_share": evidence.fluency.empty_share,
        "gate/mean_tokens": evidence.fluency.mean_tokens,
    }
    if evidence.kl_live is not None:
        metrics["gate/kl_live"] = evidence.kl_live
    if evidence.predicted is not None and evidence.predicted_live is not None:
        metrics["gate/canary_gap"] = mean_gap(evidence.served, evidence.predicted)
        metrics["gate/canary_predicted_move"] = mean_gap(evidence.predicted, evidence.predicted_live)
        metrics["gate/canary_cosine"] = cosine(
            differences(evidence.served, evidence.served_live), differences(evidence.predicted, evidence.predicted_live)
        )
    return metrics


def _not_comparable(evidence: Evidence) -> str | None:
    shape = [len(row) for row in evidence.served]
    canaries = (evidence.served_live, evidence.predicted, evidence.predicted_live)
    if any(canary is not None and [len(row) for row in canary] != shape for canary in canaries):
        return "its canary cannot be compared: it was predicted and served on other probes"
    return None


def _not_finite(evidence: Evidence) -> str | None:
    if not math.isfinite(evidence.norm):
        return "the adapter holds numbers that are not finite"
    if not _all_finite(itertools.chain(*evidence.served)):
        return "the adapter makes the model answer with numbers that are not finite"
    return None


def _not_measured(evidence: Evidence) -> str | None:
    """A comparison with NaN is false whichever way it is written, so that every figure is looked at beforehand."""
    figures: dict[str, Iterable[float]] = {
        "its KL to the live adapter": () if evidence.kl_live is None else (evidence.kl_live,),
        "the canary of the live adapter": itertools.chain(*evidence.served_live),
        "the trainer's prediction": itertools.chain(*(evidence.predicted or ()), *(evidence.predicted_live or ())),
        "the fluency of its answers": dataclasses.astuple(evidence.fluency),
        "the fluency of the live adapter": dataclasses.astuple(evidence.live),
        "the fluency of the base": dataclasses.astuple(evidence.base),
    }
    for name, values in figures.items():
        if not _all_finite(values):
            return f"it cannot be judged: {name} is not a finite number"
    return None


def _all_finite(values: Iterable[float]) -> bool:
    return all(math.isfinite(value) for value in values)


def _too_large(evidence: Evidence, limits: Limits) -> str | None:
    if evidence.norm > limits.norm_max:
        return f"the adapter is too large: norm {evidence.norm:.2f}, the limit is {limits.norm_max:g} (gate.norm_max)"
    return None


def _too_far(evidence: Evidence, limits: Limits) -> str | None:
    if evidence.kl_live is not None and evidence.kl_live > limits.live_kl_max:
        return (
            f"the update moved too far: KL to the live adapter {evidence.kl_live:.3f} nats a token, "
            f"the limit is {limits.live_kl_max:g} (gate.live_kl_max)"
        )
    return None


def _not_as_trained(metrics: dict[str, float], limits: Limits) -> str | None:
    gap = metrics.get("gate/canary_gap")
    if gap is None:
        return None
    if gap > limits.canary_gap_max:
        return (
            f"the server does not compute what was trained: the canary is {gap:.3f} nats a token off, "
            f"the limit is {limits.canary_gap_max:g} (gate.canary_gap_max)"
        )
    predicted, cosine_ = metrics["gate/canary_predicted_move"], metrics["gate/canary_cosine"]
    if predicted > CANARY_MOVE_MIN and cosine_ < CANARY_COSINE_MIN:
        return (
            f"the server did not move as the trainer predicted: {predicted:.3f} nats a token foretold, "
            f"{metrics['gate/canary_moved']:.3f} seen, direction {cosine_:.2f} (1 is the same); is the adapter applied?"
        )
    return None


def _not_fluent(evidence: Evidence, limits: Limits) -> str | None:
    fluency, live, base = evidence.fluency, evidence.live, evidence.base
    if fluency.empty_share > max(0.5, live.empty_share):
        return f"{fluency.empty_share:.0%} of its answers to the fixed prompts are empty"
    if live.logprob - fluency.logprob > limits.fluency_drop:
        return (
            f"its answers became less plausible: {fluency.logprob:.2f} nats a token under the base, "
            f"{live.logprob:.2f} for the live adapter, a drop of {limits.fluency_drop:g} is allowed (gate.fluency_drop)"
        )
    if base.logprob - fluency.logprob > limits.fluency_floor:
        return (
            f"its answers drifted from the language of the base: {fluency.logprob:.2f} nats a token, "
            f"{base.logprob:.2f} for the base, {limits.fluency_floor:g} in all are allowed (gate.fluency_floor)"
        )
    if live.distinct_2 > 0.0 and 1.0 - fluency.distinct_2 / live.distinct_2 > limits.distinct_drop:
        return (
            f"its answers repeat themselves: {fluency.distinct_2:.2f} of the token pairs are different, "
            f"{live.distinct_2:.2f} for the live adapter (gate.distinct_drop)"
        )
    return None


def fluency_of(answers: Sequence[tuple[Sequence[int], float | None]], eos_ids: frozenset[int]) -> Fluency:
    """Fluency from (completion ids, mean reference log-probability or None if empty) of each answer.

    The log-probability is averaged over answers with text, so that a long answer does not outvote the short ones.
    """
    texts = [[token for token in ids if token not in eos_ids] for ids, _ in answers]
    logprobs = [logprob for (_, logprob), text in zip(answers, texts, strict=True) if text and logprob is not None]
    pairs = [list(itertools.pairwise(text)) for text in texts]
    n_pairs = sum(len(of_text) for of_text in pairs)
    return Fluency(
        logprob=sum(logprobs) / len(logprobs) if logprobs else 0.0,
        distinct_2=sum(len(set(of_text)) for of_text in pairs) / n_pairs if n_pairs else 1.0,
        empty_share=sum(not text for text in texts) / len(texts) if texts else 0.0,
        mean_tokens=sum(len(text) for text in texts) / len(texts) if texts else 0.0,
    )


def differences(a: Canary, b: Canary) -> list[float]:
    """a - b, token by token, over all probes."""
    return [x - y for row_a, row_b in zip(a, b, strict=True) for x, y in zip(row_a, row_b, strict=True)]


def mean_gap(a: Canary, b: Canary) -> float:
    """Mean |a - b| over all tokens of all probes; 0 without tokens."""
    gaps = [abs(value) for value in differences(a, b)]
    return sum(gaps) / len(gaps) if gaps else 0.0


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Cosine of the angle between two vectors; 0 if one of them is 0."""
    norm = math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / norm if norm else 0.0
