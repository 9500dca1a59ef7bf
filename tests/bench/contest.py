"""Two sides, run in turns, and the table of their medians and ratios.

Most sides are processes: a run is a fresh one, which prints one JSON object of figures as the last line of its standard
output. Runs alternate, so that whatever else the machine does meanwhile falls on both sides alike; ratios are of
medians. The clock, the peak memory and the energy are the child's own business, with the functions here, which import
nothing but the standard library: a side may run in another virtual environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
RUN_TIMEOUT_S = 900.0


class SideFailed(Exception):
    """Raised when a side's process ends with an error; carries the end of what it wrote."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A contestant. run: one run, to its figures."""

    name: str
    run: Callable[[], dict[str, float]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """ours / theirs of two figures (`side.figure`), and the most that it may be; None where it is only told."""

    name: str
    ours: str
    theirs: str
    at_most: float | None = None


def process_side(name: str, command: Sequence[str], environment: Mapping[str, str]) -> Side:
    """A side that is a process. Its run raises SideFailed."""

    def run() -> dict[str, float]:
        child = subprocess.run(
            command,
            env=os.environ | dict(environment),
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
        if child.returncode != 0 or not child.stdout.strip():
            raise SideFailed(f"{name}: exit code {child.returncode}\n{child.stdout[-1000:]}\n{child.stderr[-3000:]}")
        figures: dict[str, float] = json.loads(child.stdout.strip().splitlines()[-1])
        return figures

    return Side(name=name, run=run)


def alternate(sides: Sequence[Side], runs: int) -> dict[str, list[float]]:
    """`side.figure` -> its value in every run, sides in turns."""
    found: dict[str, list[float]] = {}
    for run in range(runs):
        for side in sides:
            print(f"run {run + 1} of {runs}: {side.name}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
            for name, value in side.run().items():
                found.setdefault(f"{side.name}.{name}", []).append(value)
    return found


def table(found: Mapping[str, Sequence[float]], ratios: Sequence[Ratio]) -> str:
    """Medians with the spread of the runs, then the ratios with their targets."""
    lines = [f"{'figure':44} {'median':>12}   runs"]
    for name, values in found.items():
        spread = f"{min(values):.4g} .. {max(values):.4g}" if len(values) > 1 else ""
        lines.append(f"{name:44} {statistics.median(values):12.4g}   {spread}")
    for ratio in ratios:
        if not (found.get(ratio.ours) and found.get(ratio.theirs)):
            lines.append(f"{ratio.name:44} {'-':>12}   not measured")
            continue
        value = statistics.median(found[ratio.ours]) / statistics.median(found[ratio.theirs])
        verdict = "" if ratio.at_most is None else f"<= {ratio.at_most:.3g}  {_verdict(value, ratio.at_most)}"
        lines.append(f"{ratio.name:44} {value:12.3g}   {verdict}")
    return "\n".join(lines)


def _verdict(value: float, at_most: float) -> str:
    return "met" if value <= at_most else "MISSED"


def finish(figures: Mapping[str, float]) -> None:
    """What a side's process says at its end."""
    print(json.dumps(dict(figures)), flush=True)


def peak_rss_bytes(pid: int | str = "self") -> int:
    """Peak resident memory of a process so far; 0 if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)


def read_joules(powercap: Path = POWERCAP) -> float | None:
    """Energy that the processor packages have used since some moment, in joules; None without a readable meter."""
    zones = sorted(powercap.glob("intel-rapl:[0-9]*"))
    meters = [zone / "energy_uj" for zone in zones if zone.name.count(":") == 1]
    try:
        return sum(int(meter.read_text()) for meter in meters) / 1e6 if meters else None
    except OSError:
        return None


@contextlib.contextmanager
def measured(figures: dict[str, float], name: str) -> Iterator[None]:
    """Adds `<name>_s`, `<name>_cpu_s` of this process, and `<name>_j` where there is a meter, to `figures`."""
    joules, began, cpu = read_joules(), time.perf_counter(), time.process_time()
    yield
    figures[f"{name}_s"] = time.perf_counter() - began
    figures[f"{name}_cpu_s"] = time.process_time() - cpu
    after = read_joules()
    if joules is not None and after is not None and after >= joules:  # the meter wraps
        figures[f"{name}_j"] = after - joules


def describe_machine() -> str:
    """Processor, cores, load and meter, for the head of a table."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "unknown processor",
    )
    meter = "no meter" if read_joules() is None else "RAPL"
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()
    return f"{model}, {cores} cores, load {load[0]:.1f} / {load[2]:.1f} (1 / 15 min), energy: {meter}"
