"""The model's own chat template: messages in, prompt text out.

The template is Jinja code out of the model file, so it runs in Jinja's immutable sandbox. Knows no tokens.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.generate.calls import SYNTAXES, Syntax
from engine.protocol import ChatMessage, ToolCall

_ANSWER = "Good-morning-to-you"  # found again in what a template writes
_TOOL, _KEY = "find_good_morning", "in_language"
_THOUGHT = f"<think>\nWhat do people say?\n</think>\n\n{_ANSWER}"  # some templates forget what was thought


class BadTemplate(ValueError):
    """Raised when the messages do not fit the template, or the template itself is broken."""


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, *, bos: str, eos: str) -> None:
        """Raises BadTemplate if `source` is no template."""
        # The options that transformers renders templates with; models are trained on that whitespace.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        environment.filters["tojson"] = _to_json
        self._special: dict[str, Any] = {"bos_token": bos, "eos_token": eos}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise BadTemplate(f"the model's chat template does not compile: {error}") from error

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The prompt up to where the assistant begins to speak; tools: OpenAI's list. Raises BadTemplate."""
        return self._render(messages, add_generation_prompt=True, tools=tools)

    def call_syntax(self) -> Syntax | None:
        """How calls of tools are written; None if the template shows no tools, or writes calls in an unknown form."""
        parameters = {"type": "object", "properties": {_KEY: {"type": "string"}}}
        tool = {"type": "function", "function": {"name": _TOOL, "description": "Finds it.", "parameters": parameters}}
        turns = (
            ChatMessage(role="user", content="Hi"),
            ChatMessage(
                role="assistant",
                content="",
                tool_calls=(ToolCall(id="abcdefghi", name=_TOOL, arguments=json.dumps({_KEY: "any"})),),
            ),
        )
        try:
            if _TOOL not in self.render(turns[:1], [tool]):
                return None
            text = self._render(turns, add_generation_prompt=False, tools=None)
        except BadTemplate:
            return None
        return next((syntax for syntax in SYNTAXES if syntax.writes(text, _TOOL)), None)

    def after_answer(self) -> str:
        """What stands behind an assistant's finished answer; "" if the template takes no such turn, or hides it."""
        turns = (ChatMessage(role="user", content="Hi"), ChatMessage(role="assistant", content=_ANSWER))
        try:
            text = self._render(turns, add_generation_prompt=False)
        except BadTemplate:
            return ""
        return text.rpartition(_ANSWER)[2] if _ANSWER in text else ""

    def keeps_turns(self) -> bool:
        """Whether a later prompt of a conversation begins with what an earlier one and its answer were: False for a
        template that rewrites what was said, such as by leaving out what was thought. True where it takes no second
        turn."""
        turns = (ChatMessage(role="user", content="Hi"), ChatMessage(role="assistant", content=_THOUGHT))
        try:
            first = self.render(turns[:1])
            second = self.render((*turns, ChatMessage(role="user", content="And now?")))
        except BadTemplate:
            return True
        return second.startswith(first + _THOUGHT)

    def _render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        if not messages:
            raise BadTemplate("messages: at least one message is needed")
        variables = {**self._special, "messages": [_plain(message) for message in messages]}
        if tools:
            variables["tools"] = list(tools)
        try:
            return self._template.render(add_generation_prompt=add_generation_prompt, **variables)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            roles = ", ".join(message.role for message in messages)
            raise BadTemplate(f"the model's chat template does not take messages of roles {roles}: {error}") from error


def _plain(message: ChatMessage) -> dict[str, Any]:
    """As templates know a turn: arguments of calls are objects there."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _parsed(call.arguments)}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML characters, which a prompt must keep.
    return json.dumps(value, ensure_ascii=False, indent=indent)
