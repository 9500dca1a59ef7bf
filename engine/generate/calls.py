"""Calls of tools in the text of an answer: found as the text comes, and forced by a grammar.

Every family of chat templates has its own form for a call. The forms that are known are in SYNTAXES; which one a model
has is seen in what its template writes of a call in an earlier turn, so there is nothing to set.

A call is taken for one if its JSON names a tool that was offered, and gives it an object that is text again; everything
else is text of the answer, to the letter: so are half of a surrogate pair and a number that no client could read.
Without a call the visible texts concatenate to the whole text. Pure but for the ids of calls.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from engine.generate.keywords import BadSchema
from engine.generate.schema import Framed, grammar_of_any
from engine.protocol import ToolCall

_DECODER = json.JSONDecoder()
_NO_ARGUMENTS = '{"type":"object","additionalProperties":false}'


@dataclasses.dataclass(frozen=True, slots=True)
class Syntax:
    """How a call is written: `opening` {"name": ..., `arguments`: {...}} `closing`.

    opening: "" where the call is the whole answer and nothing marks it. gap: what is between the marks and the JSON.
    """

    name: str
    opening: str
    closing: str
    arguments: str
    gap: str = ""

    def writes(self, text: str, tool: str) -> bool:
        """Whether `text` has a call of `tool` in this form."""
        head = re.escape(self.opening) + r'\s*\{\s*"name":\s*' + re.escape(json.dumps(tool))
        return re.search(head + rf',\s*"{self.arguments}":\s*\{{', text) is not None


SYNTAXES = (
    Syntax("hermes", "<tool_call>", "</tool_call>", "arguments", gap="\n"),  # Qwen2.5, Qwen3, Hermes
    Syntax("llama3", "", "", "parameters"),  # Llama 3.1 to 3.3
)


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """A tool that is offered. parameters: the JSON schema of its arguments, as JSON."""

    name: str
    parameters: str


def tools_of(offered: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Of OpenAI's `tools`."""
    functions = [each["function"] for each in offered]
    return tuple(
        Tool(function["name"], json.dumps(function["parameters"]) if "parameters" in function else _NO_ARGUMENTS)
        for function in functions
    )


def grammar_of_call(syntax: Syntax, tools: Sequence[Tool]) -> str:
    """The grammar of one call of one of `tools`. Raises BadSchema, with the tool's name."""
    frames = []
    for tool in tools:
        before = f'{syntax.opening}{syntax.gap}{{"name": {json.dumps(tool.name)}, "{syntax.arguments}": '
        frames.append(Framed(before, tool.parameters, f"}}{syntax.gap}{syntax.closing}", of=f"tool {tool.name}"))
    if not frames:
        raise BadSchema("there is no tool to call")
    return grammar_of_any(frames)


class CallStream:
    """The text of one answer on its way, and the calls in it."""

    def __init__(self, syntax: Syntax, names: Collection[str]) -> None:
        self._syntax = syntax
        self._names = frozenset(names)
        self._held = ""
        self._is_text = False  # of an answer without marks: it has shown that it is no call
        self.n_calls = 0

    def push(self, text: str, *, is_over: bool) -> tuple[str, tuple[ToolCall, ...]]:
        """What can be shown of the text so far, and the calls that are complete. is_over: no text follows."""
        self._held += text
        if not self._syntax.opening:
            return self._push_unmarked(is_over)
        shown: list[str] = []
        calls: list[ToolCall] = []
        while (at := self._held.find(self._syntax.opening)) >= 0:
            found = self._call_behind(at + len(self._syntax.opening), is_over=is_over)
            if found is None:
                break
            call, end = found
            if call is None:
                shown.append(self._held[:end])
            else:
                shown.append(self._held[:at].rstrip())
                calls.append(call)
                self.n_calls += 1
            self._held = self._held[end:]
        else:
            shown.append(self._release(is_over))
        return "".join(shown), tuple(calls)

    def _release(self, is_over: bool) -> str:
        """The held text, in which no call begins, without what may yet belong to one."""
        if is_over:
            text, self._held = self._held, ""
            return "" if self.n_calls and not text.strip() else text
        bare = self._held
        for length in range(min(len(self._syntax.opening) - 1, len(bare)), 0, -1):
            if bare.endswith(self._syntax.opening[:length]):
                bare = bare[:-length]
                break
        bare = bare.rstrip()  # dropped if a call follows
        self._held = self._held[len(bare) :]
        return bare

    def _call_behind(self, start: int, *, is_over: bool) -> tuple[ToolCall | None, int] | None:
        """The call whose JSON begins at `start` of the held text, or None for no call, and where it ends; None if that
        is not known yet."""
        rest = self._held[start:]
        body = rest.lstrip()
        close = rest.find(self._syntax.closing)
        if close < 0 and not is_over:
            return None
        try:
            value, length = _DECODER.raw_decode(body)
        except json.JSONDecodeError as error:
            is_begun = error.msg.startswith("Unterminated string") or error.pos >= len(body.rstrip())
            if is_begun and not is_over:
                return None  # the closing mark was inside a text
            return None, start + (close + len(self._syntax.closing) if close >= 0 else len(rest))
        except (ValueError, RecursionError):  # a number of thousands of digits; too deep
            return None, len(self._held)
        end = start + len(rest) - len(body) + length
        behind = self._held[end:]
        mark = behind.lstrip()
        if self._syntax.closing.startswith(mark):
            if not is_over:
                return None
            end = len(self._held)
        elif mark.startswith(self._syntax.closing):
            end += len(behind) - len(mark) + len(self._syntax.closing)
        return self._call(value), end

    def _push_unmarked(self, is_over: bool) -> tuple[str, tuple[ToolCall, ...]]:
        """An answer that is nothing but calls, one behind the other, or text."""
        begun = self._held.lstrip()
        self._is_text = self._is_text or (bool(begun) and not begun.startswith("{"))
        if not self._is_text and not is_over:
            return "", ()
        text, self._held = self._held, ""
        calls = None if self._is_text else self._all_calls(text)
        if not calls:
            return text, ()
        self.n_calls += len(calls)
        return "", tuple(calls)

    def _all_calls(self, text: str) -> list[ToolCall] | None:
        calls: list[ToolCall] = []
        rest = text.strip()
        while rest:
            try:
                value, end = _DECODER.raw_decode(rest)
            except (ValueError, RecursionError):
                return None
            call = self._call(value)
            if call is None:
                return None
            calls.append(call)
            rest = rest[end:].lstrip(" \n\r\t;,")
        return calls

    def _call(self, value: Any) -> ToolCall | None:
        if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or name not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(arguments, dict):
            return None
        text = _text_of(arguments)
        if text is None:
            return None
        return ToolCall(id=f"call_{secrets.token_hex(12)}", name=name, arguments=text)


def _text_of(arguments: Mapping[str, Any]) -> str | None:
    """As JSON that every client reads; None if there is none."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError):  # an infinite number, half of a surrogate pair; too deep
        return None
    return text
