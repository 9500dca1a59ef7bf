"""Where learning keeps its files in the state folder, and how they get there. Blocking calls: run them in a thread.

    adapters/v<N>-<sha8>/     published adapters; never changed
    checkpoints/v<N>/         critic and optimizer state that belongs to a published adapter
    spool/update-<id>/        an update that is not finished: job.msgpack, and out/ once it was trained

A file or folder appears under its name complete or not at all. Adapters of another base model than the one that is
served lie here too if the box served that one before; they are left alone and can be served by nobody.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgpack

from adapters import manifest, store
from adapters.errors import AdapterError
from engine import protocol

log = logging.getLogger(__name__)

T = TypeVar("T")

CHECKPOINTS_KEPT = 3  # the live one, the one before it, and one more: older moments fit no adapter that is served


class Folders:
    """The learning part of one state folder. base_sha256: of the model file that is served."""

    def __init__(self, state_folder: Path, base_sha256: str) -> None:
        self.adapters = state_folder / "adapters"
        self.checkpoints = state_folder / "checkpoints"
        self.spool = state_folder / "spool"
        self._state_folder = state_folder
        self._base_sha256 = base_sha256
        self._bases: dict[Path, str] = {}  # published folders never change
        self.current_trouble = ""  # why CURRENT could not be written the last time, for people

    def prepare(self, unfinished_updates: Iterable[int]) -> None:
        """Make the folders, and clear away what a crash left: half-written files, jobs of finished updates."""
        kept = {self.job(update_id) for update_id in unfinished_updates}
        for folder in (self.adapters, self.checkpoints, self.spool):
            folder.mkdir(exist_ok=True)
        # The workers died with the daemon before, so nobody writes anywhere here now.
        for folder in (self._state_folder, self._state_folder / "cache", self.adapters, self.checkpoints, self.spool):
            store.remove_leftovers(folder)
        for folder in self.spool.iterdir():
            if folder in kept:
                continue
            if folder.is_dir() and not folder.is_symlink():
                shutil.rmtree(folder)
            else:
                folder.unlink()

    def job(self, update_id: int) -> Path:
        return self.spool / f"update-{update_id}"

    def versions(self) -> dict[int, Path]:
        """The published adapters of the base model that is served, by version."""
        found = {folder.version: folder.path for folder in store.list_versions(self.adapters)}
        return {version: path for version, path in found.items() if self._base_of(path) == self._base_sha256}

    def highest_version(self) -> int:
        """The highest number of a folder among the published ones, of whichever base; 0 if there is none."""
        return max((folder.version for folder in store.list_versions(self.adapters)), default=0)

    def reference_to(self, version: int, versions: dict[int, Path]) -> protocol.AdapterRef:
        """How workers are told of a published version. Raises KeyError if it is not among `versions`."""
        return protocol.AdapterRef(version=version, folder=None if version == 0 else str(versions[version]))

    def checkpoint(self, version: int) -> Path | None:
        """The training state that belongs to `version`, if it is kept."""
        path = self.checkpoints / f"v{version}"
        return path if path.is_dir() else None

    def write_job(self, update_id: int, job: protocol.TrainJob) -> None:
        """Put the job where the trainer reads it; an existing job is left as it is, so that a replay is the same."""
        folder = self.job(update_id)
        folder.mkdir(exist_ok=True)
        if not (folder / protocol.JOB_FILE).exists():
            store.write_file_atomically(folder / protocol.JOB_FILE, msgpack.packb(protocol.to_map(job)))
            store.fsync_folder(self.spool)

    def replace_job(self, update_id: int, job: protocol.TrainJob) -> None:
        """Write over the job of an update; nothing happens if its folder is gone, because the update is finished."""
        folder = self.job(update_id)
        if folder.is_dir():
            store.write_file_atomically(folder / protocol.JOB_FILE, msgpack.packb(protocol.to_map(job)))

    def jobs(self) -> list[int]:
        """The updates that have a folder in the spool."""
        names = [path.name.removeprefix("update-") for path in self.spool.glob("update-*")]
        return sorted(int(name) for name in names if name.isdecimal())

    def read_job(self, update_id: int) -> protocol.TrainJob | None:
        """The job of an update, None if it was not written yet. Raises protocol.WireError for a damaged one."""
        path = self.job(update_id) / protocol.JOB_FILE
        if not path.exists():
            return None
        return _read(protocol.TrainJob, path)

    def result(self, update_id: int) -> protocol.TrainResult | None:
        """What the trainer made of an update; None until it is complete. Raises protocol.WireError if it is damaged."""
        out = self.job(update_id) / protocol.OUT_FOLDER
        return _read(protocol.TrainResult, out / protocol.RESULT_FILE) if out.is_dir() else None

    def clear_result(self, update_id: int) -> None:
        """Leave the job as if it had not been trained."""
        shutil.rmtree(self.job(update_id) / protocol.OUT_FOLDER)

    def candidate(self, update_id: int, version: int) -> Path:
        """Where the candidate's adapter folder lies: in the job, or already among the published ones."""
        trained = self.job(update_id) / protocol.OUT_FOLDER / "adapter"
        return trained if trained.is_dir() else self.versions().get(version, trained)

    def publish(self, candidate: Path, checkpoint: Path | None, version: int) -> tuple[str, str]:
        """Move a candidate, and its training state, to where published ones lie; its folder name and its hash.

        Doing it again after a crash in the middle finishes the move.
        """
        sha256 = manifest.verify(candidate).adapter_sha256
        destination = self.adapters / store.folder_name(version, sha256)
        if candidate != destination:
            for found in store.list_versions(self.adapters):
                if found.version == version:  # left behind by a database that is no longer there
                    store.remove_version(found)
            store.publish_folder(candidate, destination)
        if checkpoint is not None and checkpoint.is_dir():
            target = self.checkpoints / f"v{version}"
            if target.exists():
                shutil.rmtree(target)
            store.publish_folder(checkpoint, target)
            self._forget_old_checkpoints()
        return destination.name, sha256

    def withdraw(self, version: int) -> None:
        """Take back a published folder that did not become live after all."""
        for found in store.list_versions(self.adapters):
            if found.version == version:
                store.remove_version(found)
        checkpoint = self.checkpoint(version)
        if checkpoint is not None:
            shutil.rmtree(checkpoint)

    def clear_job(self, update_id: int) -> None:
        shutil.rmtree(self.job(update_id), ignore_errors=True)

    def complaint_about(self, version: int) -> str | None:
        """Why the files of a published version cannot be served; None if they are whole (or it is the base)."""
        if version == 0:
            return None
        try:
            paths = [found.path for found in store.list_versions(self.adapters) if found.version == version]
            if not paths:
                return f"no folder of it under {self.adapters}"
            found = manifest.verify(paths[-1])
        except (AdapterError, OSError) as error:
            return str(error)
        if found.base_sha256 != self._base_sha256:
            return (
                f"it belongs to the base model {found.base_sha256[:8]}, the one that is served is "
                f"{self._base_sha256[:8]}; set model.path to that one to serve it again"
            )
        return None

    def write_current(self, version: int) -> None:
        """Make CURRENT name the live adapter, or say in `current_trouble` why that failed.

        The store decides what is live; this is for people and scripts, and nothing waits for it to succeed. It is
        written again at the next change and the next start.
        """
        try:
            path = self.versions().get(version)
            store.write_current(self._state_folder, None if path is None else path.name)
        except OSError as error:
            self.current_trouble = f"v{version} is live, and CURRENT does not say so: {error}; see to it, and restart"
            log.error("%s", self.current_trouble)
        else:
            self.current_trouble = ""

    def _base_of(self, path: Path) -> str | None:
        """The base model of a published folder; None if its manifest cannot be read."""
        if path not in self._bases:
            try:
                self._bases[path] = manifest.parse_manifest((path / manifest.MANIFEST_FILE).read_bytes()).base_sha256
            except (AdapterError, OSError):
                return None
        return self._bases[path]

    def _forget_old_checkpoints(self) -> None:
        kept = [path for path in self.checkpoints.glob("v*") if path.name[1:].isdigit()]
        found = sorted(kept, key=lambda path: int(path.name[1:]), reverse=True)
        for path in found[CHECKPOINTS_KEPT:]:
            shutil.rmtree(path)


def _read(record: type[T], path: Path) -> T:
    """The record in a file. Raises protocol.WireError."""
    try:
        plain = msgpack.unpackb(path.read_bytes())
    except (ValueError, FileNotFoundError) as error:
        raise protocol.WireError(f"{path}: damaged: {error or type(error).__name__}") from error
    return protocol.from_map(record, plain)


def bytes_under(folder: Path) -> int:
    """Size of all files below `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
