"""OpenAI's `tools` and `tool_choice` of a request, and calls in the messages that are sent back. Pure.

Whether the served model can be shown tools, and how it writes calls, is known in the serve worker, which refuses them
with 400 `tools_not_supported` where it cannot.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from edged.api.bodies import Body, mistake

TOOLS_MAX = 128

ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
CallId = Annotated[str, StringConstraints(min_length=1, max_length=128)]


class Function(Body):
    """parameters: the JSON schema of its arguments. `strict` makes no difference: see `docs/api.md`."""

    name: ToolName
    description: Annotated[str, StringConstraints(max_length=8192)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(max_length=TOOLS_MAX)]


class NamedFunction(Body):
    name: ToolName


class NamedTool(Body):
    """`{"type": "function", "function": {"name": ...}}`."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(Body):
    """arguments: JSON, as text."""

    name: ToolName
    arguments: str


class Call(Body):
    """A call in an earlier answer, as it came."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction


def offered(tools: Sequence[Tool], choice: ToolChoice | None) -> str | None:
    """What the model is shown, as JSON; None for nothing. Raises a mistake for two tools of one name."""
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise mistake("two tools have the same name", param="tools")
    if not tools or choice == "none":
        return None
    shown = [
        {
            "type": "function",
            "function": {
                name: value
                for name in ("name", "description", "parameters")
                if (value := getattr(tool.function, name)) is not None
            },
        }
        for tool in tools
    ]
    return json.dumps(shown, ensure_ascii=False, separators=(",", ":"))


def must_call(tools: Sequence[Tool], choice: ToolChoice | None) -> tuple[str, ...]:
    """The tools of which one has to be called; () if none has to. Raises a mistake for one that is not offered."""
    names = tuple(tool.function.name for tool in tools)
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise mistake("names a function that is not among the tools", param="tool_choice")
        return (choice.function.name,)
    if choice == "required":
        if not names:
            raise mistake("'required' needs tools", param="tool_choice")
        return names
    return ()
