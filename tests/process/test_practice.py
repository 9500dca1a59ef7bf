"""Practice in a whole daemon: the score worker and its judge are real, the model is light."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SETTINGS = {
    "reward.source": "function",
    "reward.function": "judges:short",
    "reward.function_folder": str(Path(__file__).parent),
    "reward.clip": 100.0,  # the light worker's answers are long: none is to be cut
    "learn.objectives": {"grpo": 1.0},
    "practice.idle_s": 0.2,
    "practice.round_prompts": 2,
    "practice.max_updates": 1,
}


def practice(daemon: Any) -> dict[str, Any]:
    return dict(daemon.status()["learner"]["practice"])


def test_an_idle_daemon_learns_from_its_judge_alone_and_waits_for_a_person_then(start_light: Any) -> None:
    daemon = start_light(settings=SETTINGS)
    assert (practice(daemon)["state"], daemon.worker_pid("score")) == ("waiting", None)
    asked = [daemon.chat(text, user="ann")["id"] for text in ("What is a cat?", "What is a dog?", "Why?")]
    daemon.until(lambda: practice(daemon)["state"] == "limit")
    seen = practice(daemon)
    assert (seen["rounds"], seen["answers"], seen["judged"], seen["updates"], seen["skipped"]) == (1, 8, 8, 1, {})
    assert seen["reasons"] == {}
    assert daemon.status()["adapter"]["version"] == 1
    (update,) = daemon.client.get("/v1/updates").json()["data"]
    assert (update["origin"], update["verdict"], update["ratings"], update["judged"]) == ("practice", "published", 0, 8)

    rows = daemon.client.get("/v1/episodes").json()["data"]
    assert [(row["completion_id"], row["origin"]) for row in rows] == [(name, "user") for name in asked]
    own = daemon.client.get("/v1/episodes", params={"origin": "practice"}).json()["data"]
    assert [(row["origin"], row["user"]) for row in own] == [("practice", None)] * 8
    assert daemon.status()["store"]["episodes"] == 3

    daemon.rate(asked[0], 1.0)
    daemon.until(lambda: practice(daemon)["rounds"] == 2)
    daemon.until(lambda: practice(daemon)["state"] == "limit")
    assert daemon.status()["adapter"]["version"] == 2
    assert daemon.client.delete("/v1/users/ann").json()["episodes"] == 3
    assert daemon.client.get("/v1/episodes", params={"origin": "practice"}).json()["data"] == []
    assert daemon.stop() == 0


def test_a_request_is_answered_while_the_box_practises_and_the_group_in_its_way_is_given_up(
    start_light: Any, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    daemon = start_light(settings=SETTINGS, environment={"EDGED_LIGHT_HOLD": str(hold)})
    daemon.chat("hold on")
    hold.touch()
    daemon.until(lambda: practice(daemon)["state"] == "sampling")
    assert daemon.chat("Why?")["choices"][0]["message"]["content"]
    daemon.until(lambda: practice(daemon)["state"] == "sampling")
    assert practice(daemon)["answers"] in (0, 4)  # of the other prompt
    hold.unlink()
    daemon.until(lambda: practice(daemon)["state"] == "limit")


def test_a_judge_that_cannot_start_stops_practice_with_its_reason_and_answers_go_on(start_light: Any) -> None:
    daemon = start_light(settings={**SETTINGS, "reward.function": "judges:missing"})
    daemon.chat("Why?")
    daemon.until(lambda: "has no attribute 'missing'" in practice(daemon)["why"])
    assert (practice(daemon)["state"], practice(daemon)["answers"]) == ("waiting", 0)
    assert daemon.chat("Why?")["choices"][0]["message"]["content"]
