"""Reading /proc: of this process, of a real child, and of a process with an awkward name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from edged.bench.processes import cpu_s, family, rss_bytes


def test_a_family_is_the_process_its_children_and_theirs() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()  # the grandchild runs
        assert family(child.pid)[0] == child.pid
        assert len(family(child.pid)) == 2
        assert set(family(child.pid)) < set(family(os.getpid()))
        child.communicate(b"\n")
    assert family(child.pid) == [child.pid]


def test_memory_and_time_are_those_of_a_running_process_and_zero_of_one_that_is_gone(tmp_path: Path) -> None:
    assert rss_bytes(os.getpid()) > 5_000_000
    assert cpu_s(os.getpid()) > 0.0
    assert rss_bytes(1, proc=tmp_path) == 0
    assert cpu_s(1, proc=tmp_path) == 0.0


def test_a_command_name_with_spaces_and_brackets_is_read_right(tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    for pid, parent in ((7, 1), (8, 7)):
        (tmp_path / str(pid)).mkdir()
        fields = f"{pid} (a (b) c) S {parent} 0 0 0 0 0 0 0 0 0 {3 * ticks} {2 * ticks} 0 0"
        (tmp_path / str(pid) / "stat").write_text(fields)
    assert family(7, proc=tmp_path) == [7, 8]
    assert cpu_s(8, proc=tmp_path) == 5.0
