"""A worker on a card leaves it while nobody asks, and nobody loses a request over it."""

from __future__ import annotations

from typing import Any

SETTINGS = {"placement.serve_device": "cuda", "placement.keep_warm_s": 1.0, "learn.batch_ratings": 4}


def state_of_server(daemon: Any) -> str:
    return str(next(worker["state"] for worker in daemon.status()["workers"] if worker["name"] == "serve"))


def test_the_serve_worker_sleeps_while_nobody_asks_and_answers_the_next_request(start_light: Any) -> None:
    daemon = start_light(settings=SETTINGS)
    daemon.until(lambda: state_of_server(daemon) == "stopped")
    assert daemon.client.get("/readyz").status_code == 200
    assert daemon.chat()["choices"][0]["message"]["content"]


def test_a_sleeping_server_wakes_for_an_update_and_for_an_operator(start_light: Any) -> None:
    daemon = start_light(settings=SETTINGS)
    rated = [daemon.chat(f"Question {n}?")["id"] for n in range(4)]
    daemon.until(lambda: state_of_server(daemon) == "stopped")
    for index, completion_id in enumerate(rated):
        daemon.rate(completion_id, 1.0 if index % 2 else -1.0)
    daemon.until(lambda: daemon.status()["learner"]["updates_total"] == 1)
    assert daemon.status()["learner"]["last_update"]["verdict"] == "published"
    daemon.until(lambda: state_of_server(daemon) == "stopped")
    assert daemon.client.post("/v1/adapters/0/promote", json={}).json()["version"] == 0
    assert daemon.chat()["system_fingerprint"].endswith("-v0")
