"""What "auto" means on a machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Literal

import pytest

from edged import machine


def test_threads_are_as_configured_or_as_many_as_this_process_may_use() -> None:
    assert machine.threads(3) == 3
    assert machine.threads(0) == len(os.sched_getaffinity(0))


def test_a_configured_device_is_taken_as_it_is() -> None:
    assert machine.train_device("cuda:1") == "cuda:1"
    assert machine.train_device("cpu") == "cpu"
    assert machine.train_device("auto") == ("cuda:0" if Path("/dev/nvidia0").exists() else "cpu")


def test_a_number_names_a_card_or_behind_them_the_cpu(tmp_path: Path) -> None:
    assert machine.device_name(0, dev=tmp_path) == "cpu"
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert [machine.device_name(number, dev=tmp_path) for number in range(4)] == ["cuda:0", "cuda:1", "cpu", "cuda:3"]
    assert [machine.device_name(number, 2, tmp_path) for number in (2, 3, 4)] == ["cpu", "cpu", "cuda:4"]


@pytest.mark.parametrize(
    ("configured", "device", "flags", "dtype"),
    [
        ("float32", "cuda:0", "flags\t\t: fpu avx512_bf16", "float32"),
        ("bfloat16", "cpu", "flags\t\t: fpu sse", "bfloat16"),
        ("auto", "cuda:0", "flags\t\t: fpu sse", "bfloat16"),
        ("auto", "cpu", "processor: 0\nflags\t\t: fpu avx512_bf16 sse", "bfloat16"),
        ("auto", "cpu", "flags\t\t: fpu amx_bf16", "bfloat16"),
        ("auto", "cpu", "flags\t\t: fpu avx2 avx512f", "float32"),
        ("auto", "cpu", "Features\t: fp asimd", "float32"),
        ("auto", "cpu", "", "float32"),
    ],
)
def test_bfloat16_is_used_where_the_hardware_multiplies_it_fast(
    tmp_path: Path,
    configured: Literal["auto", "bfloat16", "float32"],
    device: str,
    flags: str,
    dtype: str,
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(flags + "\n")
    assert machine.train_dtype(configured, device, cpuinfo) == dtype


def test_the_children_of_a_process_are_found_with_their_memory_the_oldest_first() -> None:
    started = [subprocess.Popen(["/bin/sleep", "60"]) for _ in range(2)]
    try:
        found = dict(machine.children(os.getpid()))
        assert [pid for pid in found if pid in {one.pid for one in started}] == [one.pid for one in started]
        assert all(found[one.pid] > 0 for one in started)
        assert machine.children(started[0].pid) == ()
    finally:
        for one in started:
            one.kill()
            one.wait()


def test_the_resident_memory_of_this_process_is_more_than_a_megabyte() -> None:
    assert machine.own_rss_bytes() > 2**20
