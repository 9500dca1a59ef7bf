"""Learning's files: nothing appears half-written, and a move that a crash cut off is finished by doing it again."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from adapters import store
from adapters.store import folder_name
from edged.learn.folders import CHECKPOINTS_KEPT, Folders, bytes_under
from engine import protocol
from tests import faults
from tests.edged.learn.conftest import PPO

JOBS = ("update-1", "update-2", "import-4")


InBox = Callable[[Callable[[Any], Awaitable[None]]], None]


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    made = Folders(tmp_path, "b" * 64)
    made.prepare([])
    return made


@pytest.fixture
def job() -> protocol.TrainJob:
    base = protocol.AdapterRef(version=0, folder=None)
    return protocol.TrainJob(
        job_id="update-1",
        version=1,
        parent=base,
        reference=base,
        checkpoint=None,
        episodes=(),
        probes=(),
        ppo=PPO,
        lora=protocol.LoraSettings(rank=2, alpha=4.0, layers=1),
        seed=5,
        threads=1,
        base_sha256="b" * 64,
    )


@pytest.fixture
def candidate(folders: Folders, in_box: InBox) -> Path:
    """The output of a trained update 1, version 1: adapter and checkpoint."""

    async def write(box: Any) -> None:
        folder = box.folders.job(1)
        folder.mkdir()
        update = type("Planned", (), {"id": 1, "version": 1, "parent_version": 0, "seed": 1})()
        box.write_out(folder, box.job(update))

    in_box(write)
    return folders.job(1) / protocol.OUT_FOLDER


def test_prepare_clears_what_a_crash_left_and_keeps_unfinished_jobs(tmp_path: Path) -> None:
    folders = Folders(tmp_path, "b" * 64)
    folders.prepare([])
    for name in (
        "adapters/v9-00000000.tmp",
        "checkpoints/v3.tmp",
        "spool/update-1",
        "spool/update-2",
        "spool/import-4",
        "cache",
        "cache/base-0011.tmp",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "CURRENT.tmp").touch()
    (tmp_path / "cache" / "base-0011.json").touch()
    folders.prepare([2])
    assert not (tmp_path / "CURRENT.tmp").exists()
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*"))
    assert left == ["cache/base-0011.json", "spool/update-2"]


def test_prepare_does_not_touch_published_files(folders: Folders, candidate: Path) -> None:
    folders.publish(candidate / "adapter", candidate / "checkpoint", 1)
    folders.prepare([])
    assert list(folders.versions()) == [1]
    assert folders.checkpoint(1) is not None


def test_a_job_comes_back_as_it_was_written(folders: Folders, job: protocol.TrainJob) -> None:
    assert folders.read_job(1) is None
    folders.write_job(1, job)
    assert folders.read_job(1) == job


def test_a_job_is_never_written_over(folders: Folders, job: protocol.TrainJob) -> None:
    folders.write_job(1, job)
    folders.write_job(1, dataclasses.replace(job, seed=6))
    assert folders.read_job(1) == job


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xc1", b"\x81\xa1x\x01", b"\x90\x00"])
def test_a_damaged_job_is_told_as_such(folders: Folders, job: protocol.TrainJob, data: bytes) -> None:
    folders.write_job(1, job)
    (folders.job(1) / protocol.JOB_FILE).write_bytes(data)
    with pytest.raises(protocol.WireError):
        folders.read_job(1)


def test_a_result_exists_once_its_folder_was_renamed(folders: Folders, candidate: Path) -> None:
    result = folders.result(1)
    assert result is not None
    assert result.version == 1
    candidate.rename(candidate.with_name("out.tmp"))
    assert folders.result(1) is None


@pytest.mark.parametrize("data", [b"", b"\x81\xa1x\x01"])
def test_a_damaged_result_is_told_as_such(folders: Folders, candidate: Path, data: bytes) -> None:
    (candidate / protocol.RESULT_FILE).write_bytes(data)
    with pytest.raises(protocol.WireError):
        folders.result(1)


def test_publishing_moves_adapter_and_training_state(folders: Folders, candidate: Path) -> None:
    name, sha256 = folders.publish(candidate / "adapter", candidate / "checkpoint", 1)
    assert name == folder_name(1, sha256)
    assert folders.versions() == {1: folders.adapters / name}
    assert (folders.checkpoints / "v1" / "critic.safetensors").read_bytes() == b"critic of v1"
    assert not (candidate / "adapter").exists()


def test_publishing_again_after_a_crash_before_the_training_state_moved_finishes_it(
    folders: Folders, candidate: Path
) -> None:
    published = folders.publish(candidate / "adapter", None, 1)
    assert folders.candidate(1, 1) == folders.adapters / published[0]
    assert folders.publish(folders.candidate(1, 1), candidate / "checkpoint", 1) == published
    assert folders.checkpoint(1) is not None


def test_publishing_again_after_everything_moved_changes_nothing(folders: Folders, candidate: Path) -> None:
    published = folders.publish(candidate / "adapter", candidate / "checkpoint", 1)
    assert folders.publish(folders.candidate(1, 1), candidate / "checkpoint", 1) == published
    assert folders.checkpoint(1) is not None


def test_half_a_training_state_is_replaced_by_the_whole_one(folders: Folders, candidate: Path) -> None:
    (folders.checkpoints / "v1").mkdir()
    folders.publish(candidate / "adapter", candidate / "checkpoint", 1)
    assert (folders.checkpoints / "v1" / "critic.safetensors").exists()


def test_killed_or_out_of_space_at_any_write_what_is_there_is_whole_and_doing_it_again_finishes_it(
    folders: Folders, candidate: Path, job: protocol.TrainJob, tmp_path: Path
) -> None:
    (tmp_path / "job.msgpack").write_bytes(msgpack.packb(protocol.to_map(job)))
    store.write_current(tmp_path, "v7-0a1b2c3d")
    template = tmp_path.rename(tmp_path.with_name(tmp_path.name + "-template"))
    command = [sys.executable, "-m", "tests.edged.learn.faulty_folders", str(template)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    ended = subprocess.run(command, check=True, timeout=300, env=environment, stdout=subprocess.PIPE, text=True)
    cases = json.loads(ended.stdout)
    assert {case["step"] for case in cases} == {"publish", "write_job", "write_current"}
    assert all(case["whole"] and case["finished"] for case in cases), cases
    assert all(case["code"] == -9 for case in cases if case["fault"] == "killed")
    refused = [case for case in cases if case["code"] == faults.REFUSED]
    assert {case["step"] for case in refused} == {"write_job"}, "the others write nothing that a full disk could refuse"
    assert all(case["old"] for case in refused)


def test_an_adapter_that_was_changed_after_training_is_not_published(folders: Folders, candidate: Path) -> None:
    (candidate / "adapter" / "adapter.gguf").write_bytes(b"other bytes")
    with pytest.raises(ValueError, match="not the bytes that were published"):
        folders.publish(candidate / "adapter", candidate / "checkpoint", 1)
    assert folders.versions() == {}


def test_a_candidate_lies_in_its_job_until_it_is_published(folders: Folders, candidate: Path) -> None:
    assert folders.candidate(1, 1) == candidate / "adapter"


def test_only_the_newest_training_states_are_kept(folders: Folders, candidate: Path) -> None:
    for version in range(7, 13):
        (folders.checkpoints / f"v{version}").mkdir()
    folders.publish(candidate / "adapter", candidate / "checkpoint", 1)
    kept = {path.name for path in folders.checkpoints.iterdir()}
    assert kept == {f"v{version}" for version in range(13 - CHECKPOINTS_KEPT, 13)}


def test_withdrawing_removes_adapter_and_training_state(folders: Folders, candidate: Path) -> None:
    folders.publish(candidate / "adapter", candidate / "checkpoint", 1)
    folders.withdraw(1)
    folders.withdraw(1)
    assert (folders.versions(), folders.checkpoint(1)) == ({}, None)
    assert list(folders.adapters.iterdir()) == []


def test_the_base_is_told_without_a_folder(folders: Folders, candidate: Path) -> None:
    name, _ = folders.publish(candidate / "adapter", None, 1)
    versions = folders.versions()
    assert folders.reference_to(0, versions) == protocol.AdapterRef(version=0, folder=None)
    assert folders.reference_to(1, versions).folder == str(folders.adapters / name)
    with pytest.raises(KeyError):
        folders.reference_to(2, versions)


def test_current_names_the_live_folder(folders: Folders, candidate: Path, tmp_path: Path) -> None:
    name, _ = folders.publish(candidate / "adapter", None, 1)
    folders.write_current(1)
    assert (tmp_path / "CURRENT").read_text() == f"{name}\n"
    folders.write_current(0)
    assert (tmp_path / "CURRENT").read_text() == "base\n"


def test_a_current_that_cannot_be_written_is_said_until_it_could_be(folders: Folders, tmp_path: Path) -> None:
    (tmp_path / "CURRENT" / "in the way").mkdir(parents=True)
    folders.write_current(0)
    assert "v0 is live, and CURRENT does not say so" in folders.current_trouble
    assert not (tmp_path / "CURRENT.tmp").exists()
    shutil.rmtree(tmp_path / "CURRENT")
    folders.write_current(0)
    assert (folders.current_trouble, (tmp_path / "CURRENT").read_text()) == ("", "base\n")


def test_bytes_of_all_files_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "one").write_bytes(b"x" * 10)
    (tmp_path / "a" / "b" / "two").write_bytes(b"x" * 5)
    assert bytes_under(tmp_path / "a") == 15
