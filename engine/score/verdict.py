"""What a reward source said, judged: a reward or a reason for every answer. Pure.

A source is code or a service of somebody else. Whatever it returns becomes a `Verdict` here, and nothing that is not a
finite number in range gets through as a reward.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence, Set

from engine.protocol import JudgeReason

DETAIL_CHARS = 300


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """rewards, reasons: one an answer. A reward is None with a reason; only `judge_clipped` stands beside a reward.

    detail: what the first failure was, for people; "" if there was none.
    """

    rewards: tuple[float | None, ...]
    reasons: tuple[JudgeReason | None, ...]
    detail: str = ""


class SourceFailed(Exception):
    """Raised by a source that could not judge a batch. `reason` goes to every answer of it."""

    def __init__(self, reason: JudgeReason, detail: str) -> None:
        super().__init__(detail)
        self.reason: JudgeReason = reason
        self.detail = detail


def failed(n_items: int, reason: JudgeReason, detail: str) -> Verdict:
    """No reward for any of `n_items` answers."""
    return Verdict((None,) * n_items, (reason,) * n_items, shorten(detail))


def raised(n_items: int, error: BaseException) -> Verdict:
    """The verdict of a source that raised `error`, which may be `SourceFailed`."""
    if isinstance(error, SourceFailed):
        return failed(n_items, error.reason, error.detail)
    return failed(n_items, "judge_raised", f"{type(error).__name__}: {words_of(error)}")


def words_of(error: BaseException) -> str:
    """What `error` says of itself, which is somebody else's code as well and may fail in its turn."""
    try:
        return f"{error}"
    except BaseException as failure:
        return f"(its text cannot be had: {type(failure).__name__})"


def check(values: object, n_items: int, clip: float) -> Verdict:
    """The verdict on what a source returned for `n_items` answers.

    Args:
        values: hoped to be one number or None an answer, in their order, which a set does not have. Numbers of numpy
            are numbers; truth values are not, because a comparison that got in here is a mistake.
        clip: rewards are cut to plus or minus this.
    """
    if isinstance(values, str | bytes | Mapping | Set) or not isinstance(values, Iterable):
        return failed(n_items, "judge_bad_answer", f"expected a list of rewards, got {type(values).__name__}")
    listed = list(itertools.islice(values, n_items + 1))  # one more, to see that there are too many
    if len(listed) != n_items:
        n_shown = f"{len(listed)}" if len(listed) < n_items else f"more than {n_items}"
        return failed(n_items, "judge_wrong_length", f"{n_shown} rewards for {n_items} answers")
    return assemble([check_value(value, clip) for value in listed])


def check_value(value: object, clip: float) -> tuple[float | None, JudgeReason | None, str]:
    """Reward, reason and detail of one returned value."""
    if value is None:
        return None, "judge_abstained", ""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None, "judge_not_a_number", f"expected a number or None, got {type(value).__name__}"
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond every float
        return (clip if operator.gt(value, 0) else -clip), "judge_clipped", ""
    if math.isnan(number):
        return None, "judge_not_finite", "a reward is NaN"
    if math.isinf(number):
        return None, "judge_not_finite", "a reward is infinite"
    if abs(number) > clip:
        return math.copysign(clip, number), "judge_clipped", ""
    return number, None, ""


def assemble(parts: Sequence[tuple[float | None, JudgeReason | None, str]]) -> Verdict:
    """One verdict of the (reward, reason, detail) of each answer."""
    first = next((detail for _, _, detail in parts if detail), "")
    return Verdict(tuple(reward for reward, _, _ in parts), tuple(reason for _, reason, _ in parts), shorten(first))


def shorten(text: str) -> str:
    """`text` on one line that fits a status, without what cannot be sent."""
    line = " ".join(text.encode("utf-8", "replace").decode("utf-8").split())
    return line if len(line) <= DETAIL_CHARS else line[: DETAIL_CHARS - 3] + "..."
