"""`edged doctor`: will edged work on this machine, and if not, what to do. The checks stand in `edged.cli.checks`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from edged.cli.connect import JsonOption
from edged.cli.exits import DONE, FAILED, BadConfiguration
from edged.cli.run import ConfigOption, ModelOption, StateOption, load, overrides, state_folder
from edged.cli.show import print_json

if TYPE_CHECKING:
    from edged.cli import checks


def doctor(
    config: ConfigOption = None, state_dir: StateOption = None, model: ModelOption = None, as_json: JsonOption = False
) -> None:
    """Check this machine: model, engine, CPU, memory, disk, GPU, and what would run where. Exit code 1 on a failure."""
    findings: list[checks.Finding] = []
    for finding in _examine(config, model, state_folder(state_dir)):
        findings.append(finding)
        if not as_json:
            print(finding_text(finding), flush=True)
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    raise typer.Exit(FAILED if any(finding.level == "fail" for finding in findings) else DONE)


def _examine(config: Path | None, model: str | None, folder: Path) -> Iterator[checks.Finding]:
    from edged.cli import checks, usable
    from edged.settings import ModelSection, Settings

    settings = Settings(model=ModelSection(path=ModelSection().path if model is None else model))
    try:
        settings = load(config, overrides(model, None))
        yield checks.Finding(name="settings", level="ok", found=str(config or "the defaults"))
    except BadConfiguration as error:
        problems = "; ".join(error.message.splitlines())
        yield checks.Finding(name="settings", level="fail", found=problems, advice="repair the file")
    model_path = settings.model.path
    single: tuple[Callable[[], checks.Finding], ...] = (
        checks.check_python,
        checks.check_sqlite,
        lambda: checks.check_model(model_path),
        checks.check_cpu,
        checks.check_cores,
        checks.check_memory,
    )
    for check in single:
        yield check()
    yield from checks.check_disk(folder)
    yield checks.check_socket(folder / "edged.sock")
    yield from checks.check_engine()
    yield checks.check_decoding(settings)
    yield checks.check_gpu()
    yield from usable.check_blocks(settings)
    yield from usable.check_judge(settings, connects=True)
    yield from checks.check_placement(settings)


def finding_text(finding: checks.Finding) -> str:
    """One or two lines: level, name, what was found; then what to do."""
    line = f"{finding.level:<4}  {finding.name:<13} {finding.found}"
    return f"{line}\n{'':<20}-> {finding.advice}" if finding.advice else line
