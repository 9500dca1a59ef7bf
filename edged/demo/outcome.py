"""Did it learn? The arithmetic of the demo: answers in, means and a verdict out. Pure.

"Learned" means that the mean rating of held-out answers rose by more than three standard errors of the difference.
The standard error is of two independent samples (no pairing), which is the stricter reading here.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from edged.demo.people import words_of

LEARNED_STANDARD_ERRORS = 3.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer and what the simulated person says of it. `rating` in [-1, 1]; `version`: of the adapter."""

    prompt: str
    completion_id: str
    text: str
    finish_reason: str
    version: int
    rating: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What the trainer says of an answer: mean log-probability under the base and KL to it, nats per token."""

    logprob: float | None
    kl: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Means over a set of answers. `n_scored` of them have a score; with none, `kl` and `fluency` are None."""

    n_answers: int
    n_scored: int
    reward: float
    reward_variance: float
    words: float
    finished_frac: float
    kl: float | None
    fluency: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`difference`: of the mean rating, after minus before."""

    difference: float
    standard_error: float
    learned: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of ratings and the update that followed; `verdict` is None where none did."""

    mean_rating: float
    mean_words: float
    verdict: str | None
    version: int
    reason: str
    update_s: float


def summarise(answers: Sequence[Answer], scores: dict[str, Score]) -> Summary:
    """Means over `answers` (at least two); `scores` by completion id may lack some."""
    ratings = [answer.rating for answer in answers]
    scored = [scores[answer.completion_id] for answer in answers if answer.completion_id in scores]
    logprobs = [score.logprob for score in scored if score.logprob is not None]
    return Summary(
        n_answers=len(answers),
        n_scored=len(scored),
        reward=statistics.fmean(ratings),
        reward_variance=statistics.variance(ratings),
        words=statistics.fmean(len(words_of(answer.text)) for answer in answers),
        finished_frac=statistics.fmean(answer.finish_reason == "stop" for answer in answers),
        kl=statistics.fmean(score.kl for score in scored) if scored else None,
        fluency=statistics.fmean(logprobs) if logprobs else None,
    )


def compare(before: Summary, after: Summary) -> Comparison:
    """Whether the mean rating rose by more than `LEARNED_STANDARD_ERRORS` standard errors."""
    difference = after.reward - before.reward
    standard_error = math.sqrt(before.reward_variance / before.n_answers + after.reward_variance / after.n_answers)
    return Comparison(
        difference=difference,
        standard_error=standard_error,
        learned=difference > LEARNED_STANDARD_ERRORS * standard_error and difference > 0,
    )
