"""The box rolls a version back by itself: what callers see of it, and what a kill at any point of it leaves."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import httpx
import pytest

# So many ratings make an update that those of the new version make none.
SETTINGS = {"learn.batch_ratings": 24, "watch.min_ratings": 12}


def publish_a_liked_parent(daemon: Any) -> None:
    """Version 1 is live, and the base before it was liked by 22 of 24."""
    for number in range(24):
        daemon.rate(daemon.chat(f"Question {number}?")["id"], 1.0 if number % 12 else -1.0)
    daemon.until(lambda: daemon.status()["adapter"]["serving"] == 1)


def dislike(daemon: Any, times: int) -> list[str]:
    """Answers of version 1, disliked; their completions' ids."""
    answers = [daemon.chat(f"Why {number}?") for number in range(times)]
    assert {answer["system_fingerprint"].rpartition("-v")[2] for answer in answers} == {"1"}
    for answer in answers:
        daemon.rate(answer["id"], -1.0)
    return [answer["id"] for answer in answers]


def check_rolled_back(daemon: Any) -> None:
    daemon.until(lambda: daemon.status()["adapter"]["serving"] == 0)
    adapter = daemon.status()["adapter"]
    assert (adapter["version"], adapter["why"], adapter["stage"]) == (0, "rolled_back", "kept")
    assert adapter["reason"].startswith("version 1 was rated -1.00 on average over 12 answers, version 0 0.83 over 24")
    daemon.until(lambda: daemon.status()["adapter"]["watch"]["rollbacks"] == 1)
    listed = daemon.client.get("/v1/adapters").json()
    rolled_back = listed["data"][1]
    assert (rolled_back["verdict"], rolled_back["verdict_reason"]) == ("rolled_back", adapter["reason"])
    assert [row["live"] for row in listed["data"]] == [True, False]
    assert (daemon.state / "CURRENT").read_text() == "base\n"
    assert daemon.chat()["system_fingerprint"].endswith("-v0")
    audit = daemon.client.get("/v1/audit").json()["data"]
    assert [(entry["caller"], entry["action"]) for entry in audit][:1] == [("watch", "rollback")]


def test_a_version_that_people_dislike_is_rolled_back_and_learning_goes_on_from_the_one_before(
    start_light: Any,
) -> None:
    daemon = start_light(settings=SETTINGS)
    publish_a_liked_parent(daemon)
    assert daemon.status()["adapter"]["stage"] == "watched"
    dislike(daemon, 12)
    check_rolled_back(daemon)
    for number in range(12):  # the ratings of version 1 make half of the next update
        daemon.rate(daemon.chat(f"And {number}?")["id"], 1.0)
    daemon.until(lambda: daemon.status()["learner"]["updates_total"] == 2)
    last = daemon.status()["learner"]["last_update"]
    assert (last["verdict"], last["version"], last["parent_version"]) == ("published", 2, 0)


@pytest.mark.parametrize(
    "death",
    [
        "before live",
        "after live",
        "before route",
        *(pytest.param(death, marks=pytest.mark.full) for death in ("before current", "after current", "after route")),
    ],
)
def test_a_daemon_that_is_killed_while_it_rolls_back_has_one_live_version_and_ends_on_the_good_one(
    start_light: Any, tmp_path: Path, death: str
) -> None:
    armed = tmp_path / "armed"
    environment = {"EDGED_TEST_DIE": death, "EDGED_TEST_DIE_WHILE": str(armed)}
    daemon = start_light(settings=SETTINGS, environment=environment)
    publish_a_liked_parent(daemon)
    answers = [daemon.chat(f"Why {number}?")["id"] for number in range(12)]
    for answer in answers[:-1]:
        daemon.rate(answer, -1.0)
    armed.touch()
    with contextlib.suppress(httpx.TransportError):
        daemon.rate(answers[-1], -1.0)
    assert daemon.process.wait(60) < 0
    armed.unlink()
    daemon = start_light(settings=SETTINGS)
    assert daemon.chat()["system_fingerprint"].endswith(f"-v{daemon.status()['adapter']['serving']}")
    daemon.until(lambda: daemon.status()["adapter"]["serving"] == 0)
    daemon.rate(answers[-1], -1.0)
    daemon.until(lambda: daemon.status()["adapter"]["watch"]["rollbacks"] == 1)
    adapter = daemon.status()["adapter"]
    assert (adapter["version"], adapter["why"]) == (0, "rolled_back")
    assert daemon.client.get("/v1/adapters").json()["data"][1]["verdict"] == "rolled_back"
    assert (daemon.state / "CURRENT").read_text() == "base\n"
