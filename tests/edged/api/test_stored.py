from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from edged.api.stored import MetadataRequest, choice_object, metadata_asked, page_of
from edged.records import ShownCalls, StoredChoice
from edged.refusal import Refused
from tests.edged.api.light_server import Light, serving

PATH = "/v1/chat/completions"


def with_light(folder: Path, scenario: Callable[[Light], Awaitable[None]]) -> None:
    async def run() -> None:
        async with serving(folder) as light:
            await scenario(light)

    asyncio.run(run())


async def key_with(light: Light, *scopes: str, name: str = "app") -> dict[str, str]:
    made = await light.unix.post("/v1/keys", json={"name": name, "scopes": scopes})
    return {"authorization": f"Bearer {made.json()['secret']}"}


def test_what_was_not_asked_to_be_stored_is_not_found(tmp_path: Path) -> None:
    async def scenario(light: Light) -> None:
        answer = await light.ask()
        for method, path in (("GET", ""), ("GET", "/messages"), ("DELETE", "")):
            refused = await light.unix.request(method, f"{PATH}/{answer['id']}{path}")
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "completion_not_found")
        assert (await light.unix.get(PATH)).json()["data"] == []

    with_light(tmp_path, scenario)


def test_a_completion_comes_back_as_it_was_answered(tmp_path: Path) -> None:
    async def scenario(light: Light) -> None:
        answer = await light.ask(store=True, metadata={"a": "b"}, user="ann", temperature=0.5, n=2)
        stored = (await light.unix.get(f"{PATH}/{answer['id']}")).json()
        assert [stored[name] for name in ("id", "choices", "object")] == [
            answer[name] for name in ("id", "choices", "object")
        ]
        assert (stored["metadata"], stored["input_user"], stored["temperature"]) == ({"a": "b"}, "ann", 0.5)

    with_light(tmp_path, scenario)


def test_a_key_finds_what_was_asked_with_it_and_an_operator_all(tmp_path: Path) -> None:
    async def scenario(light: Light) -> None:
        mine, other = await key_with(light, "infer"), await key_with(light, "infer", name="other")
        body = {"messages": [{"role": "user", "content": "Hello"}], "store": True}
        answer = (await light.tcp.post(PATH, json=body, headers=mine)).json()

        assert [c["id"] for c in (await light.tcp.get(PATH, headers=mine)).json()["data"]] == [answer["id"]]
        assert (await light.tcp.get(PATH, headers=other)).json()["data"] == []
        for method in ("GET", "DELETE"):
            assert (await light.tcp.request(method, f"{PATH}/{answer['id']}", headers=other)).status_code == 404
        changed = await light.tcp.post(f"{PATH}/{answer['id']}", json={"metadata": {}}, headers=other)
        assert changed.status_code == 404
        assert (await light.unix.get(f"{PATH}/{answer['id']}")).status_code == 200

    with_light(tmp_path, scenario)


def test_a_rating_in_the_metadata_needs_the_scope_of_ratings(tmp_path: Path) -> None:
    async def scenario(light: Light) -> None:
        key = await key_with(light, "infer")
        body = {"messages": [{"role": "user", "content": "Hello"}], "store": True}
        answer = (await light.tcp.post(PATH, json=body, headers=key)).json()

        rating = {"metadata": {"edged.rating": "up"}}
        refused = await light.tcp.post(f"{PATH}/{answer['id']}", json=rating, headers=key)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "missing_scope")
        assert light.book.rows == []
        marked = await light.tcp.post(f"{PATH}/{answer['id']}", json={"metadata": {"a": "b"}}, headers=key)
        assert marked.json()["metadata"] == {"a": "b"}

    with_light(tmp_path, scenario)


def test_a_rating_in_the_metadata_is_a_rating_once(tmp_path: Path) -> None:
    async def scenario(light: Light) -> None:
        answer = await light.ask(store=True)
        for text in ("0.5", "0.5", "down", "down"):
            body = {"metadata": {"edged.rating": text, "seen": "yes"}}
            changed = await light.unix.post(f"{PATH}/{answer['id']}", json=body)
            assert changed.json()["metadata"] == body["metadata"]
        assert [(row.rating, row.source) for row in light.book.rows] == [(0.5, "metadata"), (-1.0, "metadata")]

    with_light(tmp_path, scenario)


def test_of_several_choices_the_metadata_rates_none(tmp_path: Path) -> None:
    async def scenario(light: Light) -> None:
        answer = await light.ask(store=True, n=2)
        refused = await light.unix.post(f"{PATH}/{answer['id']}", json={"metadata": {"edged.rating": "1"}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "metadata.edged.rating")
        assert light.book.rows == []

    with_light(tmp_path, scenario)


def test_what_still_runs_is_not_listed_and_cannot_be_changed(tmp_path: Path) -> None:
    async def scenario(light: Light) -> None:
        answer = await light.ask(store=True)
        light.answers.running.add(answer["id"])
        assert (await light.unix.get(PATH)).json()["data"] == []
        for method in ("GET", "DELETE"):
            assert (await light.unix.request(method, f"{PATH}/{answer['id']}")).status_code == 409

    with_light(tmp_path, scenario)


def test_a_choice_that_calls_tools_has_its_calls_and_their_reason(tmp_path: Path) -> None:
    async def scenario(light: Light) -> None:
        await light.ask(store=True)
        call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        shown = ShownCalls(text="", calls=(call,))
        choice = choice_object(StoredChoice(episode=light.book.episodes[0], shown=shown))
        assert (choice["message"]["content"], choice["message"]["tool_calls"]) == (None, [call])
        assert choice["finish_reason"] == "tool_calls"

    with_light(tmp_path, scenario)


@pytest.mark.parametrize("text", ["1.5", "nan", "", "good", "-1.01", "1e999"])
def test_a_rating_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(Refused) as caught:
        MetadataRequest.of_json(json.dumps({"metadata": {"edged.rating": text}}).encode())
    assert (caught.value.status, caught.value.param) == (400, "metadata.edged.rating")


def test_other_words_to_this_server_are_refused() -> None:
    with pytest.raises(Refused) as caught:
        MetadataRequest.of_json(b'{"metadata": {"edged.ratting": "1"}}')
    assert caught.value.param == "metadata.edged.ratting"


@pytest.mark.parametrize(("body", "metadata"), [(b'{"metadata": null}', {}), (b'{"metadata": {"a": "b"}}', {"a": "b"})])
def test_null_is_no_metadata(body: bytes, metadata: dict[str, str]) -> None:
    assert MetadataRequest.of_json(body).metadata == metadata


def test_metadata_must_be_said() -> None:
    with pytest.raises(Refused) as caught:
        MetadataRequest.of_json(b"{}")
    assert (caught.value.code, caught.value.param) == ("missing_required_parameter", "metadata")


def test_the_filter_is_written_as_the_official_client_writes_it() -> None:
    query = [("metadata[a]", "1"), ("metadata[b]c]", "2"), ("metadata", "3"), ("limit", "4")]

    assert metadata_asked(query) == {"a": "1", "b]c": "2"}


def test_pages_of_messages() -> None:
    items: list[dict[str, Any]] = [{"id": str(number)} for number in range(3)]

    assert page_of(items, None, 2) == (items[:2], True)
    assert page_of(items, "1", 2) == (items[2:], False)
    with pytest.raises(Refused):
        page_of(items, "7", 2)
