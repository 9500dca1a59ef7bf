"""Adapter folders on disk: published whole or not at all, whenever the power goes.

Layout of a root folder:

    adapters/v<N>-<sha8>/   one published version; never changed afterwards
    CURRENT                 name of the version folder that is served, or "base"

A thing is written under a name that ends in `.tmp` beside its place, fsynced, renamed, and the folder that holds the
name is fsynced. So a reader sees the old state or the new one, and what a crash leaves behind ends in `.tmp`. The
list of versions is what is on disk; there is no index to disagree with it.

One process writes to a root (the daemon holds its lock). Every function here blocks on the disk.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from pathlib import Path

TMP_SUFFIX = ".tmp"
CURRENT_FILE = "CURRENT"
BASE = "base"

_FOLDER_NAME = re.compile(r"v(0|[1-9][0-9]*)-([0-9a-f]{8})")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VersionFolder:
    """A published version on disk. `sha8`: the first 8 digits of its weights' hash."""

    version: int
    sha8: str
    path: Path


def folder_name(version: int, sha256: str) -> str:
    """Name of the folder of `version`, whose weights hash to `sha256`: `v12-0a1b2c3d`."""
    name = f"v{version}-{sha256[:8]}"
    if _FOLDER_NAME.fullmatch(name) is None:
        raise ValueError(f"version {version!r} and hash {sha256!r} make no folder name")
    return name


def parse_folder_name(name: str) -> tuple[int, str] | None:
    """`(12, "0a1b2c3d")` of "v12-0a1b2c3d"; None if it is no version folder's name."""
    match = _FOLDER_NAME.fullmatch(name)
    return None if match is None else (int(match[1]), match[2])


def list_versions(adapters_folder: Path) -> list[VersionFolder]:
    """Every published version under `adapters_folder`, oldest first; empty if the folder does not exist."""
    found = []
    if adapters_folder.is_dir():
        for path in adapters_folder.iterdir():
            parsed = parse_folder_name(path.name)
            if parsed is not None and path.is_dir():
                found.append(VersionFolder(version=parsed[0], sha8=parsed[1], path=path))
    return sorted(found, key=lambda folder: (folder.version, folder.sha8))


def publish_folder(source: Path, destination: Path) -> None:
    """Make the finished folder `source` appear as `destination`, durably and in one step.

    Both must be on one file system. Every file and folder under `source` is fsynced before the rename.

    Raises:
        FileExistsError: `destination` exists; published folders never change, so it is left as it is.
        OSError: the disk refused; `destination` does not exist then, or is whole.
    """
    if destination.exists():
        raise FileExistsError(f"{destination}: already published; published folders are never replaced")
    fsync_tree(source)
    source.rename(destination)
    fsync_folder(destination.parent)
    if source.parent != destination.parent:
        fsync_folder(source.parent)


def write_file_atomically(path: Path, data: bytes) -> None:
    """Replace the content of `path` by `data`, durably: after a crash it holds the old bytes or the new ones.

    Raises OSError: the disk refused; it holds the old ones, and nothing half-written lies beside it.
    """
    temporary = path.with_name(path.name + TMP_SUFFIX)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def fsync_tree(folder: Path) -> None:
    """Flush every file under `folder` and every folder's list of names to the disk, the innermost first."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            fsync_file(Path(parent, name))
        fsync_folder(Path(parent))


def fsync_file(path: Path) -> None:
    """Flush the content of the file at `path` to the disk."""
    _fsync(path, os.O_RDONLY)


def fsync_folder(path: Path) -> None:
    """Flush the list of names in the folder at `path` to the disk: a rename lasts only after this."""
    _fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_current(root: Path, name: str | None) -> None:
    """Point `CURRENT` at the version folder `name`, or at the base (None)."""
    if name is not None and parse_folder_name(name) is None:
        raise ValueError(f"{name!r} is not the name of a version folder")
    write_file_atomically(root / CURRENT_FILE, f"{name or BASE}\n".encode())


def remove_version(folder: VersionFolder) -> None:
    """Delete a published version. After a crash in between it is whole, or gone but for a leftover."""
    doomed = folder.path.with_name(folder.path.name + TMP_SUFFIX)
    shutil.rmtree(doomed, ignore_errors=True)
    folder.path.rename(doomed)
    fsync_folder(doomed.parent)
    shutil.rmtree(doomed)


def remove_leftovers(folder: Path) -> list[str]:
    """Delete what interrupted writes left directly in `folder`; returns the names. Call it before any writer starts."""
    removed = []
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.name.endswith(TMP_SUFFIX):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
                removed.append(path.name)
    return removed
