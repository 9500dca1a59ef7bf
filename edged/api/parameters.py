"""Every field of a completion request that OpenAI documents, and what this server does with it. Data.

One decision a field, so that none is passed over silently: `docs/api.md` shows this table, and tests hold it to the
fields that the official client knows and to what the parser (`edged.api.asks`) does. A field that is in no row is
refused as `unknown_parameter`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Routes = Literal["chat", "text", "both"]
# done: does what OpenAI says. kept: written down with the answer. without: taken with the value that means "without
# it", refused with any other. idle: taken and without effect, since it could not change the answer.
Decision = Literal["done", "kept", "without", "idle"]


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """One row. `note`: what else a client should know."""

    name: str
    routes: Routes
    decision: Decision
    note: str = ""


PARAMETERS: tuple[Parameter, ...] = (
    Parameter("audio", "chat", "without"),
    Parameter("best_of", "text", "without", "taken when it equals `n`"),
    Parameter("echo", "text", "without", "`false` only"),
    Parameter("frequency_penalty", "both", "done"),
    Parameter("function_call", "chat", "without", "`none` and `auto` only; the older `tool_choice`"),
    Parameter("functions", "chat", "without", "`[]` only; the older `tools`"),
    Parameter("logit_bias", "both", "done", "up to 1,024 tokens"),
    Parameter("logprobs", "both", "done", "the text route takes 0 to 5"),
    Parameter("max_completion_tokens", "chat", "done"),
    Parameter("max_tokens", "both", "done", "left out: `[serve] default_max_tokens`, on the text route too"),
    Parameter("messages", "chat", "done", "parts of type `text` are joined; `name` reaches no chat template"),
    Parameter(
        "metadata", "both", "kept", "16 pairs; keys that begin with `edged.` are for updates of stored completions"
    ),
    Parameter("modalities", "chat", "without", '`["text"]` only'),
    Parameter("model", "both", "done", "the id of `/v1/models`, or `default`; left out: `default`"),
    Parameter("moderation", "chat", "without"),
    Parameter("n", "both", "done"),
    Parameter("parallel_tool_calls", "chat", "done", "`false`: it ends with its first call, where calls are marked"),
    Parameter("prediction", "both", "idle", "it would only make the same answer faster"),
    Parameter("presence_penalty", "both", "done"),
    Parameter("prompt", "text", "done", "one text; several, or token ids, are refused"),
    Parameter("prompt_cache_key", "both", "idle", "prompts that begin alike share their cache anyway"),
    Parameter("prompt_cache_options", "both", "idle"),
    Parameter("prompt_cache_retention", "both", "idle"),
    Parameter("reasoning_effort", "chat", "without", "`none` only"),
    Parameter("response_format", "chat", "done", "see [Answers in a form](#answers-in-a-form)"),
    Parameter("safety_identifier", "chat", "kept", "stands for `user` where that is left out"),
    Parameter("seed", "both", "done"),
    Parameter("service_tier", "both", "idle", "there is one tier"),
    Parameter("stop", "both", "done", "a text or up to four"),
    Parameter("store", "chat", "done", "left out: `false`; see [Stored completions](#stored-completions)"),
    Parameter("stream", "both", "done"),
    Parameter("stream_options", "both", "done", "`include_usage`; `include_obfuscation` is refused with `true`"),
    Parameter("suffix", "text", "without", "an empty one only"),
    Parameter("temperature", "both", "done", "below 0.01 the most likely token is taken"),
    Parameter("tool_choice", "chat", "done", "see [Tools](#tools)"),
    Parameter("tools", "chat", "done", "see [Tools](#tools)"),
    Parameter("top_logprobs", "chat", "done"),
    Parameter("top_p", "both", "done"),
    Parameter("user", "both", "kept", "what `DELETE /v1/users/{user}` goes by"),
    Parameter("verbosity", "chat", "without", "`medium` only"),
    Parameter("web_search_options", "chat", "without"),
)

# What extensions of other clients name a conversation with; it says nothing of the answer.
CONVERSATION_NAMES = frozenset({"chat_id", "session_id"})
IDLE = frozenset(parameter.name for parameter in PARAMETERS if parameter.decision == "idle") | CONVERSATION_NAMES
