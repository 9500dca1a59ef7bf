from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from edged.api import control as control_module
from edged.records import Caller
from tests.edged.api.light_ports import an_update
from tests.edged.api.light_server import HANG_S, Light, serving


def test_status_is_what_the_daemon_says(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            assert (await light.unix.get("/v1/status")).json() == light.control.status()

    asyncio.run(run())


def test_updates_come_newest_first_and_count_their_ratings(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            light.control.update_rows.append(
                an_update(4, verdict="refused", reason="too far", replay_episode_ids=(1, 2))
            )
            data = (await light.unix.get("/v1/updates", params={"limit": 2})).json()["data"]

            assert [update["id"] for update in data] == [4, 3]
            assert data[0]["reason"] == "too far"
            assert (data[0]["ratings"], data[0]["replayed"]) == (16, 2)
            assert "new_episode_ids" not in data[0]

    asyncio.run(run())


def test_train_pause_and_resume_reach_the_learner(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            assert (await light.unix.post("/v1/train")).json() == {
                "accepted": False,
                "reason": "there are no new ratings",
            }
            assert (await light.unix.post("/v1/pause")).json() == {"paused": True}
            assert light.control.learner["state"] == "paused"
            assert (await light.unix.post("/v1/resume", json={})).json() == {"paused": False}

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/train", "/v1/pause", "/v1/resume"])
def test_a_switch_takes_no_body_that_means_something_else(tmp_path: Path, path: str) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            broken = await light.unix.post(path, content=b"{nonsense")
            assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
            meant = await light.unix.post(path, json={"if_live": 3})
            assert (meant.status_code, meant.json()["error"]["param"]) == (400, "if_live")

    asyncio.run(run())


def test_episodes_carry_the_feedback_that_counts(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            first = await light.ask(user="anna", metadata={"shop": "7"})
            await light.ask(n=2)
            await light.unix.post("/v1/feedback", json={"completion_id": first["id"], "rating": -0.5})
            page = (await light.unix.get("/v1/episodes", params={"limit": 2})).json()
            rest = (await light.unix.get("/v1/episodes", params={"after": page["data"][-1]["id"]})).json()
            rated = (await light.unix.get("/v1/episodes", params={"rated": "true"})).json()
            of_v9 = (await light.unix.get("/v1/episodes", params={"version": 9})).json()

            assert (len(page["data"]), page["has_more"]) == (2, True)
            assert (len(rest["data"]), rest["has_more"]) == (1, False)
            assert of_v9["data"] == []
            (episode,) = rated["data"]
            assert episode["completion_id"] == first["id"]
            assert episode["feedback"]["rating"] == -0.5
            assert (episode["user"], episode["metadata"]) == ("anna", {"shop": "7"})
            assert (episode["prompt_tokens"], episode["completion_tokens"]) == (3, 2)
            assert episode["score"]["kl"] == 0.01
            assert "completion_ids" not in episode

    asyncio.run(run())


def test_a_user_is_forgotten(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            await light.ask(user="anna b/c")
            await light.ask(user="bert")
            gone = await light.unix.delete("/v1/users/anna%20b%2Fc")
            assert gone.json() == {"user": "anna b/c", "deleted": True, "episodes": 1}
            assert [episode.user for episode in light.book.episodes] == ["bert"]

    asyncio.run(run())


def test_a_key_is_shown_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            made = await light.unix.post("/v1/keys", json={"name": "app", "scopes": ["infer", "infer", "feedback"]})
            assert made.status_code == 201
            secret = made.json()["secret"]
            listed = await light.unix.get("/v1/keys")
            assert secret not in listed.text
            assert listed.json()["data"][0]["scopes"] == ["feedback", "infer"]
            revoked = await light.unix.delete(f"/v1/keys/{made.json()['id']}")
            assert revoked.json()["revoked_at"] is not None
            assert (await light.unix.delete("/v1/keys/none")).status_code == 404
            for bad in (
                {"name": "a b", "scopes": ["infer"]},
                {"name": "a", "scopes": []},
                {"name": "a", "scopes": ["x"]},
            ):
                assert (await light.unix.post("/v1/keys", json=bad)).status_code == 400

    asyncio.run(run())


def test_the_audit_says_who_did_what(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            await light.unix.post("/v1/adapters/1/promote")
            (entry,) = (await light.unix.get("/v1/audit")).json()["data"]
            assert (entry["action"], entry["detail"]) == ("promoted", {"version": 1})

    asyncio.run(run())


def test_probes_tell_alive_from_ready(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            light.control.is_ready = False
            not_ready = await light.tcp.get("/readyz")
            assert (not_ready.status_code, not_ready.json()["reason"]) == (503, "the model is loading")
            assert (await light.tcp.get("/healthz")).status_code == 200
            light.control.is_ready = True
            assert (await light.tcp.get("/readyz")).status_code == 200
            assert (await light.tcp.head("/readyz")).status_code == 200

    asyncio.run(run())


def test_metrics_are_prometheus_text(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            answer = await light.tcp.get("/metrics")
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert "edged_updates_total 3" in answer.text

    asyncio.run(run())


def test_events_are_sent_as_they_happen(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light, light.unix.stream("GET", "/v1/events") as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == ": connected"
            await until_subscribed(light)
            light.control.publish("adapter", {"version": 4})
            seen = [await anext(lines) for _ in range(3)]
            assert seen == ["", "event: adapter", 'data: {"version":4}']

    asyncio.run(run())


def test_ratings_are_not_told_to_a_key_that_may_not_read_them(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            root = Caller(name="uid:0", scopes=frozenset())
            _, secret = await light.keys.create("app", frozenset({"infer"}), caller=root)
            headers = {"authorization": f"Bearer {secret}"}
            async with light.tcp.stream("GET", "/v1/events", headers=headers) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                await until_subscribed(light)
                light.control.publish("feedback", {"reason": "private"})
                light.control.publish("adapter", {"version": 4})
                assert [await anext(lines) for _ in range(2)] == ["", "event: adapter"]

    asyncio.run(run())


def test_silence_is_filled_with_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "HEARTBEAT_S", 0.02)

    async def run() -> None:
        async with serving(tmp_path) as light, light.unix.stream("GET", "/v1/events") as answer:
            lines = answer.aiter_lines()
            assert [await anext(lines) for _ in range(4)] == [": connected", "", ": still here", ""]

    asyncio.run(run())


def test_a_reader_of_events_that_leaves_is_forgotten(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            async with light.unix.stream("GET", "/v1/events") as answer:
                await anext(answer.aiter_lines())
                await until_subscribed(light)
            async with asyncio.timeout(HANG_S):
                while light.control.subscribers:
                    await asyncio.sleep(0.005)

    asyncio.run(run())


async def until_subscribed(light: Light) -> None:
    async with asyncio.timeout(HANG_S):
        while not light.control.subscribers:
            await asyncio.sleep(0.005)


def test_every_route_is_described_and_none_promises_422(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            document = (await light.unix.get("/openapi.json")).json()

        paths = document["paths"]
        for path in ("/v1/chat/completions", "/v1/feedback/batch", "/v1/adapters/{version}/pin", "/v1/events"):
            assert path in paths
        operations = [operation for methods in paths.values() for operation in methods.values()]
        assert all("422" not in operation["responses"] for operation in operations)
        schemas = document["components"]["schemas"]
        assert schemas["FeedbackRequest"]["properties"]["rating"]
        for reference in references(document):
            assert reference.removeprefix("#/components/schemas/") in schemas, reference

    asyncio.run(run())


def references(node: object) -> set[str]:
    if isinstance(node, dict):
        here = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return here.union(*(references(value) for value in node.values()))
    if isinstance(node, list):
        return set[str]().union(*(references(value) for value in node))
    return set()


def test_what_is_not_there_and_what_is_not_taken_have_the_usual_shape(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            missing = await light.unix.get("/v1/nothing")
            slash = await light.unix.get("/v1/status/")
            wrong = await light.unix.put("/v1/status")
            query = await light.unix.get("/v1/updates", params={"limit": "many"})
            path = await light.unix.post("/v1/adapters/-1/promote")

        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        assert (slash.status_code, slash.json()["error"]["code"]) == (404, "not_found")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET")
        assert (query.status_code, query.json()["error"]["param"]) == (400, "limit")
        assert (path.status_code, path.json()["error"]["param"]) == (400, "version")

    asyncio.run(run())
