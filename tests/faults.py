"""Real faults at every point at which work touches the disk: the process is killed there, or its disk is full there.

A point is an event that the interpreter audits on a path below a folder: a file opened for writing, a rename, a folder
made. The work runs in a forked child, so the caller has one thread when it forks. A full disk is a limit on the size of
files: what is beyond it cannot be written, the file is left half, and the kernel says so.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

Fault = Literal["killed", "full"]
HALF_BYTES = 64  # what a file still takes once the disk is full

DONE, REFUSED = 0, 3


def events(folder: Path, work: Callable[[], None]) -> list[str]:
    """The points of `work`, in words. It is done once, in this process."""
    seen: list[str] = []
    watching = [True]
    sys.addaudithook(
        lambda event, arguments: seen.append(event) if watching[0] and touches(folder, event, arguments) else None
    )
    work()
    watching[0] = False
    return seen


def fault_at(number: int, fault: Fault, folder: Path, work: Callable[[], None]) -> int:
    """Do `work` in a child in which point `number` (from 0) fails; its exit code, negative for a signal.

    `work` raises OSError where it takes the fault for what it is (REFUSED).
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _arm(number, fault, folder)
            work()
            code = DONE
        except OSError:
            code = REFUSED
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def touches(folder: Path, event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether an audited event changes something below `folder`."""
    match event:
        case "open":
            path, _, flags = arguments
            return isinstance(path, str | bytes | os.PathLike) and bool(flags & os.O_ACCMODE) and _below(folder, path)
        case "os.rename":
            return _below(folder, arguments[1])
        case "os.mkdir":
            return _below(folder, arguments[0])
    return False


def _below(folder: Path, path: Any) -> bool:
    return str(os.fsdecode(path)).startswith(f"{folder}{os.sep}")


def _arm(number: int, fault: Fault, folder: Path) -> None:
    n_seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal n_seen
        if not touches(folder, event, arguments):
            return
        if n_seen == number:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (HALF_BYTES, resource.RLIM_INFINITY))
        n_seen += 1

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write beyond the limit is an OSError
    sys.addaudithook(hook)
