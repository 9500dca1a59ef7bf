"""What every reward source is, and which one a start message asks for.

A source judges a batch of answers; it may be slow, wrong or fail, and `engine.score.worker` guards against all of it.
What an answer looks like to code outside edged (a user's function, a reward service) is `as_map`, the same for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from engine.protocol import (
    ClassifierSource,
    Fit,
    FitReport,
    FittedSource,
    FunctionSource,
    HttpSource,
    JudgeItem,
    StartScore,
)
from engine.score.verdict import Verdict


class Source(Protocol):
    """A judge of answers. Used by one thread at a time."""

    def judge(self, items: Sequence[JudgeItem], clip: float, deadline: float) -> Verdict:
        """A verdict on every item.

        Args:
            clip: rewards are cut to plus or minus this.
            deadline: of `time.monotonic`; a source that can stop in time does so. Later answers have no use.

        Raises:
            SourceFailed: none of them could be judged, for a named reason. Any other exception counts as
                `judge_raised`.
        """
        ...


@runtime_checkable
class FittableSource(Source, Protocol):
    """A judge that learns from ratings."""

    def fit(self, message: Fit) -> FitReport:
        """Learn from `message`'s ratings; what the judge is worth now."""
        ...


def open_source(start: StartScore) -> Source:
    """The source that `start` asks for. Only its own libraries are imported.

    Raises:
        EngineFault: it cannot work as configured.
    """
    match start.source:
        case FunctionSource() as wanted:
            from engine.score.function import open_function

            return open_function(wanted)
        case HttpSource() as wanted:
            from engine.score.http import open_http

            return open_http(wanted)
        case ClassifierSource() as wanted:
            from engine.score.classifier import open_classifier

            return open_classifier(wanted, threads=start.threads, device=start.device)
        case FittedSource() as wanted:
            from engine.score.fitted import open_fitted

            return open_fitted(wanted, threads=start.threads, device=start.device)


def as_map(item: JudgeItem) -> dict[str, Any]:
    """The answer as plain data, as JSON would hold it."""
    return {
        "episode_id": item.episode_id,
        "messages": [{"role": message.role, "content": message.content} for message in item.messages],
        "prompt": item.prompt,
        "answer": item.answer,
        "finish_reason": item.finish_reason,
        "metadata": dict(item.metadata),
    }
