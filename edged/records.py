"""The nouns of the daemon as immutable records: what the store keeps and what the other parts pass around.

Pure data without behaviour, I/O or validation of outside input (that is done at the border: `edged.api`, `edged.cli`).
Times are Unix seconds (`_at`), log-probabilities are nats, unknown log-probabilities are None.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Verdict = Literal["published", "refused", "skipped", "failed"]
UpdateState = Literal["planned", "training", "gating", "finished"]
AdapterOrigin = Literal["base", "trained", "imported", "fleet"]
AdapterState = Literal["candidate", "published", "refused"]
WatchVerdict = Literal["kept", "rolled_back"]
Scope = Literal["infer", "feedback", "admin"]
EpisodeOrigin = Literal["user", "practice"]
UpdateOrigin = Literal["ratings", "practice"]

# What shapes an answer so that it could not have been any other text, as `shaped_by` names it.
HELD_TO_A_SCHEMA = "response_format"
MADE_TO_CALL = "tool_choice"
CONSTRAINTS = frozenset({HELD_TO_A_SCHEMA, MADE_TO_CALL})

# What an update's figures of answers that the trainer could not use begin with; the reason follows.
LEFT_OUT = "dropped/"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks. `name` is what the audit shows: "uid:1000", "key:app", "loopback"."""

    name: str
    scopes: frozenset[Scope]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One choice of one answer, exactly as the engine sampled it. `id` is 0 until the store has given one.

    origin: who asked: a user, or the box itself, in practice.
    """

    id: int
    completion_id: str
    choice: int
    created_at: float
    kind: Literal["chat", "text"]
    model: str
    base_sha256: str
    version: int  # adapter that made it
    messages: list[dict[str, Any]] | None
    prompt: str | None
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]  # under the sampling distribution
    raw_logprobs: tuple[float | None, ...]  # full softmax at temperature 1
    text: str
    finish_reason: Literal["stop", "length", "cancelled"]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    max_tokens: int | None
    user: str | None
    metadata: dict[str, str]
    caller: str
    origin: EpisodeOrigin = "user"
    shaped_by: str = ""  # what else changed the distribution, as `min_p logit_bias`; "" for a plain sample


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShownCalls:
    """What a reader was shown of an answer that calls tools: its text without the calls, and the calls as OpenAI's
    messages have them. The episode has it all as the model wrote it."""

    text: str
    calls: tuple[dict[str, Any], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredChoice:
    """A choice of a stored completion; `shown` if it calls tools."""

    episode: Episode
    shown: ShownCalls | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewFeedback:
    """A checked rating as it comes in. `rating` in [-1, 1]; None where there is only a correction."""

    completion_id: str
    choice: int
    rating: float | None
    correction: str | None
    reason: str | None
    user: str | None
    tags: tuple[str, ...]
    source: str
    caller: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """A stored feedback row. Of a choice the newest rating counts, and the newest correction.

    replaces: the newest row before it whose rating or correction it superseded.
    """

    id: str
    completion_id: str
    choice: int
    rating: float | None
    correction: str | None
    reason: str | None
    user: str | None
    tags: tuple[str, ...]
    source: str
    caller: str
    created_at: float
    replaces: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A stored pair: `chosen` is the better answer to `messages`."""

    id: str
    messages: list[dict[str, Any]]
    chosen: str
    rejected: str
    user: str | None
    caller: str
    created_at: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RatedChoice:
    """A choice that is rated: what planning looks at.

    used_by: the finished update that trained on it as a new rating, or None. rated_at: when the newest rating came.
    group: the same for the choices of one completion, or for the answers of practice to one prompt by one version.
    """

    episode_id: int
    feedback_id: str
    rating: float
    rated_at: float
    version: int
    base_sha256: str
    temperature: float
    top_p: float
    top_k: int
    n_tokens: int
    logprobs_complete: bool
    used_by: int | None
    group: str
    shaped_by: str = ""  # as of Episode


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A preferred pair or a correction as planning sees it. `id` is above 0.

    differs: there are two different answers to compare; always so for a pair. used_by: the finished update that trained
    on it as new, or None.
    """

    id: int
    kind: Literal["pair", "correction"]
    written_at: float
    differs: bool
    used_by: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WrittenText:
    """What of it is to be tokenised. A correction stands behind a prompt that has its tokens, `prompt_tokens` of them;
    messages and rejected are None."""

    id: int
    kind: Literal["pair", "correction"]
    messages: list[dict[str, Any]] | None
    prompt_tokens: int
    chosen: str
    rejected: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WrittenTokens:
    """The tokens of a pair or correction; rejected is the corrected answer, as it was sampled."""

    id: int
    kind: Literal["pair", "correction"]
    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCounts:
    """waiting: those without tokens included. dropped: reason -> pairs and corrections that no update can use."""

    pairs_waiting: int = 0
    pairs_used: int = 0
    corrections_waiting: int = 0
    corrections_used: int = 0
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PracticePrompt:
    """What the box may ask itself: a chat (`messages`) or a text to continue (`prompt`). prompt_of: the user's episode
    that it was taken from; None: it is the operator's."""

    prompt_of: int | None
    messages: list[dict[str, Any]] | None
    prompt: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JudgedAnswer:
    """A practice answer with its reward, as a rated choice without feedback: `rating` is the reward, `rated_at` when it
    was judged. answers_to: the same for answers to one prompt by one version."""

    choice: RatedChoice
    answers_to: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RatedAnswer:
    """A rated answer in tokens, for a judge that is fitted to ratings."""

    episode_id: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    rating: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PracticeCounts:
    """unjudged, judged: answers that wait for the judge, and for an update. groups: different prompts among both.
    prompts: of users, for the next round; a look at the recent ones. in_a_row: finished practice updates since a person
    rated.

    rounds, answers, rewards, updates: since the state folder was made. reasons: why there was no reward, or a cut one,
    or no answers to a prompt -> how often. skipped: reason -> judged answers that no update can use.
    """

    unjudged: int = 0
    judged: int = 0
    groups: int = 0
    prompts: int = 0
    in_a_row: int = 0
    rounds: int = 0
    answers: int = 0
    rewards: int = 0
    updates: int = 0
    reasons: dict[str, int] = dataclasses.field(default_factory=dict)
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """The version that the KL reference moved to, and what spoke for it. configured: `learn.reference` at that time."""

    version: int
    since: float
    ratings: int
    mean_rating: float
    before: int
    configured: int
    base_sha256: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeScore:
    """What the trainer said of an episode (see `engine.protocol.EpisodeScore`)."""

    episode_id: int
    reference_version: int
    reference_logprob: float | None
    kl: float
    engine_gap: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One update from its plan to its verdict. `version`: the version number that its candidate uses up."""

    id: int
    state: UpdateState
    version: int
    parent_version: int
    seed: int
    attempts: int
    created_at: float
    finished_at: float | None
    verdict: Verdict | None
    reason: str | None
    seconds: dict[str, float]
    metrics: dict[str, float]
    new_episode_ids: tuple[int, ...]
    replay_episode_ids: tuple[int, ...]
    origin: UpdateOrigin = "ratings"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeepVerdict:
    """What the deep gate found of a version that went live. against: the version that it was compared with. reason: a
    sentence. rolled_back_to: the version that is served instead, or None. kept_why: why a refused one is still served.
    """

    verdict: Literal["passed", "refused", "undecided"]
    against: int
    at: float
    reason: str
    rolled_back_to: int | None = None
    kept_why: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One version in the lineage. Version 0 is the base and always there. `folder`: name under `adapters/`, or None.

    verdict: what became of it after it went live (`edged.swap`), for the reason verdict_reason; None: nothing yet.
    collected_at: when its files were removed from the disk.
    """

    version: int
    parent_version: int | None
    origin: AdapterOrigin
    state: AdapterState
    created_at: float
    sha256: str | None
    folder: str | None
    reason: str | None  # why it was refused, or who imported it
    kept: bool
    metrics: dict[str, float]
    verdict: WatchVerdict | None = None
    verdict_reason: str | None = None
    collected_at: float | None = None
    deep: DeepVerdict | None = None  # None: the deep gate has not judged it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PublishedAdapter:
    """The files of a version that goes live. folder: name under `adapters/`. sha256: of the adapter's weights."""

    sha256: str
    folder: str
    metrics: dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What is served: the newest row of the live history. `pinned`: publish nothing until unpinned. `reason`: what
    spoke against the version before, if that was rolled back. `verdict`: of the version, by now."""

    version: int
    since: float
    why: Literal["base", "published", "promoted", "rolled_back"]
    caller: str
    pinned: bool
    reason: str | None = None
    verdict: WatchVerdict | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """`id` names the key in lists and in the audit; the secret itself is never stored, only its hash."""

    id: str
    name: str
    scopes: frozenset[Scope]
    created_at: float
    revoked_at: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    seq: int
    at: float
    caller: str
    action: str
    detail: dict[str, Any]
