"""The messages of the serve role: answering requests, and bringing adapters live.

`Generate` is answered by `Begun` and then, for each choice, `Chunk`s, `Called`s and one `ChoiceDone`, and at the end
one `RequestDone`; or by one `RequestFailed`, after which nothing follows. `Cancel` ends the open choices with finish
reason "cancelled". `Stage` loads an adapter into the spare context and proves it there; it is answered by `Staged` or
`StageFailed` and changes nothing for requests. `Route` sends new requests to a staged (or still resident) version and
is answered by `Routed` once the old context takes no new request; requests that run keep their adapter.
`Tokenise` is answered at once by `Tokenised` or `RequestFailed`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from engine.protocol.nouns import AdapterRef, ProbeTokens
from engine.wire import Message

Backend = Literal["llamacpp", "transformers", "remote"]
FinishReason = Literal["stop", "length", "cancelled"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProbeText:
    """A fixed canary probe: a user's turn and an assistant's answer to score."""

    user: str
    assistant: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartServe(Message):
    """backend: who decodes; "llamacpp" takes a .gguf file, the others a Hugging Face folder.

    device, dtype: of "transformers", as torch names them.
    url, api_key_file: of the server that "remote" speaks to. server_wait_s: how long it waits for that to answer.
    shelf: the folder where adapters are laid out for the server. shelf_seen_at: the same as the server sees it; "":
    under the same path.
    """

    model_path: str
    adapter: AdapterRef  # served from the first request on
    slots: int  # sequences decoded at once in one context
    context_tokens: int  # KV pool of one context, shared by its slots
    threads: int
    probes: tuple[ProbeText, ...]
    gpu_layers: int = 0
    backend: Backend = "llamacpp"
    device: str = "cpu"
    dtype: str = "float32"
    url: str = ""
    api_key_file: str = ""
    server_wait_s: float = 60.0
    shelf: str = ""
    shelf_seen_at: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that an answer makes of a tool. arguments: JSON, as text."""

    id: str
    name: str
    arguments: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn. tool_calls: of an assistant; tool_call_id: of a tool, which call it answers."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """temperature 0 is greedy; top_k 0, top_p 1.0 and min_p 0.0 cut nothing; seed None draws one. The penalties and
    logit_bias (token, what is added to its logit) as in `engine.generate.shaping`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    max_tokens: int | None = None  # None: up to the context's end
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0  # alternatives reported a token; only with logprobs
    logprobs: bool = False  # report token texts in the chunks; log-probabilities are always recorded


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Generate(Message):
    """Answer `messages` through the chat template, or continue `prompt` as it is: exactly one of the two.

    version: None for the live one, which is what every user gets. Another one, to compare with it, has to be resident
    in one of the contexts, and no adapter may wait to be staged.
    queue_timeout_s: for how long it may wait until its first choice has a slot; it fails then. None: for ever.
    user: with whom its choices wait for slots: users take turns, however many requests each has.
    schema: the JSON schema, as JSON, that the answer's text fits, unless it is cut; None: any text.
    tools: what the model may call, as JSON: OpenAI's list of tools, which the chat template lays out; None: nothing.
    must_call: names of tools of which the answer calls one; () if it may do without. one_call: it ends with its first.
    """

    request_id: str
    messages: tuple[ChatMessage, ...] | None
    prompt: str | None
    n: int
    sampling: Sampling
    version: int | None = None
    user: str = ""
    queue_timeout_s: float | None = None
    schema: str | None = None
    tools: str | None = None
    must_call: tuple[str, ...] = ()
    one_call: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Message):
    request_id: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Begun(Message):
    """The request runs on adapter `version`, to its end."""

    request_id: str
    version: int
    prompt_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprob:
    id: int
    text: str
    bytes: tuple[int, ...]
    logprob: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token as OpenAI's `logprobs.content` shows it: raw log-softmax at temperature 1."""

    id: int
    text: str
    bytes: tuple[int, ...]
    logprob: float
    top: tuple[TopLogprob, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk(Message):
    """New text of a choice; never half a character, never part of a stop string. `text` may be ""."""

    request_id: str
    choice: int
    text: str
    tokens: tuple[TokenLogprob, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Called(Message):
    """A choice has called a tool; the text of the call is in no chunk."""

    request_id: str
    choice: int
    call: ToolCall


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDone(Message):
    """One finished choice: the record that learning needs.

    completion_ids: every sampled token in order, a sampled end-of-sequence token included.
    logprobs: of each of them under the distribution it was sampled from; None where unknown.
    raw_logprobs: of each of them under the full softmax at temperature 1.
    text: the whole text that the chunks carried; where tools were offered, as the model wrote it, calls included.
    seed: the seed that was used.
    calls: how many calls of tools there were.
    """

    request_id: str
    choice: int
    finish_reason: FinishReason
    completion_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    raw_logprobs: tuple[float | None, ...]
    text: str
    seed: int
    calls: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestDone(Message):
    request_id: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed(Message):
    """`code` is stable: context_length_exceeded, bad_template, bad_prompt, bad_logit_bias, bad_response_format (also in
    the middle of an answer), bad_tools (likewise), tools_not_supported, not_resident (a version that was asked for by
    its number), queue_timeout, engine_error."""

    request_id: str
    code: str
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Waits of running answers from one decode step to the next, of all steps in which `answers` of them got a token:
    how many steps, and how long they took together."""

    answers: int
    steps: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """What a request waited for its first token: for a slot, and then until all of its prompt was evaluated.

    beside: requests that ran or waited when it came. evaluated_tokens: of its prompt, without those that were cached.
    """

    queue_s: float
    prefill_s: float
    beside: int
    evaluated_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decoding(Message):
    """About once a second while answers run: their gaps and first tokens since the last one."""

    gaps: tuple[Gap, ...]
    firsts: tuple[FirstToken, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tokenise(Message):
    """The tokens of an answer that a person wrote, as if the model had given it: as whole, with its end.

    messages: what it answers, laid out by the chat template. None where the prompt has its tokens already, because an
    answer to it was sampled: it has `prompt_tokens` of them.
    """

    request_id: str
    messages: tuple[ChatMessage, ...] | None
    answer: str
    prompt_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tokenised(Message):
    """prompt_ids: () where no messages were given. completion_ids: the answer's text and the token that ends it."""

    request_id: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stage(Message):
    """Load `adapter` into the spare context and prove it there: canary log-probabilities of the start's probes, and
    one sampled answer (`fluency_tokens` at most, temperature 0.7, seeded) to each of `fluency_prompts`."""

    job_id: str
    adapter: AdapterRef
    fluency_prompts: tuple[str, ...]
    fluency_tokens: int
    seed: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Staged(Message):
    """The adapter stands in the spare context.

    canary: per probe, the raw log-probability of each completion token under the staged adapter.
    live_canary: the same under the version that was live when it was staged.
    fluency: per prompt, the sampled answer. fluency_logprobs: of its tokens, under the distribution they were sampled
    from; None where a server does not tell.
    longest_gap_ms: the longest time in which no decode step of a running request ran because of staging (0 if idle).
    """

    job_id: str
    version: int
    canary: tuple[tuple[float, ...], ...]
    live_canary: tuple[tuple[float, ...], ...]
    fluency: tuple[ProbeTokens, ...]
    fluency_texts: tuple[str, ...]
    load_ms: float
    prove_ms: float
    longest_gap_ms: float
    fluency_logprobs: tuple[tuple[float | None, ...], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageFailed(Message):
    """`code`: adapter_unreadable, adapter_mismatch, not_finite, engine_error. The spare context is clean again."""

    job_id: str
    version: int
    code: str
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Route(Message):
    """Send new requests to `version`, which must be staged or resident in the other context."""

    job_id: str
    version: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Routed(Message):
    """New requests run on `version`. `swap_ms`: time in which no decode step ran because of the routing."""

    job_id: str
    version: int
    swap_ms: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouteFailed(Message):
    """`version` is neither staged nor resident; the live version has not changed."""

    job_id: str
    version: int
    message: str
