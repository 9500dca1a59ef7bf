"""Where the comparisons keep what is made once: the peers' model folder, the episodes, TRL's virtual environment.

Everything lies under `$XDG_CACHE_HOME/edged/bench` (or ~/.cache/edged/bench), named by what it was made from, and is
made again when that changes. Removing the folder costs time only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from episodes import ensure_episodes

from adapters.base_file import base_sha256
from edged.base_model import find_model

ROOT = Path(__file__).parents[2]
BENCH = Path(__file__).parent
MODEL = "smollm2-135m"
TRL, TORCH = "1.16.0", "2.13.0"


def cache_folder() -> Path:
    """The folder for all of it, made if missing."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edged" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def model_file() -> Path:
    """The GGUF file that both sides compute with."""
    return find_model(MODEL)


def model_name(cache: Path) -> str:
    """A short name of the model file's content."""
    return base_sha256(model_file(), cache / "base-hashes.json")[:16]


def ensure_peer_model(cache: Path) -> Path:
    """The folder with dequantised weights and tokenizer for transformers."""
    folder = cache / f"peer-{model_name(cache)}"
    if not folder.exists():
        subprocess.run([sys.executable, str(BENCH / "peer_model.py"), str(model_file()), str(folder)], check=True)
    return folder


def ensure_bench_episodes(cache: Path) -> Path:
    """The file with the episodes that both sides train on."""
    return ensure_episodes(cache / f"episodes-{model_name(cache)}.json", model_file())


def ensure_trl(cache: Path) -> Path:
    """The interpreter of a virtual environment that holds TRL, made if missing (a download and some minutes).

    torch, transformers and peft are of the project's own pins, so that both sides compute with the same kernels.
    """
    folder = cache / f"trl-{TRL}-torch-{TORCH}-py{sys.version_info.major}.{sys.version_info.minor}"
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    if not stamp.exists():
        print(f"installing TRL {TRL} into {folder}", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)  # of an installation that was cut off
        venv.create(folder, with_pip=True)
        pins = ["-c", str(ROOT / "constraints.txt")]
        command = [str(python), "-m", "pip", "install", "--quiet", *pins, f"trl=={TRL}", f"torch=={TORCH}", "peft"]
        subprocess.run(command, check=True)
        stamp.touch()
    return python
