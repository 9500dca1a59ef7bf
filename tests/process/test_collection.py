"""Old adapter versions go from the disk of a running daemon; a kill in the middle leaves no row without its files."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest

SETTINGS = {"learn.batch_ratings": 4, "learn.staleness": 0, "adapters.keep_versions": 0}


def publish(daemon: Any, count: int) -> None:
    """`count` updates, one after the other."""
    before = daemon.status()["learner"]["updates_total"]
    for number in range(before + 1, before + count + 1):
        daemon.rate_some(4)
        daemon.until(lambda expected=number: daemon.status()["learner"]["updates_total"] == expected)
        daemon.until(lambda expected=number: daemon.status()["adapter"]["serving"] == expected)


def on_disk(daemon: Any) -> set[int]:
    return {int(path.name[1:].split("-")[0]) for path in (daemon.state / "adapters").glob("v*-????????")}


def folders_that_rows_name(state: Path) -> set[str]:
    """Of a daemon that does not run."""
    with contextlib.closing(sqlite3.connect(state / "edged.db")) as database:
        return {name for (name,) in database.execute("SELECT folder FROM adapters WHERE folder IS NOT NULL")}


def check_rows_and_folders_agree(daemon: Any) -> None:
    rows = daemon.client.get("/v1/adapters").json()["data"]
    there = {row["version"] for row in rows if row["folder"] is not None}
    assert there == on_disk(daemon)
    assert {row["version"] for row in rows if row["collected_at"] is not None} == {
        row["version"] for row in rows if row["state"] == "published" and row["version"] and row["folder"] is None
    }


def test_old_versions_go_and_the_live_one_and_the_one_before_it_stay(start_light: Any) -> None:
    daemon = start_light(settings=SETTINGS)
    publish(daemon, 4)
    daemon.until(lambda: on_disk(daemon) == {3, 4})
    daemon.until(lambda: daemon.status()["adapters"]["collected"] == 2)
    check_rows_and_folders_agree(daemon)
    files = daemon.status()["adapters"]
    assert (files["on_disk"], files["why"]) == (2, "")
    assert daemon.client.post("/v1/adapters/2/promote").status_code == 409
    assert daemon.client.get("/v1/adapters/1/export").status_code == 409
    assert daemon.client.post("/v1/adapters/rollback").json()["version"] == 3


@pytest.mark.parametrize(
    "death",
    [
        "after collect",
        *(pytest.param(death, marks=pytest.mark.full) for death in ("before collect", "before remove", "after remove")),
    ],
)
def test_a_daemon_that_is_killed_while_it_collects_ends_with_rows_and_folders_that_agree(
    start_light: Any, tmp_path: Path, death: str
) -> None:
    armed = tmp_path / "armed"
    environment = {"EDGED_TEST_DIE": death, "EDGED_TEST_DIE_WHILE": str(armed)}
    daemon = start_light(settings=SETTINGS, environment=environment)
    publish(daemon, 2)
    armed.touch()
    with contextlib.suppress(httpx.TransportError):
        daemon.rate_some(4)
    assert daemon.process.wait(60) < 0
    armed.unlink()
    assert all((daemon.state / "adapters" / name).is_dir() for name in folders_that_rows_name(daemon.state))
    daemon = start_light(settings=SETTINGS)
    daemon.until(lambda: on_disk(daemon) == {2, 3})
    check_rows_and_folders_agree(daemon)
    assert daemon.chat()["system_fingerprint"].endswith("-v3")
