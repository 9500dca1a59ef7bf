"""One daemon a state folder: the lock, held by real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edged.system.lock import FolderLock, FolderLocked

OWNER = (
    "import sys, time\n"
    "from pathlib import Path\n"
    "from edged.system.lock import FolderLock\n"
    "lock = FolderLock(Path(sys.argv[1]))\n"
    "print('locked', flush=True)\n"
    "time.sleep(600)\n"
)


def start_owner(folder: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock of `folder`."""
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_second_process_gets_the_first_ones_pid_and_advice(tmp_path: Path) -> None:
    owner = start_owner(tmp_path)
    try:
        with pytest.raises(
            FolderLocked, match=f"is in use by process {owner.pid}; stop that daemon, or give"
        ) as caught:
            FolderLock(tmp_path)
    finally:
        end(owner)
    assert (caught.value.folder, caught.value.pid) == (tmp_path, owner.pid)


def test_a_killed_owner_frees_the_lock(tmp_path: Path) -> None:
    end(start_owner(tmp_path))
    with FolderLock(tmp_path):
        pass


def test_a_released_lock_can_be_taken_again(tmp_path: Path) -> None:
    with FolderLock(tmp_path), pytest.raises(FolderLocked):
        FolderLock(tmp_path)
    with FolderLock(tmp_path):
        pass


def test_a_refused_process_does_not_damage_the_owners_pid(tmp_path: Path) -> None:
    with FolderLock(tmp_path):
        before = (tmp_path / "lock").read_text()
        for _ in range(2):
            with pytest.raises(FolderLocked):
                FolderLock(tmp_path)
        assert (tmp_path / "lock").read_text() == before


def test_an_owner_whose_pid_cannot_be_read_is_another_process(tmp_path: Path) -> None:
    with FolderLock(tmp_path):
        (tmp_path / "lock").write_text("")
        with pytest.raises(FolderLocked, match="in use by another process"):
            FolderLock(tmp_path)


def test_a_folder_that_is_not_there_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FolderLock(tmp_path / "missing")
