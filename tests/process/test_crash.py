"""kill -9 at the worst moments: what was acknowledged is there, nothing twice, and the last good adapter serves."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.load import Load, check_nothing_lost

KILLS = 40


def rests(daemon: Any) -> bool:
    """Whether no update runs or is about to: two looks, since a daemon that just started has not looked itself yet."""
    before = daemon.status()["learner"]
    time.sleep(0.5)
    after = daemon.status()["learner"]
    return (
        before["updates_total"] == after["updates_total"]
        and {before["state"], after["state"]} <= {"idle", "collecting", "waiting_for_contrast"}
        and not list((daemon.state / "spool").iterdir())
    )


def check_serves_the_last_good_adapter(daemon: Any) -> None:
    daemon.until(lambda: rests(daemon))
    listed = daemon.client.get("/v1/adapters").json()
    live = listed["live"]["version"]
    published = {row["version"]: row for row in listed["data"]}
    assert published[live]["state"] == "published"
    assert daemon.chat()["system_fingerprint"].endswith(f"-v{live}")
    if live:
        assert (daemon.state / "CURRENT").read_text().strip().startswith(f"v{live}-")
        assert (daemon.state / "adapters" / (daemon.state / "CURRENT").read_text().strip()).is_dir()


@pytest.mark.timeout(1200)
def test_forty_kills_under_rating_load_lose_nothing_and_double_nothing(start_light: Any) -> None:
    chance = random.Random(7)
    acknowledged: list[str] = []
    episodes: list[str] = []
    for kill in range(KILLS):
        daemon = start_light(settings={"learn.batch_ratings": 8, "learn.max_attempts": 100})
        with Load(daemon.state / "edged.sock", kill) as load:
            time.sleep(chance.uniform(0.0, 0.6))
            daemon.process.kill()
            daemon.process.wait()
        acknowledged += load.acknowledged
        episodes += load.episodes
    daemon = start_light(settings={"learn.batch_ratings": 8, "learn.max_attempts": 100})
    assert len(acknowledged) > KILLS
    check_nothing_lost(daemon, acknowledged, episodes[-50:])
    check_serves_the_last_good_adapter(daemon)
    assert daemon.status()["learner"]["updates_total"] > 0
    assert not list((daemon.state / "spool").iterdir())


def test_the_trainer_killed_in_the_middle_costs_an_attempt_and_no_answer(start_light: Any) -> None:
    daemon = start_light(settings={"learn.batch_ratings": 4}, environment={"EDGED_LIGHT_TRAIN_S": "1.5"})
    daemon.rate_some(4)
    pid = daemon.until(lambda: daemon.status()["learner"]["state"] == "training" and daemon.worker_pid("train"))
    signal_process(pid)
    for _ in range(20):
        assert daemon.chat()["choices"][0]["finish_reason"] in ("stop", "length")
    daemon.until(lambda: daemon.status()["learner"]["updates_total"] == 1)
    assert daemon.status()["learner"]["last_update"]["verdict"] == "published"
    assert daemon.chat()["system_fingerprint"].endswith("-v1")


@pytest.mark.parametrize("choices", [1, 6])
def test_a_serve_worker_killed_under_load_costs_no_answer_that_showed_nothing_yet(
    start_light: Any, choices: int
) -> None:
    daemon = start_light(environment={"EDGED_LIGHT_TOKEN_S": "0.02"})
    answers: list[tuple[int, int]] = []

    def ask() -> None:
        body = {"model": "default", "messages": [{"role": "user", "content": "hello"}], "n": choices}
        for _ in range(10):
            answer = daemon.client.post("/v1/chat/completions", json=body)
            answers.append((answer.status_code, len(answer.json().get("choices", ()))))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        time.sleep(0.3)
        signal_process(daemon.until(lambda: daemon.worker_pid("serve")))
    for thread in threads:
        thread.join()
    assert answers == [(200, choices)] * 40
    assert daemon.status()["serve"]["rerun_total"] > 0
    assert daemon.status()["store"]["episodes"] == 40 * choices


@pytest.mark.parametrize("point", ["train:begin", "train:before_rename", "train:after_rename", "stage:begin"])
def test_a_worker_that_crashes_once_at_any_point_of_an_update_does_not_stop_it(
    start_light: Any, point: str, tmp_path: Path
) -> None:
    environment = {"EDGED_LIGHT_CRASH": point, "EDGED_LIGHT_CRASH_ONCE": str(tmp_path / "crashed")}
    daemon = start_light(settings={"learn.batch_ratings": 4}, environment=environment)
    daemon.rate_some(4)
    daemon.until(lambda: daemon.status()["learner"]["updates_total"] == 1)
    assert (tmp_path / "crashed").exists()
    assert daemon.status()["learner"]["last_update"]["verdict"] == "published"
    check_serves_the_last_good_adapter(daemon)


def test_a_trainer_that_crashes_every_time_puts_the_update_off_and_its_ratings_are_learned_from_later(
    start_light: Any,
) -> None:
    settings = {"learn.batch_ratings": 4, "learn.max_attempts": 2}
    daemon = start_light(settings=settings, environment={"EDGED_LIGHT_CRASH": "train:begin"})
    daemon.rate_some(4)
    daemon.until(lambda: daemon.status()["learner"]["updates_total"] == 1)
    last = daemon.status()["learner"]["last_update"]
    assert last["verdict"] == "skipped"
    assert "died" in last["reason"]
    daemon.until(lambda: daemon.status()["learner"]["state"] == "paused")
    learner = daemon.status()["learner"]
    assert learner["ratings_until_update"] == 0
    assert learner["alarms"][0].startswith("the trainer died 2 times")
    assert daemon.chat()["system_fingerprint"].endswith("-v0")
    assert daemon.stop() == 0
    again = start_light(settings=settings)
    again.until(lambda: again.status()["learner"]["updates_total"] == 2)
    assert again.status()["learner"]["last_update"]["verdict"] == "published"
    again.until(lambda: again.status()["learner"]["alarms"] == [])


def test_a_full_disk_puts_an_update_off_and_uses_no_rating(start_light: Any, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.touch()
    settings = {"learn.batch_ratings": 4, "learn.max_attempts": 2}
    daemon = start_light(settings=settings, environment={"EDGED_LIGHT_DISK_FULL": str(full)})
    daemon.rate_some(4)
    daemon.until(lambda: daemon.status()["learner"]["updates_total"] == 1)
    daemon.until(lambda: daemon.status()["learner"]["state"] == "paused")
    learner = daemon.status()["learner"]
    assert learner["last_update"]["verdict"] == "skipped"
    assert "is the disk full?" in learner["why"]
    assert learner["ratings_until_update"] == 0
    full.unlink()
    assert daemon.client.post("/v1/train").json()["accepted"]
    daemon.until(lambda: daemon.status()["learner"]["updates_total"] == 2)
    assert daemon.status()["learner"]["last_update"]["verdict"] == "published"
    check_serves_the_last_good_adapter(daemon)


def signal_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
