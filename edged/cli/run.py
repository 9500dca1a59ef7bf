"""`edged run` and `edged check-config`: the daemon in the foreground, and the same settings code without it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edged.cli.connect import JsonOption
from edged.cli.exits import CONFIGURATION, DONE, BadConfiguration
from edged.cli.show import print_json

if TYPE_CHECKING:
    from edged.config import Settings

ConfigOption = Annotated[Path | None, typer.Option("--config", help="The TOML file.  [default: all defaults]")]
StateOption = Annotated[
    Path | None, typer.Option("--state-dir", help="The state folder.  [default: $STATE_DIRECTORY, then ./var]")
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="A packaged name (smollm2-135m), a .gguf file or a Hugging Face folder.")
]
ListenOption = Annotated[
    list[str] | None, typer.Option("--listen", help="unix:PATH or tcp:HOST:PORT; repeatable; replaces the file's.")
]


def run(
    config: ConfigOption = None,
    state_dir: StateOption = None,
    model: ModelOption = None,
    listen: ListenOption = None,
) -> None:
    """Run the daemon in the foreground. SIGTERM drains and stops, SIGHUP reloads the file."""
    changes = overrides(model, listen)
    settings = load(config, changes)
    from edged import daemon  # the heavy imports come after the settings are known to be good

    code = daemon.run(settings, state_folder=state_folder(state_dir), config_path=config, overrides=changes)
    raise typer.Exit(code)


def check_config(
    file: Annotated[Path | None, typer.Argument(help="The TOML file, as with --config.", show_default=False)] = None,
    config: ConfigOption = None,
    model: ModelOption = None,
    listen: ListenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the settings as `run` would, and print every problem, and what is hardly meant so."""
    from edged.cli.usable import check_settings
    from edged.config import notes

    if file is not None and config is not None:
        raise typer.BadParameter("name the file once, as FILE or with --config", param_hint="FILE")
    config = file if config is None else config
    try:
        settings = load(config, overrides(model, listen))
    except BadConfiguration as error:
        if not as_json:
            raise
        print_json({"ok": False, "problems": error.message.splitlines(), "notes": []})
        raise typer.Exit(CONFIGURATION) from error
    problems, found = check_settings(settings)
    found += notes(settings)
    if as_json:
        print_json({"ok": not problems, "problems": problems, "notes": found})
        raise typer.Exit(CONFIGURATION if problems else DONE)
    if problems:
        raise BadConfiguration("\n".join(problems), hint=_count(problems, config))
    print(f"{config or 'the defaults'}: no problems")
    for note in found:
        print(f"note: {note}")


def load(config: Path | None, changes: dict[str, Any]) -> Settings:
    """The settings of `config` with `changes` (dotted key -> value) over them. Raises BadConfiguration."""
    from edged.config import ConfigError
    from edged.config import load as load_settings

    try:
        return load_settings(config, changes)
    except ConfigError as error:
        raise BadConfiguration("\n".join(error.problems), hint=_count(error.problems, config)) from error


def _count(problems: Sequence[str], config: Path | None) -> str:
    return (
        f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in {config or 'the settings of the command line'}"
    )


def overrides(model: str | None, listen: list[str] | None) -> dict[str, Any]:
    """What the command line says over the file, by dotted key."""
    changes: dict[str, Any] = {}
    if model is not None:
        changes["model.path"] = model
    if listen:
        changes["api.listen"] = list(listen)
    return changes


def state_folder(given: Path | None) -> Path:
    """The state folder: the flag, else systemd's $STATE_DIRECTORY (its first entry), else ./var."""
    if given is not None:
        return given
    from_systemd = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    return Path(from_systemd) if from_systemd else Path("var")
