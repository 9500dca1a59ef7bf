"""Every route of the OpenAPI document with requests drawn from it, against a real daemon with the light workers.

Whatever comes, there is an answer, it is no server error, and a refusal has OpenAI's shape. In the end the daemon is as
well as before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edged.api.app import build_app
from edged.settings import ApiSection
from tests.edged.api.light_ports import Book, Completions, Episodes, LightAnswers, LightControl, LightKeys
from tests.process.requests_from_schema import Drawn, Operation, operations, requests

ANSWER_WITHIN_S = 60.0  # a guard against hanging
READ_MAX_BYTES = 2**18  # of an answer: the stream of events has no end
ENDLESS = "/v1/events"
EXPECTED = {200, 201, 400, 401, 403, 404, 405, 409, 413, 429}
ERROR = {"message", "type", "param", "code"}


def document() -> dict[str, Any]:
    book = Book()
    app = build_app(
        answers=LightAnswers(book),
        feedback=book,
        episodes=Episodes(book),
        completions=Completions(book),
        control=LightControl(),
        keys=LightKeys(),
        settings=ApiSection(),
    )
    return app.openapi()


OPERATIONS = operations(document())


class Sender:
    """Sends what was drawn, with ids of things that are there in the place of their names."""

    def __init__(self, daemon: Any) -> None:
        self._client = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(daemon.state / "edged.sock")),
            base_url="http://edged",
            timeout=ANSWER_WITHIN_S,
        )
        self._real = {"$completion": "none", "$feedback": "none", "$user": "ann"}

    def close(self) -> None:
        self._client.close()

    def renew(self) -> None:
        """Make a stored answer and a rating of it, since others may have been removed."""
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "store": True, "user": "ann"}
        answer = self._client.post("/v1/chat/completions", json=body).raise_for_status().json()
        rating = {"completion_id": answer["id"], "rating": 1}
        rated = self._client.post("/v1/feedback", json=rating).raise_for_status().json()
        self._real |= {"$completion": answer["id"], "$feedback": rated["id"]}

    def send(self, drawn: Drawn) -> tuple[int, httpx.Headers, bytes]:
        url, content = drawn.url, drawn.content
        for name, real in self._real.items():
            url = url.replace(name, real)
            content = content and content.replace(name.encode(), real.encode())
        with self._client.stream(drawn.method, url, headers=drawn.headers, content=content) as answer:
            if url.partition("?")[0] == ENDLESS and answer.status_code == 200:
                return answer.status_code, answer.headers, b""
            read = b""
            for piece in answer.iter_raw():
                read += piece
                if len(read) > READ_MAX_BYTES:
                    break
            return answer.status_code, answer.headers, read


@pytest.fixture(scope="module")
def sender(tmp_path_factory: pytest.TempPathFactory, daemon_class: Any) -> Iterator[Sender]:
    state = tmp_path_factory.mktemp("fuzz")
    command = [sys.executable, str(Path(__file__).parent / "run_light.py"), str(state)]
    daemon = daemon_class(command, state, {}, ())
    try:
        sending = Sender(daemon.until_ready())
        yield sending
        sending.close()
        daemon.client.post("/v1/resume").raise_for_status()
        assert daemon.chat()["choices"][0]["message"]["content"]
        assert "Traceback" not in daemon.log.read_text()
        assert daemon.stop() == 0
    finally:
        daemon.end()


def holds(sender: Sender, operation: Operation, n: int) -> Callable[[], None]:
    """The property for one operation, to be called."""
    sender.renew()

    @settings(max_examples=n, deadline=None, suppress_health_check=list(HealthCheck))
    @given(drawn=st.deferred(lambda: requests(operation)))
    def every_request_is_answered(drawn: Drawn) -> None:
        status, headers, body = sender.send(drawn)
        assert status in EXPECTED, (status, drawn, body[:1000])
        if status >= 400 and drawn.method != "HEAD":
            assert headers["content-type"] == "application/json"
            error = httpx.Response(status, content=body).json()["error"]
            assert set(error) == ERROR, error
            assert error["code"], error
        if status == 429:
            assert int(headers["retry-after"]) >= 1

    return every_request_is_answered


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_whatever_is_sent_to_a_route_is_answered(sender: Sender, operation: Operation) -> None:
    holds(sender, operation, 50)()


@pytest.mark.full
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_whatever_is_sent_to_a_route_is_answered_a_thousand_times(sender: Sender, operation: Operation) -> None:
    holds(sender, operation, 1000)()
