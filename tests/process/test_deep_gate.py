"""The deep gate in a whole daemon: everything is real but the model."""

from __future__ import annotations

from typing import Any


def learn(daemon: Any) -> None:
    """Rate enough for an update."""
    for number in range(16):
        daemon.rate(daemon.chat(f"Question {number}?")["id"], 1.0 if number % 2 else -1.0)


def deep(daemon: Any) -> dict[str, Any]:
    return dict(daemon.status()["adapter"]["deep_gate"])


def test_a_version_that_went_live_is_looked_at_in_the_background_and_its_verdict_is_shown(start_light: Any) -> None:
    daemon = start_light()
    learn(daemon)
    daemon.until(lambda: deep(daemon)["verdict"] is not None)
    verdict = deep(daemon)["verdict"]
    assert (verdict["verdict"], verdict["against"]) == ("passed", 0), verdict
    adapter = daemon.client.get("/v1/adapters/1").json()
    assert adapter["deep"] == verdict
    assert adapter["metrics"]["deep/prompts"] == 8.0
    assert daemon.client.get("/v1/adapters/9").status_code == 404
    assert daemon.status()["store"]["episodes"] == 16
    assert daemon.chat("Why?")["choices"][0]["message"]["content"]
    assert daemon.stop() == 0


def test_a_version_that_stammers_is_rolled_back_and_the_next_answers_are_of_the_one_before(start_light: Any) -> None:
    daemon = start_light(environment={"EDGED_LIGHT_STAMMERS": "1"})
    learn(daemon)
    daemon.until(lambda: daemon.status()["adapter"]["why"] == "rolled_back")
    daemon.until(lambda: (daemon.client.get("/v1/adapters/1").json()["deep"] or {}).get("rolled_back_to") == 0)
    verdict = daemon.client.get("/v1/adapters/1").json()["deep"]
    assert (verdict["verdict"], verdict["kept_why"]) == ("refused", "")
    assert daemon.status()["adapter"]["version"] == 0
    newest = daemon.client.get("/v1/audit").json()["data"][0]
    assert (newest["action"], newest["caller"]) == ("rollback", "deep gate")
    assert daemon.stop() == 0
