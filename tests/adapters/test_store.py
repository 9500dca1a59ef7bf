"""Publishing on disk: what is there after each possible interruption, names, the pointer, and leftovers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters import store

SHA = "0123456789abcdef" * 4


class PowerCut(Exception):
    """The machine stopped before a system call."""


@pytest.fixture
def cut_power(monkeypatch):
    """`cut_power(n)`: the n-th fsync or rename from now on (from 0) does not happen, nor does anything after it."""

    def arm(n):
        left = [n]
        for name in ("fsync", "rename", "replace"):
            monkeypatch.setattr(os, name, _counting(getattr(os, name), left))

    def _counting(real, left):
        def call(*args, **kwargs):
            if left[0] == 0:
                raise PowerCut
            left[0] -= 1
            return real(*args, **kwargs)

        return call

    return arm


def write_source(root: Path) -> Path:
    source = root / "v1-01234567.tmp"
    (source / "inner").mkdir(parents=True)
    (source / "one").write_bytes(b"one")
    (source / "inner" / "two").write_bytes(b"two")
    return source


def files_under(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# ----------------------------------------------------------------------------------------------------- publishing


def test_a_published_folder_is_whole_and_its_source_gone(tmp_path):
    source = write_source(tmp_path)
    store.publish_folder(source, tmp_path / "v1-01234567")
    assert files_under(tmp_path / "v1-01234567") == {"one", "inner/two"}
    assert not source.exists()


def test_a_power_cut_at_any_point_leaves_nothing_published_or_everything(tmp_path, monkeypatch, cut_power):
    outcomes = []
    for point in range(20):
        root = tmp_path / str(point)
        source = write_source(root)
        with monkeypatch.context():
            cut_power(point)
            try:
                store.publish_folder(source, root / "v1-01234567")
            except PowerCut:
                finished = False
            else:
                finished = True
            monkeypatch.undo()
        versions = store.list_versions(root)
        if versions:
            assert files_under(versions[0].path) == {"one", "inner/two"}
        outcomes.append((finished, bool(versions)))
        store.remove_leftovers(root)
        assert {path.name for path in root.iterdir()} == {folder.path.name for folder in versions}
        if finished:
            break
    # Two files, two folders, the rename, the folder above: six calls. Before the last one the folder is already there.
    assert outcomes == [(False, False)] * 5 + [(False, True), (True, True)]


def test_everything_is_on_disk_before_the_name_appears(tmp_path, monkeypatch):
    source = write_source(tmp_path)
    events = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_fsync(descriptor)

    def rename(old, new, **kwargs):
        events.append("rename")
        real_rename(old, new, **kwargs)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    store.publish_folder(source, tmp_path / "v1-01234567")
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    assert sorted(before) == ["inner", "one", "two", source.name]
    assert after == [tmp_path.name]


def test_a_move_between_folders_makes_both_folders_durable(tmp_path, monkeypatch):
    spool, adapters = tmp_path / "spool", tmp_path / "adapters"
    adapters.mkdir()
    source = write_source(spool)
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name))
    store.publish_folder(source, adapters / "v1-01234567")
    assert synced[-2:] == ["adapters", "spool"]


def test_a_published_folder_is_never_replaced(tmp_path):
    store.publish_folder(write_source(tmp_path), tmp_path / "v1-01234567")
    again = write_source(tmp_path)
    (again / "one").write_bytes(b"other")
    with pytest.raises(FileExistsError, match="already published"):
        store.publish_folder(again, tmp_path / "v1-01234567")
    assert (tmp_path / "v1-01234567" / "one").read_bytes() == b"one"


def test_a_power_cut_leaves_the_old_file_or_the_new_one(tmp_path, monkeypatch, cut_power):
    seen = []
    for point in range(10):
        path = tmp_path / f"file{point}"
        path.write_bytes(b"old")
        cut_power(point)
        try:
            store.write_file_atomically(path, b"new")
        except PowerCut:
            finished = False
        else:
            finished = True
        monkeypatch.undo()
        seen.append((finished, path.read_bytes()))
        if finished:
            break
    assert seen == [(False, b"old"), (False, b"old"), (False, b"new"), (True, b"new")]


# ---------------------------------------------------------------------------------------------- names and listing


@given(version=st.integers(0, 10**9), sha=st.text("0123456789abcdef", min_size=64, max_size=64))
def test_a_folder_name_says_version_and_hash(version, sha):
    assert store.parse_folder_name(store.folder_name(version, sha)) == (version, sha[:8])


@pytest.mark.parametrize(
    "name", ["v1", "v1-abc", "v01-01234567", "v-1-01234567", "v1-0123456G", "v1-01234567.tmp", "x1-01234567", ""]
)
def test_other_names_are_no_version_folders(name):
    assert store.parse_folder_name(name) is None


@pytest.mark.parametrize(("version", "sha"), [(-1, SHA), (1, "short"), (1, "G" * 64)])
def test_what_makes_no_folder_name_is_an_error(version, sha):
    with pytest.raises(ValueError, match="no folder name"):
        store.folder_name(version, sha)


def test_versions_are_listed_by_number_and_other_things_left_out(tmp_path):
    for name in ("v10-01234567", "v9-89abcdef", "v11-01234567.tmp", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "v3-01234567").write_text("a file, not a folder")
    assert [folder.version for folder in store.list_versions(tmp_path)] == [9, 10]
    assert store.list_versions(tmp_path / "nowhere") == []


# ------------------------------------------------------------------------------------------------------ the pointer


def test_the_pointer_names_a_version_folder_or_the_base(tmp_path):
    store.write_current(tmp_path, "v3-01234567")
    assert (tmp_path / "CURRENT").read_text() == "v3-01234567\n"
    store.write_current(tmp_path, None)
    assert (tmp_path / "CURRENT").read_text() == "base\n"


def test_the_pointer_takes_only_names_of_version_folders(tmp_path):
    with pytest.raises(ValueError, match="not the name of a version folder"):
        store.write_current(tmp_path, "../elsewhere")


# -------------------------------------------------------------------------------------------------------- removal


def test_only_leftovers_are_removed(tmp_path):
    for name in ("v1-01234567", "v2-01234567.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x")
    (tmp_path / "CURRENT.tmp").write_bytes(b"x")
    (tmp_path / "CURRENT").write_bytes(b"x")
    assert store.remove_leftovers(tmp_path) == ["CURRENT.tmp", "v2-01234567.tmp"]
    assert {path.name for path in tmp_path.iterdir()} == {"v1-01234567", "CURRENT"}
    assert store.remove_leftovers(tmp_path / "nowhere") == []


def test_a_leftover_that_is_a_link_is_removed_and_its_target_kept(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "link.tmp").symlink_to(target)
    assert store.remove_leftovers(tmp_path) == ["link.tmp"]
    assert target.is_dir()


def test_a_removed_version_is_gone(tmp_path):
    store.publish_folder(write_source(tmp_path), tmp_path / "v1-01234567")
    store.remove_version(store.list_versions(tmp_path)[0])
    assert list(tmp_path.iterdir()) == []


def test_a_removal_that_is_cut_short_leaves_no_half_version(tmp_path, cut_power, monkeypatch):
    store.publish_folder(write_source(tmp_path), tmp_path / "v1-01234567")
    folder = store.list_versions(tmp_path)[0]
    cut_power(1)
    with pytest.raises(PowerCut):
        store.remove_version(folder)
    monkeypatch.undo()
    assert store.list_versions(tmp_path) == []
    assert store.remove_leftovers(tmp_path) == ["v1-01234567.tmp"]
