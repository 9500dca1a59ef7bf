"""Tools in a serve worker: a random model calls what it must, and a model that knows no tools is not shown any."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import protocol
from engine.generate import worker
from engine.generate.asking import Asking, Refused
from engine.generate.llamacpp import Model
from engine.generate.prompt import Prompts
from engine.protocol import ChatMessage, ToolCall
from tests.engine.generate.chatter import write_chatter
from tests.engine.generate.desk import Desk, chat, of, start_serve
from tests.engine.generate.json_schemas import fits
from tests.engine.generate.tool_templates import HERMES, LLAMA

# Short, since every byte is a token of this model.
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "maximum": 99}, "l": {"enum": ["é", "</tool_call>"]}},
    "required": ["x", "l"],
}
TOOLS = [
    {"type": "function", "function": {"name": "place", "parameters": POINT}},
    {"type": "function", "function": {"name": "clear"}},
]


def asked(**changes: Any) -> protocol.Generate:
    sampling = changes.pop("sampling", {})
    return dataclasses.replace(chat(**{"max_tokens": 100, **sampling}), tools=json.dumps(TOOLS), **changes)


@pytest.fixture(scope="module", params=[HERMES, LLAMA], ids=["hermes", "llama3"])
def desk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    chatter = write_chatter(tmp_path_factory.mktemp("chatter"), request.param)
    opened = Desk(worker.run, start_serve(str(chatter.file)))
    yield opened
    opened.stop()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    opened = Desk(worker.run, start_serve(str(write_chatter(tmp_path_factory.mktemp("chatter")).file)))
    yield opened
    opened.stop()


@pytest.mark.parametrize("must_call", [("place",), ("clear",), ("place", "clear")])
def test_an_answer_that_must_call_calls_one_of_its_tools(desk: Desk, must_call: tuple[str, ...]) -> None:
    said = desk.ask(dataclasses.replace(asked(must_call=must_call), n=3))
    done, called = of(said, protocol.ChoiceDone), of(said, protocol.Called)
    assert [choice.calls for choice in done] == [1, 1, 1]
    assert {choice.finish_reason for choice in done} == {"stop"}
    assert sorted(each.choice for each in called) == [0, 1, 2]
    assert of(said, protocol.Chunk) == []  # an answer that is a call has no other text
    for each in called:
        assert each.call.name in must_call
        arguments = json.loads(each.call.arguments)
        assert fits(arguments, POINT) if each.call.name == "place" else arguments == {}
        assert each.call.name in next(choice.text for choice in done if choice.choice == each.choice)


def test_every_call_is_told_before_its_choice_is_done(desk: Desk) -> None:
    kinds = [type(message).__name__ for message in desk.ask(asked(must_call=("clear",)))]
    assert kinds == ["Begun", "Called", "ChoiceDone", "RequestDone"]


def test_a_call_that_is_cut_is_text(desk: Desk) -> None:
    said = desk.ask(asked(must_call=("place",), sampling={"max_tokens": 6}))
    (done,) = of(said, protocol.ChoiceDone)
    assert (done.finish_reason, done.calls) == ("length", 0)
    assert "".join(chunk.text for chunk in of(said, protocol.Chunk)) == done.text != ""


def test_an_answer_that_need_not_call_is_a_sample_of_the_policy(desk: Desk) -> None:
    said = desk.ask(asked(sampling={"max_tokens": 12}))
    (done,) = of(said, protocol.ChoiceDone)
    assert None not in done.logprobs
    assert "".join(chunk.text for chunk in of(said, protocol.Chunk)) == done.text


def test_tools_and_calls_of_earlier_turns_are_part_of_the_prompt(desk: Desk) -> None:
    def prompt(message: protocol.Generate) -> int:
        (begun,) = of(desk.ask(message), protocol.Begun)
        return len(begun.prompt_ids)

    bare = chat(max_tokens=1)
    assert bare.messages is not None
    call = ToolCall(id="call_1", name="clear", arguments="{}")
    turns = (
        *bare.messages,
        ChatMessage(role="assistant", content="", tool_calls=(call,)),
        ChatMessage(role="tool", content="done", tool_call_id="call_1"),
    )
    offered = dataclasses.replace(bare, request_id="offered", tools=json.dumps(TOOLS))
    answered = dataclasses.replace(offered, request_id="answered", messages=turns)
    assert prompt(bare) < prompt(offered) < prompt(answered)


def test_arguments_that_no_grammar_can_hold_are_refused_with_the_tool(desk: Desk) -> None:
    function = {"name": "clear", "parameters": {"type": "object", "propertyNames": {}}}
    tools = json.dumps([{"type": "function", "function": function}])
    (failed,) = desk.ask(dataclasses.replace(asked(must_call=("clear",)), tools=tools))
    assert isinstance(failed, protocol.RequestFailed)
    assert failed.code == "bad_tools"
    assert failed.message.startswith("tool clear: #: 'propertyNames' is not supported")


def test_a_template_without_tools_is_not_shown_any(plain: Desk) -> None:
    refused = asked()
    result = ChatMessage(role="tool", content="done", tool_call_id="call_1")
    sent_back = dataclasses.replace(chat(), messages=(ChatMessage(role="user", content="Hi"), result))
    for message in (refused, sent_back):
        (failed,) = plain.ask(message)
        assert isinstance(failed, protocol.RequestFailed)
        assert failed.code == "tools_not_supported"
    assert isinstance(plain.ask(chat())[-1], protocol.RequestDone)


@pytest.mark.parametrize("template", [HERMES, LLAMA])
def test_half_of_a_surrogate_pair_in_an_earlier_call_is_refused_by_its_place(template: str, tmp_path: Path) -> None:
    model = Model(str(write_chatter(tmp_path, template).file), gpu_layers=0)
    asking = Asking(model, Prompts(model), context_tokens=2_000, trained_tokens=2_000)
    call = ToolCall(id="call_1", name="clear", arguments=r'{"x": "\ud83d"}')
    turns = (
        ChatMessage(role="user", content="Hi"),
        ChatMessage(role="assistant", content="", tool_calls=(call,)),
        ChatMessage(role="tool", content="done", tool_call_id="call_1"),
    )
    with pytest.raises(Refused, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments: .* surrogate") as refused:
        asking.check(dataclasses.replace(chat(), messages=turns))
    assert refused.value.code == "bad_prompt"
    whole = dataclasses.replace(call, arguments=r'{"x": "\ud83d\ude00"}')
    answered = dataclasses.replace(turns[1], tool_calls=(whole,))
    assert asking.check(dataclasses.replace(chat(), messages=(turns[0], answered, turns[2]))).prompt_ids
