"""The messages of the score role: judging answers by a reward source, and fitting a judge to the box's own ratings.

`Judge` is answered by one `Judged`, whatever the source does; what hangs so hard that the worker cannot answer is for
the daemon to kill. `Fit` is answered by one `Fitted` and only a worker with a `FittedSource` takes it.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from engine.protocol.serve import ChatMessage, FinishReason
from engine.wire import Message

# Why an answer has no reward: stable names, counted and shown in status.
JudgeReason = Literal[
    "judge_abstained",  # the source gave none on purpose
    "judge_raised",  # the source raised an exception
    "judge_timeout",  # it was not done in time
    "judge_wrong_length",  # another number of rewards than there were answers: nobody knows which is whose
    "judge_not_a_number",  # a text, a truth value or anything else that is no number
    "judge_not_finite",  # NaN or infinity
    "judge_bad_answer",  # what came back is no list of rewards at all
    "judge_answer_too_large",  # the reward service sent more bytes than the rewards of a batch can have
    "judge_http_status",  # the reward service answered with another status than 200
    "judge_unreachable",  # the reward service could not be reached, or closed the connection
    "judge_too_long",  # the answer and what led to it are longer than the judge can read
    "judge_empty",  # the answer has no tokens, so the fitted model sees nothing
    "judge_not_fitted",  # the fitted model is not used: too few ratings, or it does not beat its bar
    "judge_clipped",  # the only one that stands beside a reward: the number was out of range and was cut
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSource:
    """entry_point: "module:function". folder: where the module is looked for first; "" for the installed ones only."""

    entry_point: str
    folder: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HttpSource:
    url: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierSource:
    """model_folder: a transformers sequence classifier with its tokenizer. label: whose probability is the reward; ""
    for the only output, or the second of two. reads: what it is shown."""

    model_folder: str
    label: str
    reads: Literal["conversation", "answer"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FittedSource:
    """The base whose frozen features the fitted model sees; as in `StartTrain`."""

    model_path: str
    base_sha256: str
    cache_folder: str
    dtype: Literal["bfloat16", "float32"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartScore(Message):
    """idle_class: run under SCHED_IDLE. device: "cpu" or "cuda:0", for sources that compute."""

    source: FunctionSource | HttpSource | ClassifierSource | FittedSource
    threads: int
    device: str
    idle_class: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JudgeItem:
    """An answer to judge. A chat has `messages` and no `prompt`, a continued text has a `prompt` and no messages."""

    episode_id: int
    messages: tuple[ChatMessage, ...]
    prompt: str | None
    answer: str
    finish_reason: FinishReason
    metadata: dict[str, str]
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judge(Message):
    """timeout_s: for the whole batch. clip: rewards are cut to plus or minus this."""

    job_id: str
    items: tuple[JudgeItem, ...]
    timeout_s: float
    clip: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judged(Message):
    """rewards, reasons: one an item, in its order; a reward is None with a reason. seconds: that the source took.

    detail: what the first failure was, for people; "" if there was none.
    stuck: the source has not come back from this batch. A thread cannot be ended, so the process must be.
    """

    job_id: str
    rewards: tuple[float | None, ...]
    reasons: tuple[JudgeReason | None, ...]
    seconds: float
    detail: str = ""
    stuck: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RatedTokens:
    """A rated answer as the fitted model learns from it. rating: in [-1, 1]."""

    episode_id: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    rating: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fit(Message):
    """Fit the model to these ratings and those of earlier messages.

    fresh: forget the earlier ones first. more: take these up only; the message that fits follows.
    ratings_min, accuracy_min: the model is used from so many ratings on and while its held-out accuracy is so high.
    """

    job_id: str
    ratings: tuple[RatedTokens, ...]
    fresh: bool
    more: bool
    accuracy_min: float
    ratings_min: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """What the fitted model is worth, and whether it is used.

    n_ratings: different answers that it was fitted to. head: "" before there are enough ratings for one.
    accuracy: share of pairs of held-out answers, rated differently, that it puts in the right order; 0.5 is chance.
    chance_se: standard deviation of the accuracy of a model that knows nothing. Both None without such pairs.
    why: for people.
    """

    n_ratings: int
    n_pairs: int
    head: Literal["", "ridge", "logistic"]
    accuracy: float | None
    chance_se: float | None
    used: bool
    why: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fitted(Message):
    job_id: str
    report: FitReport
    seconds: float
