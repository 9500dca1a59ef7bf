"""New requests run on what is live, whatever happens to contexts, workers and files."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TRAINED = {"learn.batch_ratings": 4}


def publish(daemon: Any, count: int) -> None:
    """`count` updates, one after the other."""
    for number in range(1, count + 1):
        publish_one_more(daemon, number)


def publish_one_more(daemon: Any, number: int) -> None:
    daemon.rate_some(4)
    daemon.until(lambda: daemon.status()["learner"]["updates_total"] == number)
    assert daemon.status()["learner"]["last_update"]["verdict"] == "published"
    daemon.until(lambda: daemon.status()["adapter"]["serving"] == number)


def promote(daemon: Any, version: int) -> Any:
    return daemon.client.post(f"/v1/adapters/{version}/promote")


def version_of(answer: dict[str, Any]) -> int:
    return int(answer["system_fingerprint"].rpartition("-v")[2])


@contextlib.contextmanager
def a_long_answer(daemon: Any, hold: Path) -> Iterator[None]:
    """An answer that runs for as long as the block does."""
    hold.touch()
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(daemon.chat("Please hold.", max_tokens=16)))
    asking.start()
    try:
        daemon.until(lambda: daemon.status()["serve"]["active"])
        yield
    finally:
        hold.unlink()
        asking.join()
    assert answers[0]["choices"][0]["message"]["content"]


def test_a_version_that_waits_for_a_context_is_served_as_soon_as_the_context_is_free(
    start_light: Any, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    environment = {"EDGED_LIGHT_HOLD": str(hold), "EDGED_TEST_WAIT_S": "0.3"}
    daemon = start_light(settings=TRAINED, environment=environment)
    publish(daemon, 2)
    with a_long_answer(daemon, hold):
        assert promote(daemon, 1).status_code == 200  # resident: the long answer goes on with v2 and drains
        assert daemon.status()["adapter"]["serving"] == 1
        assert promote(daemon, 0).json()["version"] == 0
        adapter = daemon.status()["adapter"]
        assert (adapter["version"], adapter["serving"]) == (0, 1)
    daemon.until(lambda: daemon.status()["adapter"]["serving"] == 0)
    assert version_of(daemon.chat()) == 0


def test_a_candidate_waits_for_a_context_and_an_operator_does_not_wait_for_it(start_light: Any, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    environment = {"EDGED_LIGHT_HOLD": str(hold), "EDGED_TEST_WAIT_S": "0.3"}
    daemon = start_light(settings=TRAINED, environment=environment)
    publish(daemon, 2)
    rated = [daemon.chat(f"Question {n}?")["id"] for n in range(4)]
    with a_long_answer(daemon, hold):
        assert promote(daemon, 1).status_code == 200
        for index, completion_id in enumerate(rated):
            daemon.rate(completion_id, 1.0 if index % 2 else -1.0)
        daemon.until(lambda: daemon.status()["learner"]["state"] == "gating")
        assert promote(daemon, 2).status_code == 200  # between two attempts to prove the candidate
        assert version_of(daemon.chat(max_tokens=1)) == 2
    daemon.until(lambda: daemon.status()["learner"]["updates_total"] == 4)
    again, skipped = daemon.client.get("/v1/updates").json()["data"][:2]
    assert skipped["verdict"] == "skipped"
    assert skipped["reason"].startswith("version 2 is live, not 1")
    assert (again["verdict"], again["parent_version"]) == ("published", 2)
    assert again["ratings"] == skipped["ratings"] == 4


def folder_of(daemon: Any, version: int) -> Path:
    (folder,) = (daemon.state / "adapters").glob(f"v{version}-*")
    return Path(folder)


def move_away(folder: Path) -> None:
    folder.rename(folder.parent.parent / "elsewhere")


def cut_short(folder: Path) -> None:
    os.truncate(folder / "adapter.gguf", 100)


def flip_a_byte(folder: Path) -> None:
    data = bytearray((folder / "adapter.gguf").read_bytes())
    data[-1] ^= 1
    (folder / "adapter.gguf").write_bytes(data)


@pytest.mark.parametrize("damage", [move_away, cut_short, flip_a_byte])
def test_a_live_adapter_that_is_damaged_while_serving_is_rolled_back_when_the_worker_starts_again(
    start_light: Any, damage: Callable[[Path], None]
) -> None:
    daemon = start_light(settings=TRAINED)
    publish(daemon, 2)
    damage(folder_of(daemon, 2))
    os.kill(daemon.worker_pid("serve"), signal.SIGKILL)
    assert version_of(daemon.chat()) == 1
    adapter = daemon.status()["adapter"]
    assert (adapter["version"], adapter["why"], adapter["serving"]) == (1, "rolled_back", 1)
    assert (daemon.state / "CURRENT").read_text().startswith("v1-")
    daemon.rate_some(4)
    daemon.until(lambda: daemon.status()["learner"]["updates_total"] == 3)
    assert daemon.status()["learner"]["last_update"]["verdict"] == "published"


def test_a_live_adapter_that_the_engine_refuses_is_rolled_back_at_the_start_of_the_daemon(
    start_light: Any, tmp_path: Path
) -> None:
    daemon = start_light(settings=TRAINED)
    publish(daemon, 2)
    daemon.stop()
    daemon = start_light(settings=TRAINED, environment={"EDGED_LIGHT_REFUSES": "2"})
    assert version_of(daemon.chat()) == 1
    assert daemon.status()["adapter"]["why"] == "rolled_back"


def test_a_daemon_is_ready_only_while_its_serve_worker_is(start_light: Any, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    daemon = start_light(environment={"EDGED_LIGHT_CRASH": "serve:start", "EDGED_LIGHT_CRASH_WHILE": str(broken)})
    broken.touch()
    os.kill(daemon.worker_pid("serve"), signal.SIGKILL)
    daemon.until(lambda: daemon.client.get("/readyz").status_code == 503)
    broken.unlink()
    daemon.until(lambda: daemon.client.get("/readyz").status_code == 200)
    assert daemon.chat()["choices"]


def test_a_current_that_cannot_be_written_is_told_and_keeps_nothing_from_being_served(start_light: Any) -> None:
    daemon = start_light(settings=TRAINED)
    publish(daemon, 1)
    current = daemon.state / "CURRENT"
    current.unlink()
    (current / "in the way").mkdir(parents=True)
    publish_one_more(daemon, 2)
    (alarm,) = daemon.status()["learner"]["alarms"]
    assert "v2 is live, and CURRENT does not say so" in alarm
    (v1,) = (daemon.state / "adapters").glob("v1-*")
    imported = daemon.client.post("/v1/adapters/import", json={"folder": str(v1)})
    assert (imported.status_code, imported.json()["state"]) == (200, "published"), imported.text
    assert version_of(daemon.chat()) == 3
    assert promote(daemon, 1).status_code == 200
    assert version_of(daemon.chat()) == 1
    (current / "in the way").rmdir()
    current.rmdir()
    assert promote(daemon, 2).status_code == 200
    assert daemon.status()["learner"]["alarms"] == []
    assert current.read_text().startswith("v2-")
