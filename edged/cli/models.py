"""`edged models pull`: the only part of edged that downloads anything, and only when asked.

It needs `huggingface_hub`, which comes with the engine packages. Everything else works without a network.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from edged.cli.connect import JsonOption
from edged.cli.exits import CommandError
from edged.cli.show import print_json

commands = typer.Typer(help="Models on this machine.", no_args_is_help=True)


@commands.callback()
def _group() -> None:
    """Models on this machine."""  # a callback keeps `pull` a sub-command although it is the only one


@commands.command()
def pull(
    repo: Annotated[str, typer.Argument(help="A repository, as OWNER/NAME.")],
    file: Annotated[str | None, typer.Option(help="One file of it, as a .gguf.  [default: the whole model]")] = None,
    folder: Annotated[Path, typer.Option(help="Where to put it.")] = Path("models"),
    as_json: JsonOption = False,
) -> None:
    """Download a model from the Hugging Face hub for `edged run --model`."""
    if repo.count("/") != 1 or not all(repo.split("/")):
        raise typer.BadParameter(f"{repo!r}: expected OWNER/NAME", param_hint="REPO")
    path = _download(repo, file, folder / repo.split("/")[1])
    if as_json:
        print_json({"path": str(path)})
    else:
        print(f"{path}\nserve it with: edged run --model {path}")


def _download(repo: str, file: str | None, folder: Path) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise CommandError(
            "models pull needs the package huggingface_hub",
            hint="install it into edged's environment: pip install huggingface_hub",
        ) from error
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        raise CommandError(f"{repo}: HF_HUB_OFFLINE is set, so nothing is downloaded", hint="unset it for this command")
    try:
        if file is not None:
            return Path(huggingface_hub.hf_hub_download(repo, file, local_dir=folder))
        return Path(huggingface_hub.snapshot_download(repo, local_dir=folder, ignore_patterns=["*.bin", "*.pth"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CommandError(
            f"{repo}: could not be downloaded: {str(error).splitlines()[0]}",
            hint="check the name and the network; gated models need HF_TOKEN",
        ) from error
