"""After another base model and after a promotion back, ratings on what is served then are learned from."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

SETTINGS = {"learn.batch_ratings": 4, "learn.staleness": 1}


def learns(daemon: Any, *, live: int) -> None:
    """Four ratings of answers by v`live` make an update on top of it."""
    before = daemon.status()["learner"]["updates_total"]
    assert daemon.chat()["system_fingerprint"].endswith(f"-v{live}")
    daemon.rate_some(4)
    daemon.until(lambda: daemon.status()["learner"]["updates_total"] == before + 1)
    last = daemon.status()["learner"]["last_update"]
    assert (last["verdict"], last["parent_version"]) == ("published", live)
    assert set(daemon.status()["learner"]["dropped"]) <= {"other_base"}
    daemon.until(lambda: daemon.status()["adapter"]["serving"] == last["version"])


def other_model(model: Path, path: Path) -> Path:
    shutil.copyfile(model, path)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    return path


def test_ratings_of_what_is_served_count_after_another_base_model_and_after_a_promotion_back(
    start_light: Any, packaged_model: Path, tmp_path: Path
) -> None:
    daemon = start_light(settings=SETTINGS)
    for version in range(3):
        learns(daemon, live=version)
    daemon.rate_some(2)
    assert daemon.stop() == 0

    other = other_model(packaged_model, tmp_path / "other.gguf")
    foreign = start_light(settings=SETTINGS | {"model.path": str(other)})
    learns(foreign, live=0)
    learns(foreign, live=4)
    assert foreign.status()["learner"]["dropped"] == {"other_base": 2}
    assert foreign.stop() == 0

    back = start_light(settings=SETTINGS)
    back.rate_some(2)  # with the two that waited
    back.until(lambda: back.status()["learner"]["updates_total"] == 6)
    assert back.status()["learner"]["last_update"]["parent_version"] == 3
    assert back.client.post("/v1/adapters/1/promote", json={}).status_code == 200
    back.until(lambda: back.status()["adapter"]["serving"] == 1)
    learns(back, live=1)
