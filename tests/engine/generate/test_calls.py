"""Calls of tools: found in text however it comes in pieces, written by a grammar, and known by the chat template."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.generate.calls import SYNTAXES, CallStream, Tool, grammar_of_call, tools_of
from engine.generate.keywords import BadSchema
from engine.generate.template import ChatTemplate
from engine.protocol import ChatMessage, ToolCall
from tests.engine.generate.json_schemas import Drawn, fits
from tests.engine.generate.tool_templates import HERMES, LLAMA, OTHERWISE

MARKED, UNMARKED = SYNTAXES
NAMES = ("look", "go")
POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "s": {"type": "string"}}, "required": ["x", "s"]}


def read(pieces: Sequence[str], syntax: Any = MARKED) -> tuple[str, list[tuple[str, Any]]]:
    """The visible text and the calls of an answer that comes in these pieces."""
    stream, shown, calls = CallStream(syntax, NAMES), "", list[ToolCall]()
    for index, piece in enumerate([*pieces, ""]):
        text, found = stream.push(piece, is_over=index == len(pieces))
        shown += text
        calls += found
    assert stream.n_calls == len(calls)
    assert len({call.id for call in calls}) == len(calls)
    assert all(call.id.startswith("call_") for call in calls)
    return shown, [(call.name, json.loads(call.arguments)) for call in calls]


LOOK = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'

UNKNOWN = '<tool_call>{"name":"fly","arguments":{}}</tool_call>!'
NO_OBJECT = '<tool_call>{"name":"go","arguments":3}</tool_call>'


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        (LOOK, "", [("look", {"at": "é"})]),
        (f"I look.\n{LOOK}", "I look.", [("look", {"at": "é"})]),
        (f"{LOOK}\n{LOOK}\n", "", [("look", {"at": "é"})] * 2),
        (f"{LOOK}\nDone.", "\nDone.", [("look", {"at": "é"})]),
        (LOOK.removesuffix("</tool_call>"), "", [("look", {"at": "é"})]),
        (LOOK.removesuffix("l_call>"), "", [("look", {"at": "é"})]),
        ('<tool_call>{"name":"go"}</tool_call>', "", [("go", {})]),
        ('<tool_call>{"name":"go","parameters":{"x":1}}</tool_call>', "", [("go", {"x": 1})]),
        ('<tool_call>{"name":"go","arguments":{"s":"</tool_call>"}}</tool_call>', "", [("go", {"s": "</tool_call>"})]),
        ("No tool is needed. ", "No tool is needed. ", []),
        ("a <tool> and a <tool_call", "a <tool> and a <tool_call", []),
        (UNKNOWN, UNKNOWN, []),
        (NO_OBJECT, NO_OBJECT, []),
        (f"<tool_call>nonsense</tool_call>{LOOK}", "<tool_call>nonsense</tool_call>", [("look", {"at": "é"})]),
        ('<tool_call>{"name":"go","argum', '<tool_call>{"name":"go","argum', []),
        ("<tool_call>" + "[" * 100_000, "<tool_call>" + "[" * 100_000, []),
    ],
)
def test_marked_calls_are_found_and_everything_else_is_text(text: str, shown: str, calls: list[Any]) -> None:
    assert read([text]) == (shown, calls)
    if len(text) < 1000:
        assert read(list(text)) == (shown, calls)


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ('{"name": "go", "parameters": {"x": 1}}', "", [("go", {"x": 1})]),
        ('\n{"name":"go","parameters":{}}; {"name":"look","parameters":{}}', "", [("go", {}), ("look", {})]),
        ('{"name": "fly", "parameters": {}}', '{"name": "fly", "parameters": {}}', []),
        ('{"x": 1}', '{"x": 1}', []),
        ('{"name": "go"} and more', '{"name": "go"} and more', []),
        ("Text {", "Text {", []),
        ("  ", "  ", []),
        ("", "", []),
    ],
)
def test_an_unmarked_call_is_a_whole_answer(text: str, shown: str, calls: list[Any]) -> None:
    assert read([text], UNMARKED) == read(list(text), UNMARKED) == (shown, calls)


fragments = st.lists(
    st.sampled_from([LOOK, "<tool_call>", "</tool_call>", "\n", " ", "<", "text", '{"name":', '"go"', "}", "<tool_"]),
    max_size=6,
)


@given(fragments, st.lists(st.integers(1, 9), max_size=30), st.booleans())
@example([LOOK, " ", LOOK], [3], True)
def test_how_the_text_is_cut_into_pieces_makes_no_difference(
    parts: list[str], sizes: list[int], is_marked: bool
) -> None:
    text, pieces, at = "".join(parts), [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    syntax = MARKED if is_marked else UNMARKED
    whole, calls = read([text], syntax)
    cut, cut_calls = read([*pieces, text[at:]], syntax)
    assert (cut.split(), cut_calls) == (whole.split(), calls)
    if not calls:
        assert cut == whole == text


def test_text_before_a_call_is_shown_while_the_call_is_made() -> None:
    stream = CallStream(MARKED, NAMES)
    assert stream.push("I will look", is_over=False) == ("I will look", ())
    assert stream.push(".\n<tool", is_over=False) == (".", ())
    assert stream.push("_call>", is_over=False) == ("", ())


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: syntax.name)
def test_a_forced_call_is_one_that_is_found(syntax: Any) -> None:
    tools = [
        Tool("look", json.dumps(POINT)),
        Tool("go", '{"$defs":{"n":{"type":"null"}},"properties":{"n":{"$ref":"#/$defs/n"}}}'),
    ]
    drawn, seen = Drawn(grammar_of_call(syntax, tools)), set()
    for seed in range(40):
        shown, calls = read([drawn.text(random.Random(seed))], syntax)
        ((name, arguments),) = calls
        assert shown == ""
        seen.add(name)
        assert fits(arguments, POINT) if name == "look" else set(arguments) <= {"n"}
    assert seen == {"look", "go"}


def test_a_tool_whose_arguments_cannot_be_held_is_named() -> None:
    with pytest.raises(BadSchema, match="tool go: #/properties/a: 'not' is not supported"):
        grammar_of_call(MARKED, [Tool("go", '{"properties":{"a":{"not":{}}}}')])
    with pytest.raises(BadSchema, match="no tool"):
        grammar_of_call(MARKED, [])


def test_a_tool_without_parameters_takes_none() -> None:
    (tool,) = tools_of([{"type": "function", "function": {"name": "go"}}])
    assert json.loads(Drawn(grammar_of_call(UNMARKED, [tool])).text(random.Random(1))) == {
        "name": "go",
        "parameters": {},
    }


@pytest.mark.parametrize(
    ("source", "syntax"),
    [
        (HERMES, "hermes"),
        (LLAMA, "llama3"),
        (OTHERWISE, None),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
        ("{% for m in messages %}{{ raise_exception('no') }}{% endfor %}", None),
        ("{{ tools | tojson }}", None),
    ],
    ids=["hermes", "llama3", "otherwise", "none", "refusing", "shows only"],
)
def test_how_calls_are_written_is_seen_in_the_template(source: str, syntax: str | None) -> None:
    found = ChatTemplate(source, bos="", eos="").call_syntax()
    assert (None if found is None else found.name) == syntax


def test_calls_and_results_of_earlier_turns_are_laid_out() -> None:
    turns = [
        ChatMessage(role="user", content="Look."),
        ChatMessage(
            role="assistant", content="", tool_calls=(ToolCall(id="call_1", name="look", arguments='{"at":"é"}'),)
        ),
        ChatMessage(role="tool", content="blue", tool_call_id="call_1"),
    ]
    tools = [{"type": "function", "function": {"name": "look", "description": "<Looks>"}}]
    text = ChatTemplate(HERMES, bos="", eos="").render(turns, tools)
    assert '{"type": "function", "function": {"name": "look", "description": "<Looks>"}}' in text
    assert '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>' in text
    assert text.endswith("<tool_response>\nblue\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert "Write a call" not in ChatTemplate(HERMES, bos="", eos="").render(turns)


def test_arguments_that_are_no_json_reach_the_template_as_they_are() -> None:
    turn = ChatMessage(role="assistant", content="", tool_calls=(ToolCall(id="a", name="look", arguments="{at"),))
    assert '"arguments": "{at"' in ChatTemplate(HERMES, bos="", eos="").render([turn])


NO_CALLS = {
    "half of a surrogate pair": r'"\ud83d"',
    "half of a pair as a name": r'{"\ude00": 1}',
    "a number that no client reads": "1" * 4_400,
    "an infinite number": "1e999",
    "no number": "NaN",
    "too deep to write": "[" * 100_000 + "]" * 100_000,
}


@pytest.mark.parametrize("kind", NO_CALLS)
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("syntax", SYNTAXES)
def test_arguments_that_are_no_text_again_are_no_call_but_text_of_the_answer(
    kind: str, is_cut: bool, syntax: Any
) -> None:
    written = f'{syntax.opening}{{"name": "go", "{syntax.arguments}": {{"x": {NO_CALLS[kind]}'
    if not is_cut:
        written += f"}}}}{syntax.closing}"
    assert read([written], syntax) == (written, [])
