from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from edged.api.access import check_host, check_origin
from edged.records import Caller, Scope
from edged.refusal import Refused
from tests.edged.api.light_server import HELLO, Light, serving

ROOT = Caller(name="uid:0", scopes=frozenset())


async def make_key(light: Light, *scopes: Scope) -> dict[str, str]:
    _, secret = await light.keys.create("app", frozenset(scopes), caller=ROOT)
    return {"authorization": f"Bearer {secret}"}


def test_over_the_unix_socket_the_caller_is_the_peers_user(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            await make_key(light, "infer")
            await light.ask()
            await light.unix.post("/v1/train")

            assert light.answers.asked[0].caller.name == f"uid:{os.getuid()}"
            assert light.control.audits[0].caller == f"uid:{os.getuid()}"

    asyncio.run(run())


def test_loopback_is_open_until_a_key_exists(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            assert (await light.tcp.get("/v1/status")).status_code == 200
            with_any = {"authorization": "Bearer whatever"}
            assert (await light.tcp.post("/v1/train", headers=with_any)).status_code == 200
            await make_key(light, "infer")
            refused = await light.tcp.get("/v1/status")
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"]["code"] == "missing_api_key"
            wrong = await light.tcp.get("/v1/status", headers=with_any)
            assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "invalid_api_key")

    asyncio.run(run())


def test_a_revoked_key_is_no_key(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            old = await make_key(light, "infer")
            await make_key(light, "infer")
            assert (await light.tcp.get("/v1/status", headers=old)).status_code == 200
            await light.unix.delete("/v1/keys/key-0")
            assert (await light.tcp.get("/v1/status", headers=old)).status_code == 401

    asyncio.run(run())


ROUTES: list[tuple[str, str, Any, Scope | None]] = [
    ("POST", "/v1/chat/completions", HELLO, "infer"),
    ("POST", "/v1/completions", {"prompt": "x"}, "infer"),
    ("POST", "/v1/feedback", {"completion_id": "x", "rating": 1}, "feedback"),
    ("POST", "/v1/feedback/batch", {}, "feedback"),
    ("GET", "/v1/feedback", None, "feedback"),
    ("POST", "/v1/preferences", {"messages": HELLO["messages"], "chosen": "a", "rejected": "b"}, "feedback"),
    ("GET", "/v1/models", None, None),
    ("GET", "/v1/status", None, None),
    ("GET", "/v1/updates", None, None),
    ("GET", "/v1/adapters", None, None),
    ("GET", "/metrics", None, None),
    ("POST", "/v1/adapters/1/promote", {}, "admin"),
    ("POST", "/v1/adapters/rollback", {}, "admin"),
    ("POST", "/v1/adapters/1/pin", {}, "admin"),
    ("POST", "/v1/adapters/1/keep", {}, "admin"),
    ("POST", "/v1/adapters/import", {"folder": "/x"}, "admin"),
    ("GET", "/v1/adapters/1/export", None, "admin"),
    ("POST", "/v1/train", {}, "admin"),
    ("POST", "/v1/pause", {}, "admin"),
    ("POST", "/v1/resume", {}, "admin"),
    ("GET", "/v1/episodes", None, "admin"),
    ("DELETE", "/v1/users/anna", None, "admin"),
    ("GET", "/v1/audit", None, "admin"),
    ("GET", "/v1/keys", None, "admin"),
    ("POST", "/v1/keys", {"name": "n", "scopes": ["infer"]}, "admin"),
    ("DELETE", "/v1/keys/key-9", None, "admin"),
]


def test_every_route_needs_its_scope_and_no_other(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            every: tuple[Scope, ...] = ("infer", "feedback", "admin")
            keys = {scope: await make_key(light, scope) for scope in every}
            for method, path, body, needed in ROUTES:
                assert (await light.tcp.request(method, path, json=body)).status_code == 401, path
                for scope, headers in keys.items():
                    answer = await light.tcp.request(method, path, json=body, headers=headers)
                    may = needed is None or scope == needed
                    assert (answer.status_code not in (401, 403)) == may, (method, path, scope, answer.text)

    asyncio.run(run())


def test_the_page_and_the_probes_need_no_key(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            await make_key(light, "infer")
            for path in ("/", "/page/page.js", "/healthz", "/readyz", "/openapi.json"):
                assert (await light.tcp.get(path)).status_code == 200, path

    asyncio.run(run())


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8437", "localhost.evil.example", "127.0.0.1.nip.io", ""]
)
def test_a_name_that_could_be_rebound_is_refused(host: str) -> None:
    with pytest.raises(Refused) as caught:
        check_host(host, [])
    assert (caught.value.status, caught.value.code) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8437", "app.localhost", "127.0.0.1:1", "[::1]:8437", "192.168.1.20", "Box.lan:80"]
)
def test_addresses_localhost_and_listed_names_are_served(host: str) -> None:
    check_host(host, ["box.lan"])


def test_a_rebound_host_reaches_nothing_over_tcp_and_anything_over_unix(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            for path in ("/", "/healthz", "/v1/status"):
                answer = await light.tcp.get(path, headers={"host": "evil.example"})
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
            assert (await light.unix.get("/v1/status", headers={"host": "anything"})).status_code == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://127.0.0.1:8437", "127.0.0.1:8437"),
        ("https://box.lan", "box.lan"),
        ("http://localhost", "localhost:80"),
        ("http://[::1]:8437", "[::1]:8437"),
    ],
)
def test_a_page_of_this_server_may_use_it(origin: str, host: str) -> None:
    check_origin("POST", Headers({"origin": origin, "host": host, "sec-fetch-site": "same-origin"}))


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:8437.evil.example"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_a_page_of_another_origin_may_not(headers: dict[str, str]) -> None:
    with pytest.raises(Refused) as caught:
        check_origin("POST", Headers({"host": "127.0.0.1:8437", **headers}))
    assert (caught.value.status, caught.value.code) == (403, "origin_not_allowed")


def test_a_link_from_another_site_may_open_the_page() -> None:
    check_origin("GET", Headers({"host": "127.0.0.1:8437", "sec-fetch-site": "cross-site"}))


def test_a_cross_site_post_changes_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            answer = await light.tcp.post(
                "/v1/chat/completions", json=HELLO, headers={"origin": "https://evil.example"}
            )
            assert answer.status_code == 403
            assert not light.answers.asked

    asyncio.run(run())
