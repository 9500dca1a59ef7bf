"""Completion requests as OpenAI's clients send them, and the `Ask` that each of them means. Pure.

What becomes of each field is decided in `edged.api.parameters`. What this server does is parsed. What has a value that
means "without" (an empty list of tools) is taken with that value only, and refused as `unsupported_parameter` with any
other. What could not change the answer is accepted without effect. Everything else is `unknown_parameter`.

Beyond OpenAI there are `top_k` (0: off), `min_p` (0: off), `repetition_penalty` (1: off) and `queue_timeout_s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, WithJsonSchema, model_validator

from edged.api.bodies import Body, mistake, unsupported
from edged.api.parameters import IDLE
from edged.api.ports import Ask
from edged.api.response_format import ResponseFormat
from edged.api.tools import TOOLS_MAX, Call, CallId, ToolChoice, Tools, must_call, offered
from edged.records import Caller

METADATA_PAIRS_MAX = 16
OUR_METADATA = "edged."  # what begins with it is not an app's own, but said to this server
STOP_MAX = 4
N_MAX = 128


def only(*neutral: Any) -> AfterValidator:
    """For a field that takes the values in `neutral`; any other would need what this server does not have."""

    def check(value: Any) -> Any:
        if not any(type(value) in (type(item), int, float) and value == item for item in neutral):
            rest = f" other than {neutral[0]!r}" if neutral else ""
            raise unsupported(f"this server does not have this parameter{rest} yet; leave it out")
        return value

    return AfterValidator(check)


def _content_text(value: Any) -> str:
    """A message's content: a string, or text parts that are joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise mistake("a message's content is a string or a list of text parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise unsupported(f"this server takes parts of type 'text' only, not {kind[:40]!r}")
        if kind is None or not isinstance(part.get("text"), str):
            raise mistake("a part of a message's content is {'type': 'text', 'text': '...'}")
        texts.append(part["text"])
    return "".join(texts)


def _stop_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompt_text(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if len(value) == 1 and isinstance(value[0], str):
        return value[0]
    if value and all(isinstance(item, str) for item in value):
        raise unsupported("one prompt in a request; send a request for each")
    raise unsupported("a prompt is text here; token ids are not taken")


TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Content = Annotated[
    str,
    BeforeValidator(_content_text),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART}]}),
]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=512)]
Stop = Annotated[list[StopText], BeforeValidator(_stop_list), Field(max_length=STOP_MAX)]
Prompt = Annotated[
    str,
    BeforeValidator(_prompt_text),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 1}]}),
]
Metadata = Annotated[
    dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]],
    Field(max_length=METADATA_PAIRS_MAX),
]


def _without_ours(metadata: dict[str, str]) -> dict[str, str]:
    for key in metadata:
        if key.startswith(OUR_METADATA):
            raise mistake(
                f"metadata that begins with {OUR_METADATA!r} speaks of an answer that is there; update its metadata",
                param=f"metadata.{key}",
            )
    return metadata


User = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Tokens = Annotated[int, Field(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
# Keys are token ids, as text: JSON has no others.
LogitBias = Annotated[
    dict[Annotated[str, StringConstraints(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=1024),
]


GREEDY_BELOW = 0.01  # a distribution this sharp is a choice already, and its logits overflow


def sampled_at(temperature: float) -> float:
    """The temperature that the engine is given: clients write 1e-8 and mean 0."""
    return 0.0 if temperature < GREEDY_BELOW else temperature


class ChatMessage(Body):
    """One turn. An assistant's message of an earlier answer can be sent back as it came."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content
    name: str | None = None
    annotations: Annotated[Any, only([])] = None
    audio: Annotated[Any, only()] = None
    function_call: Annotated[Any, only()] = None
    refusal: Annotated[Any, only()] = None
    tool_calls: Annotated[list[Call], Field(max_length=TOOLS_MAX)] = Field(default_factory=list)
    tool_call_id: CallId | None = None

    @model_validator(mode="before")
    @classmethod
    def _calls_stand_for_content(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("tool_calls") and value.get("content") is None:
            return {**value, "content": ""}
        return value

    @model_validator(mode="after")
    def _calls_are_where_they_belong(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise mistake("only an assistant's message has tool_calls")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise mistake("tool_call_id goes with role 'tool', and that with tool_call_id")
        return self

    def plain(self) -> dict[str, Any]:
        """In OpenAI's shape, without what is not there."""
        plain: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content,
        }
        if self.tool_calls:
            plain["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        return plain


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Annotated[Any, only(False)] = None


class SamplingRequest(Body):
    """What both kinds of completion share."""

    model: str = "default"
    n: Annotated[int, Field(ge=1, le=N_MAX)] = 1
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop = Field(default_factory=list)
    max_tokens: Tokens | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: User | None = None
    metadata: Annotated[Metadata, AfterValidator(_without_ours)] = Field(default_factory=dict)
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    logit_bias: LogitBias | None = None
    queue_timeout_s: Annotated[float, Field(gt=0, le=86_400)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_idle(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: item for name, item in value.items() if name not in IDLE}
        return value

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> SamplingRequest:
        if self.stream_options is not None and not self.stream:
            raise mistake("only with stream = true", param="stream_options")
        return self

    @property
    def shape(self) -> dict[str, Any]:
        """What changes the distribution besides temperature, top_p and top_k: fields of an Ask."""
        bias = sorted((int(token), value) for token, value in (self.logit_bias or {}).items() if value != 0)
        return {
            "min_p": self.min_p or 0.0,
            "repetition_penalty": 1.0 if self.repetition_penalty is None else self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "presence_penalty": self.presence_penalty or 0.0,
            "logit_bias": tuple(bias),
        }

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(SamplingRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000)]
    max_completion_tokens: Tokens | None = None
    store: bool = False
    safety_identifier: User | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    audio: Annotated[Any, only()] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    functions: Annotated[Any, only([])] = None
    modalities: Annotated[Any, only(["text"])] = None
    moderation: Annotated[Any, only()] = None
    reasoning_effort: Annotated[Any, only("none")] = None
    response_format: ResponseFormat | None = None
    tool_choice: ToolChoice | None = None
    tools: Tools = Field(default_factory=list)
    parallel_tool_calls: bool = True
    verbosity: Annotated[Any, only("medium")] = None
    web_search_options: Annotated[Any, only()] = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise mistake("only with logprobs = true", param="top_logprobs")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise mistake("differs from max_completion_tokens; send one of them", param="max_tokens")
        if offered(self.tools, self.tool_choice) is not None and self._schema is not None:
            raise mistake("not together with tools, unless tool_choice is 'none'", param="response_format")
        must_call(self.tools, self.tool_choice)
        return self

    @property
    def _schema(self) -> str | None:
        return None if self.response_format is None else self.response_format.schema_text

    def ask(self, completion_id: str, caller: Caller) -> Ask:
        return Ask(
            stream=self.stream,
            completion_id=completion_id,
            messages=[message.plain() for message in self.messages],
            prompt=None,
            n=self.n,
            temperature=sampled_at(self.temperature),
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            stop=tuple(self.stop),
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs or 0,
            user=self.safety_identifier if self.user is None else self.user,
            metadata=self.metadata,
            caller=caller,
            store=self.store,
            queue_timeout_s=self.queue_timeout_s,
            schema=self._schema,
            tools=offered(self.tools, self.tool_choice),
            must_call=must_call(self.tools, self.tool_choice),
            one_call=not self.parallel_tool_calls,
            **self.shape,
        )


class TextRequest(SamplingRequest):
    """POST /v1/completions: `prompt` is continued as it is, without the chat template."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    best_of: Annotated[int, Field(ge=1, le=N_MAX)] | None = None
    echo: Annotated[Any, only(False)] = None
    suffix: Annotated[Any, only("")] = None
    store: Annotated[Any, only(False)] = None

    @model_validator(mode="after")
    def _shows_all_that_it_makes(self) -> TextRequest:
        if self.best_of is not None and self.best_of != self.n:
            raise unsupported("this server shows every answer that it makes; best_of can only be n", param="best_of")
        return self

    def ask(self, completion_id: str, caller: Caller) -> Ask:
        return Ask(
            stream=self.stream,
            completion_id=completion_id,
            messages=None,
            prompt=self.prompt,
            n=self.n,
            temperature=sampled_at(self.temperature),
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop),
            logprobs=self.logprobs is not None,
            top_logprobs=self.logprobs or 0,
            user=self.user,
            metadata=self.metadata,
            caller=caller,
            queue_timeout_s=self.queue_timeout_s,
            **self.shape,
        )
