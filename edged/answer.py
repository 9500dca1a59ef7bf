"""A completion request and the events of its answer: what the API and the serving side say to each other.

Pure data. An answer is `Started`, then `Piece`s and one `Ended` for each choice, then `Usage`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from edged.records import HELD_TO_A_SCHEMA, MADE_TO_CALL, Caller


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A checked completion request. Exactly one of `messages` and `prompt` is set.

    stream: the reader shows events as they come; otherwise nothing of an answer is out before its end. queue_timeout_s:
    for how long it may wait for a slot; None: for as long as any request.
    store: the answer can be asked for again, and its metadata changed, by its id.
    """

    completion_id: str
    messages: list[dict[str, Any]] | None
    prompt: str | None
    n: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    max_tokens: int | None
    stop: tuple[str, ...]
    logprobs: bool
    top_logprobs: int
    user: str | None
    metadata: dict[str, str]
    caller: Caller
    stream: bool = True
    queue_timeout_s: float | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # token, and what is added to its logit
    store: bool = False
    schema: str | None = None  # the JSON schema, as JSON, that the answer is held to
    tools: str | None = None  # what the model may call: OpenAI's list, as JSON
    must_call: tuple[str, ...] = ()  # tools of which the answer calls one; () if it may do without
    one_call: bool = False  # it ends with its first call

    @property
    def payer(self) -> str:
        """Whose turn it takes and in whose share it counts: the user it names, else the key, the uid of the process or
        the listener that it came by. A user's name is never that of a key."""
        return self.caller.name if self.user is None else f"user:{self.user}"

    @property
    def shaped_by(self) -> str:
        """What changes the distribution besides temperature, top_p and top_k: names with a space between; mostly ""."""
        neutral = {
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "logit_bias": (),
        }
        names = [name for name, value in neutral.items() if getattr(self, name) != value]
        if self.schema is not None:
            names.append(HELD_TO_A_SCHEMA)
        if self.must_call:
            names.append(MADE_TO_CALL)
        return " ".join(names)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """First event of an answer: no text was sent before it."""

    version: int
    fingerprint: str
    created_at: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New text of a choice. `tokens`: OpenAI `logprobs.content` entries if they were asked for. `calls`: complete calls
    of tools, as OpenAI's messages have them."""

    choice: int
    text: str
    tokens: tuple[dict[str, Any], ...]
    calls: tuple[dict[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A choice is complete and its episode is on disk. `finish_reason`: the episode's, or "tool_calls"."""

    choice: int
    finish_reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Last event of an answer."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


AnswerEvent = Started | Piece | Ended | Usage


def fingerprint_of(base_sha256: str, version: int) -> str:
    """OpenAI's `system_fingerprint`: the base model, and the adapter version that answered."""
    return f"edged-{base_sha256[:8]}-v{version}"


def shown_reason(finish_reason: str, *, n_calls: int) -> str:
    """OpenAI's `finish_reason`: an answer that stopped by itself after a call of a tool wants to be told what came of
    it."""
    return "tool_calls" if n_calls and finish_reason == "stop" else finish_reason
