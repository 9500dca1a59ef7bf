"""The lock of a state folder: one daemon a folder.

An flock on the file `lock`, which holds the owner's pid for the error message. The kernel drops the lock with the
process, so a crash leaves nothing to clean up.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType


class FolderLocked(RuntimeError):
    """Raised when another daemon owns the folder. `pid` is its process, 0 if unknown."""

    def __init__(self, folder: Path, pid: int) -> None:
        self.folder = folder
        self.pid = pid
        owner = f"process {pid}" if pid else "another process"
        super().__init__(
            f"state folder {folder} is in use by {owner}; stop that daemon, or give this one another --state-dir"
        )


class FolderLock:
    """Holds the lock from construction to `release` (or the end of a with block).

    Raises:
        FolderLocked: another process has it.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            text = os.read(self._fd, 32).decode("ascii", "replace").strip()
            os.close(self._fd)
            raise FolderLocked(folder, int(text) if text.isdigit() else 0) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
