"""`edged bench`: starts a real daemon in a temporary folder, measures the parts asked for, and prints the table.

Figures depend on the machine and on what else runs there; the table says which machine. Nothing is kept.
"""

from __future__ import annotations

import asyncio
import os
import platform
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from edged.bench import footprint, serve, swap, switch, update
from edged.bench.figures import HEADER, Figure, as_json, rows
from edged.bench.session import Session
from edged.cli.child import running, socket_of
from edged.cli.connect import Peer, open_async_http
from edged.cli.show import columns, print_json

Measure = Callable[[Session], Awaitable[list[Figure]]]

PARTS: dict[str, Measure] = {
    "update": update.measure,
    "swap": swap.measure,
    "switch": switch.measure,
    "serve": serve.measure,
    "footprint": footprint.measure,
}
READY_TARGET_S = 5.0


def run(parts: Sequence[str], model: str, runs: int, json_wanted: bool) -> bool:
    """Measure `parts` (keys of `PARTS`), print, and return whether a target was missed."""
    console = Console(stderr=True)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as name, console.status("starting") as shown:
        folder = Path(name)
        figures: list[Figure] = []
        if "footprint" in parts:
            shown.update("first start")
            figures += _first_start(folder, model)
        socket = socket_of(folder)
        with running(_arguments(model, socket), folder) as child:
            ready_s = child.await_ready(Peer(socket=socket))
            if "footprint" in parts:
                figures.append(_start_figure("start to ready, cached", ready_s, READY_TARGET_S))

            async def measure_all() -> None:
                async with open_async_http(Peer(socket=socket)) as http:
                    session = Session(child=child, http=http, folder=folder, runs=runs, show=shown.update)
                    for part in parts:
                        figures.extend(await PARTS[part](session))

            with child.answering():
                asyncio.run(measure_all())
    machine = describe_machine(model, load_before)
    if json_wanted:
        print_json(as_json(figures, machine))
    else:
        print("  ".join(f"{key}: {value}" for key, value in machine.items()))
        print(columns(rows(figures), header=HEADER))
    return any(figure.is_met is False for figure in figures)


def _first_start(folder: Path, model: str) -> list[Figure]:
    """A start on an empty state folder, stopped again at once."""
    socket = socket_of(folder)
    with running(_arguments(model, socket), folder) as child:
        return [_start_figure("first start to ready", child.await_ready(Peer(socket=socket)), None)]


def _start_figure(name: str, ready_s: float, target: float | None) -> Figure:
    return Figure(part="footprint", name=name, unit="s", samples=(ready_s,), target=target)


def _arguments(model: str, socket: Path) -> list[str]:
    return ["--model", model, "--listen", f"unix:{socket}"]


def describe_machine(model: str, load_before: float) -> dict[str, Any]:
    """What the figures were measured on. load_before: processes that wanted a core, over the minute before the run."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "model": model,
        "load_before": round(load_before, 2),
    }
