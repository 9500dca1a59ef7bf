"""Whatever is sent to whichever route: no 5xx and no 422, and every refusal has OpenAI's shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.edged.api.light_server import HANG_S, serving_in_thread

POSTS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/feedback",
    "/v1/feedback/batch",
    "/v1/preferences",
    "/v1/adapters/rollback",
    "/v1/adapters/1/promote",
    "/v1/adapters/1/pin",
    "/v1/adapters/1/keep",
    "/v1/adapters/import",
    "/v1/keys",
    "/v1/train",
    "/v1/pause",
    "/v1/resume",
]
FIELDS = [
    "messages", "prompt", "model", "n", "temperature", "stop", "stream", "stream_options", "metadata", "logprobs",
    "completion_id", "rating", "correction", "choice", "tags", "chosen", "rejected", "if_live", "pinned", "folder",
    "name", "scopes",
]  # fmt: skip

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.sampled_from(["up", "default"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "tool"]), "content": values}), max_size=2
)
objects = st.dictionaries(st.sampled_from(FIELDS), values | messages, max_size=5)
bodies = st.one_of(
    st.binary(max_size=60),
    (objects | values).map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass")),
)


def test_no_body_on_any_route_is_a_server_error_or_a_422(tmp_path: Path) -> None:
    with (
        serving_in_thread(tmp_path) as light,
        httpx.Client(
            transport=httpx.HTTPTransport(uds=str(light.socket)), base_url="http://edged", timeout=HANG_S
        ) as client,
    ):

        @settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(path=st.sampled_from(POSTS), body=bodies)
        def holds(path: str, body: bytes) -> None:
            answer = client.post(path, content=body)
            assert answer.status_code in (200, 201, 400, 404, 409, 413), (answer.status_code, answer.text)
            if answer.status_code >= 400:
                error: dict[str, Any] = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert error["code"]

        holds()
