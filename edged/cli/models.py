"""`edged models pull`: the only part of edged that downloads anything, and only when asked.

It needs `huggingface_hub`, which comes with the engine packages. Everything else works without a network.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from edged.cli.connect import JsonOption
from edged.cli.exits import CommandError
from edged.cli.show import print_json

SUFFIX = ".gguf"
SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
PREFERRED = "q4_k_m"  # the format that publishers of GGUF files recommend most

commands = typer.Typer(help="Models on this machine.", no_args_is_help=True)


@commands.callback()
def _group() -> None:
    """Models on this machine."""  # a callback keeps `pull` a sub-command although it is the only one


@commands.command()
def pull(
    repo: Annotated[str, typer.Argument(help="A repository, as OWNER/NAME.")],
    file: Annotated[
        str | None, typer.Option(help="Which .gguf file of it.  [default: the only one, or Q4_K_M]")
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where to put it.")] = Path("models"),
    as_json: JsonOption = False,
) -> None:
    """Download a .gguf file from the Hugging Face hub for `edged run --model`."""
    if repo.count("/") != 1 or not all(repo.split("/")):
        raise typer.BadParameter(f"{repo!r}: expected OWNER/NAME", param_hint="REPO")
    if file is not None and not file.endswith(SUFFIX):
        raise typer.BadParameter(f"{file!r}: edged serves {SUFFIX} files only", param_hint="--file")
    path = _download(repo, file, folder / repo.split("/")[1])
    if as_json:
        print_json({"path": str(path)})
    else:
        print(f"{path}\nserve it with: edged run --model {path}")


def choose_file(repo: str, files: Sequence[str]) -> str:
    """The model file to take when none was named: the only .gguf, or the one in Q4_K_M.

    Args:
        files: all files of the repository; parts of a split model and image encoders (mmproj) are passed over.
    Raises CommandError: there is none, or several of which none is in Q4_K_M.
    """
    models = [
        name for name in sorted(files) if name.endswith(SUFFIX) and not SPLIT.search(name) and "mmproj" not in name
    ]
    if not models:
        raise CommandError(
            f"{repo}: no {SUFFIX} file in it, and edged serves no other",
            hint="name a repository that holds the model as GGUF in one file; their names often end in -GGUF",
        )
    preferred = models if len(models) == 1 else [name for name in models if PREFERRED in name.lower()]
    if len(preferred) != 1:
        raise CommandError(f"{repo}: {len(models)} models in it", hint="name one with --file: " + ", ".join(models))
    return preferred[0]


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
        name = file or choose_file(repo, huggingface_hub.HfApi().list_repo_files(repo))
        return Path(huggingface_hub.hf_hub_download(repo, name, local_dir=folder))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CommandError(
            f"{repo}: could not be downloaded: {str(error).splitlines()[0]}",
            hint="check the name and the network; gated models need HF_TOKEN",
        ) from error
