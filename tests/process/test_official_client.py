"""The official client against a real daemon: every class of error that it has, provoked."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

HANG_S = 300.0
USER: openai.types.chat.ChatCompletionUserMessageParam = {"role": "user", "content": "Hello"}
HELD: openai.types.chat.ChatCompletionUserMessageParam = {"role": "user", "content": "hold this"}

Clients = Callable[..., openai.OpenAI]


@pytest.fixture
def clients() -> Iterator[Clients]:
    """clients(daemon): over its Unix socket; clients(daemon, key="..."): over TCP. Closed at the test's end."""
    with ExitStack() as opened:

        def make(daemon: Any, key: str | None = None) -> openai.OpenAI:
            if key is None:
                transport, base_url = httpx2.HTTPTransport(uds=str(daemon.state / "edged.sock")), "http://edged/v1"
            else:
                port = re.findall(r"listening on tcp:127\.0\.0\.1:(\d+)", daemon.log.read_text())[-1]
                transport, base_url = httpx2.HTTPTransport(), f"http://127.0.0.1:{port}/v1"
            http = opened.enter_context(httpx2.Client(transport=transport, timeout=HANG_S))
            return opened.enter_context(
                openai.OpenAI(base_url=base_url, api_key=key or "unused", http_client=http, max_retries=0)
            )

        yield make


def test_each_class_of_error_is_raised_for_what_it_means(start_light: Any, clients: Clients, tmp_path: Path) -> None:
    listen = [f"unix:{tmp_path / 'state' / 'edged.sock'}", "tcp:127.0.0.1:0"]
    daemon = start_light(settings={"api.listen": listen})
    client = clients(daemon)
    key = client.post("/keys", body={"name": "app", "scopes": ["infer"]}, cast_to=dict[str, Any])["secret"]

    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="default", messages=[USER], temperature=3)
    assert (wrong.value.param, wrong.value.code) == ("temperature", "invalid_value")

    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="default", messages=[{"role": "user", "content": "word " * 40_000}])
    assert (long.value.param, long.value.code) == ("messages", "context_length_exceeded")

    with pytest.raises(openai.AuthenticationError) as stranger:
        clients(daemon, key="wrong").models.list()
    assert stranger.value.code == "invalid_api_key"

    with pytest.raises(openai.PermissionDeniedError) as narrow:
        clients(daemon, key=key).post("/train", cast_to=object)
    assert narrow.value.code == "missing_scope"
    answer = clients(daemon, key=key).chat.completions.create(model="default", messages=[USER], max_tokens=4)

    with pytest.raises(openai.NotFoundError) as elsewhere:
        client.models.retrieve("gpt-4o")
    assert elsewhere.value.code == "model_not_found"

    options: Any = {"headers": {"Idempotency-Key": "once"}}
    client.post("/feedback", body={"completion_id": answer.id, "rating": 1}, cast_to=object, options=options)
    with pytest.raises(openai.ConflictError) as again:
        client.post("/feedback", body={"completion_id": answer.id, "rating": -1}, cast_to=object, options=options)
    assert again.value.code == "idempotency_conflict"

    with pytest.raises(openai.APIStatusError) as large:
        client.post("/feedback", body={"reason": "x" * 2**21}, cast_to=object)
    assert (large.value.status_code, large.value.code) == (413, "body_too_large")


def test_a_full_server_is_a_rate_limit_and_a_stopping_one_an_internal_error(
    start_light: Any, clients: Clients, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    daemon = start_light(
        settings={"serve.slots": 1, "serve.max_queue": 0, "api.drain_s": 0.5},
        environment={"EDGED_LIGHT_HOLD": str(hold)},
    )
    client = clients(daemon)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(clients(daemon).chat.completions.create, model="default", messages=[HELD])
        daemon.until(lambda: daemon.status()["serve"]["active"] == 1)

        with pytest.raises(openai.RateLimitError) as full:
            client.chat.completions.create(model="default", messages=[USER])
        assert full.value.code == "too_many_requests"
        assert int(full.value.response.headers["retry-after"]) >= 1

        daemon.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.InternalServerError) as stopping:
            held.result(HANG_S)
    assert (stopping.value.status_code, stopping.value.code) == (503, "shutting_down")
    assert daemon.process.wait(HANG_S) == 0


def test_stored_completions_are_found_marked_rated_and_removed(start_light: Any, clients: Clients) -> None:
    daemon = start_light()
    client = clients(daemon)
    completions = client.chat.completions
    kept = [
        completions.create(
            model="default",
            messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": f"Question {index}?"}],
            max_tokens=8,
            store=True,
            metadata={"shop": "north" if index else "south", "number": str(index)},
        )
        for index in range(3)
    ]
    completions.create(model="default", messages=[USER], max_tokens=8, metadata={"shop": "north"})
    with completions.create(model="default", messages=[USER], max_tokens=8, store=True, stream=True) as stream:
        streamed = {chunk.id for chunk in stream}
    ids = [answer.id for answer in kept] + sorted(streamed)

    assert [found.id for found in completions.list(limit=2)] == ids  # page by page
    assert [found.id for found in completions.list(order="desc", limit=3)] == ids[::-1]
    assert [found.id for found in completions.list(metadata={"shop": "north"})] == ids[1:3]
    assert [found.id for found in completions.list(model="default", after=ids[1])] == ids[2:]
    assert list(completions.list(model="gpt-4o")) == []

    found = completions.retrieve(ids[0])
    assert found.choices[0].message.content == kept[0].choices[0].message.content
    assert found.system_fingerprint == kept[0].system_fingerprint
    assert found.usage is not None
    assert kept[0].usage is not None
    assert found.usage.total_tokens == kept[0].usage.total_tokens
    assert found.metadata == {"shop": "south", "number": "0"}
    asked = list(completions.messages.list(ids[0], limit=1))
    assert [(message.role, message.content) for message in asked] == [
        ("system", "Be brief."),
        ("user", "Question 0?"),
    ]

    before = daemon.status()["learner"]["ratings_until_update"]
    assert completions.update(ids[0], metadata={"shop": "east", "edged.rating": "down"}).metadata == {
        "shop": "east",
        "edged.rating": "down",
    }
    daemon.until(lambda: daemon.status()["learner"]["ratings_until_update"] == before - 1)
    with pytest.raises(openai.BadRequestError):
        completions.update(ids[1], metadata={"edged.rating": "perfect"})
    assert completions.delete(ids[1]).deleted
    with pytest.raises(openai.NotFoundError) as gone:
        completions.retrieve(ids[1])
    assert gone.value.code == "completion_not_found"

    daemon.process.kill()  # what was answered 2xx is on disk
    daemon.process.wait(HANG_S)
    client = clients(start_light())
    left = list(client.chat.completions.list())
    assert [found.id for found in left] == [ids[0], *ids[2:]]
    assert left[0].metadata == {"shop": "east", "edged.rating": "down"}
    rows: Any = client.get("/feedback", cast_to=dict[str, Any])
    assert [(row["completion_id"], row["rating"], row["source"]) for row in rows["data"]] == [
        (ids[0], -1.0, "metadata")
    ]
