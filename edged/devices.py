"""The devices of this machine and the memory that is free on them, without loading an engine.

NVIDIA cards are asked of `nvidia-smi`, which comes with their driver; the memory of the CPUs is read from /proc. Cards
come first, in the order of their PCI addresses, so the CPU's number is how many cards there are: 0 on most boxes.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

from engine.placement import Device

MIB = 2**20
ASK_TIMEOUT_S = 30.0
_QUERY = ("--query-gpu=index,memory.total,memory.free", "--format=csv,noheader,nounits")


class DevicesUnknown(RuntimeError):
    """Raised when the machine does not tell what it has; the message says why and what to do."""


def find_devices(n_cpus: int = 1) -> tuple[Device, ...]:
    """Cards, then the CPU as so many devices. Blocking: nvidia-smi takes up to seconds. Raises DevicesUnknown."""
    return (*find_cards(), *divide(parse_meminfo(Path("/proc/meminfo").read_text()), n_cpus))


def divide(device: Device, n: int) -> tuple[Device, ...]:
    """`n` devices with equal shares of its memory."""
    share = dataclasses.replace(device, total_bytes=device.total_bytes // n, free_bytes=device.free_bytes // n)
    return (share,) * n


def find_cards() -> tuple[Device, ...]:
    """NVIDIA cards; none if their driver is not installed. Raises DevicesUnknown."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    try:
        asked = subprocess.run([tool, *_QUERY], capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        raise DevicesUnknown(f"nvidia-smi failed: {error}; check the NVIDIA driver") from error
    return parse_cards(asked.stdout)


def parse_cards(listing: str) -> tuple[Device, ...]:
    """Devices of nvidia-smi's lines of index, total and free MiB. Raises DevicesUnknown."""
    cards = []
    for line in filter(str.strip, listing.splitlines()):
        fields = re.fullmatch(r"\s*(\d+),\s*(\d+),\s*(\d+)\s*", line)
        if fields is None:  # cards that share their memory with the CPU have "[N/A]" here
            raise DevicesUnknown(f"nvidia-smi says {line.strip()!r}, expected index, total and free MiB")
        index, total, free = map(int, fields.groups())
        cards.append(Device(name=f"cuda:{index}", kind="cuda", total_bytes=total * MIB, free_bytes=free * MIB))
    return tuple(cards)


def parse_meminfo(meminfo: str) -> Device:
    """The CPU as a device, from the text of /proc/meminfo. Raises DevicesUnknown."""
    sizes = {}
    for key in ("MemTotal", "MemAvailable"):
        match = re.search(rf"^{key}:\s+(\d+) kB$", meminfo, re.MULTILINE)
        if match is None:
            raise DevicesUnknown(f"/proc/meminfo has no {key}; edged needs Linux 3.14 or newer")
        sizes[key] = int(match[1]) * 1024
    return Device(name="cpu", kind="cpu", total_bytes=sizes["MemTotal"], free_bytes=sizes["MemAvailable"])
