"""What the settings' "auto" means on this machine. Reads /proc and /dev; imports no engine."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Literal

M_ARENA_MAX = -8  # of glibc's malloc.h
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


def threads(configured: int) -> int:
    """`configured`, or for 0 as many as this process may use."""
    return configured or len(os.sched_getaffinity(0))


def train_device(configured: str) -> str:
    """`configured`, or for "auto" the first NVIDIA card if its driver is there, else the CPU."""
    if configured != "auto":
        return configured
    return "cuda:0" if Path("/dev/nvidia0").exists() else "cpu"


def device_name(number: int, n_cpus: int = 1, dev: Path = Path("/dev")) -> str:
    """The device of a number as `edged doctor` lists them: the NVIDIA cards, and behind them the CPU's devices."""
    n_cards = sum(re.fullmatch(r"nvidia\d+", entry.name) is not None for entry in dev.iterdir())
    return "cpu" if n_cards <= number < n_cards + n_cpus else f"cuda:{number}"


def train_dtype(
    configured: Literal["auto", "bfloat16", "float32"], device: str, cpuinfo: Path = Path("/proc/cpuinfo")
) -> Literal["bfloat16", "float32"]:
    """`configured`, or for "auto" bfloat16 where the hardware multiplies it fast, else float32."""
    if configured != "auto":
        return configured
    if device != "cpu":
        return "bfloat16"
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("flags"):
            return "bfloat16" if BF16_FLAGS & set(line.split()) else "float32"
    return "float32"


def weights_bytes(folder: Path) -> int:
    """Bytes of the safetensors files in `folder`; 0 if there are none."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def limit_malloc_arenas(count: int) -> None:
    """Let the C library keep at most `count` heaps in this process, from now on.

    By default each new thread gets a heap of its own, and freed memory stays in it: tens of megabytes in a process
    whose threads only ever do small things.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc; others have no such habit
        libc.mallopt(M_ARENA_MAX, count)


def own_rss_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def children(pid: int, proc: Path = Path("/proc")) -> tuple[tuple[int, int], ...]:
    """Processes that `pid` has started and that are there now: pid and resident memory, the oldest first.

    Reads every process of the machine: a few milliseconds.
    """
    found = []
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The command's name may hold spaces and brackets; the last bracket ends it.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                pages = int((entry / "statm").read_text().split()[1])
                found.append((int(fields[19]), int(entry.name), pages * os.sysconf("SC_PAGE_SIZE")))
        except OSError:  # it has just ended
            continue
    return tuple((child, rss_bytes) for _, child, rss_bytes in sorted(found))
