"""`edged demo` and `edged bench`: the verbs; what they run stands in `edged.demo` and `edged.bench`."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from edged.cli.connect import JsonOption
from edged.cli.exits import DONE, FAILED


class Preference(StrEnum):
    """The names in `edged.demo.people.PEOPLE`, as a choice on the command line."""

    SHORT = "short"
    QUESTION = "question"
    BULLETS = "bullets"


class Part(StrEnum):
    """The parts of `edged.bench`."""

    ALL = "all"
    UPDATE = "update"
    SWAP = "swap"
    SWITCH = "switch"
    SERVE = "serve"
    FOOTPRINT = "footprint"


def demo(
    preference: Annotated[Preference, typer.Option(help="What the simulated person likes.")] = Preference.SHORT,
    exit_after: Annotated[
        bool, typer.Option("--exit", help="Stop at the end.  [default: without a terminal]", show_default=False)
    ] = False,
    state_dir: Annotated[Path, typer.Option(help="Where the daemon keeps its state.")] = Path("var"),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of 16 ratings.")] = 10,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the web page; another if it is taken.")] = 8437,
    model: Annotated[str, typer.Option(help="As in `edged run --model`.")] = "smollm2-135m",
) -> None:
    """Serve a small model, let a simulated person rate it, and watch it get better. Exit code 0 if it learned."""
    from edged.demo.run import Plan, run

    learned = run(
        Plan(preference=preference.value, state_folder=state_dir, rounds=rounds, port=port, model=model),
        stay=not exit_after and sys.stdin.isatty() and sys.stdout.isatty(),
    )
    raise typer.Exit(DONE if learned else FAILED)


def bench(
    part: Annotated[Part, typer.Argument(help="What to measure.")] = Part.ALL,
    model: Annotated[str, typer.Option(help="As in `edged run --model`.")] = "smollm2-135m",
    runs: Annotated[int, typer.Option(min=1, help="Repetitions; the median is shown.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine: updates, swaps under load, what a switch moves, sampling, memory, idle CPU."""
    from edged.bench.run import run

    missed = run([p.value for p in Part if p != Part.ALL] if part == Part.ALL else [part.value], model, runs, as_json)
    raise typer.Exit(FAILED if missed else DONE)
