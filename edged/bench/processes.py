"""Memory and CPU time of a process and everything that it started, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")


def family(pid: int, *, proc: Path = PROC) -> list[int]:
    """`pid` and its descendants that live now, `pid` first."""
    parents: dict[int, int] = {}
    for entry in proc.iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name), proc)) is not None:
            parents[int(entry.name)] = int(stat[1])
    found = [pid]
    for member in found:  # grows while it is walked
        found += [child for child, parent in parents.items() if parent == member]
    return found


def rss_bytes(pid: int, *, proc: Path = PROC) -> int:
    """Resident memory of one process; 0 if it is gone."""
    try:
        pages = int((proc / str(pid) / "statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_rss_bytes(pid: int, *, proc: Path = PROC) -> int:
    """The most memory that one process has had resident since it started; 0 if it is gone."""
    try:
        lines = (proc / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def cpu_s(pid: int, *, proc: Path = PROC) -> float:
    """CPU seconds that one process has used; 0 if it is gone."""
    stat = _stat(pid, proc)
    if stat is None:
        return 0.0
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int, proc: Path) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on (field 3 in proc(5) is index 0), or None if the process is gone."""
    try:
        text = (proc / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The command's name may hold spaces and brackets; the last bracket ends it.
    return text.rpartition(")")[2].split()
