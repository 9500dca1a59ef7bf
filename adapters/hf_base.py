"""The facts of a base model that is a Hugging Face folder: its shape, its files, and the hash that names it.

A folder is `config.json`, one or several .safetensors files and `tokenizer.json`. Reads no tensor and runs no code of
the folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors

from adapters.base_file import base_sha256
from adapters.errors import AdapterError, BaseModelError
from adapters.shape import BaseShape

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"

# Hugging Face model type -> architecture of its GGUF files. `engine.families` knows what else they compute.
ARCHITECTURE_OF = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "gemma": "gemma",
    "gemma3_text": "gemma3",
}
# Text beside the weights that decides what a prompt becomes, or where an answer ends.
_TEXT_FILES = (
    CONFIG_FILE,
    "generation_config.json",
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def weight_files(folder: Path) -> list[Path]:
    """The .safetensors files of the folder, by name. Raises BaseModelError if there are none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BaseModelError(f"{folder}: no .safetensors file; convert the model's weights first")
    return files


def read_folder_shape(folder: Path) -> BaseShape:
    """The shape of the model in a Hugging Face folder.

    Raises:
        BaseModelError: a file is missing or cannot be read, or the model is of a type that cannot be adapted.
    """
    config = read_folder_config(folder)
    weight_files(folder)
    if not (folder / TOKENIZER_FILE).is_file():
        raise BaseModelError(
            f"{folder}: no {TOKENIZER_FILE}; save the tokenizer again with transformers, which writes it"
        )
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURE_OF:
        known = ", ".join(sorted(ARCHITECTURE_OF))
        raise BaseModelError(f"{folder}: model type {model_type!r} cannot be adapted here; use one of {known}")
    try:
        n_heads, n_embd = config["num_attention_heads"], config["hidden_size"]
        return BaseShape(
            arch=ARCHITECTURE_OF[model_type],
            n_layers=config["num_hidden_layers"],
            n_embd=n_embd,
            n_heads=n_heads,
            n_kv_heads=config.get("num_key_value_heads") or n_heads,
            head_dim=config.get("head_dim") or n_embd // n_heads,
            n_ff=config["intermediate_size"],
            n_vocab=config["vocab_size"],
        )
    except KeyError as error:
        raise BaseModelError(f"{folder / CONFIG_FILE}: key {error.args[0]!r} is missing") from error
    except AdapterError as error:
        raise BaseModelError(f"{folder}: {error}") from error


def read_folder_config(folder: Path) -> dict[str, Any]:
    """`config.json` of the folder. Raises BaseModelError."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
    except OSError as error:
        raise BaseModelError(
            f"{folder}: {CONFIG_FILE} cannot be read ({error.strerror}); give the folder of a Hugging Face model"
        ) from error
    except ValueError as error:
        raise BaseModelError(f"{folder / CONFIG_FILE}: no JSON: {error}") from error
    if not isinstance(config, dict):
        raise BaseModelError(f"{folder / CONFIG_FILE}: not a table of keys")
    return config


def is_tied(folder: Path) -> bool:
    """Whether the output head is the embedding matrix: no weight file has another one. Raises BaseModelError."""
    for file in weight_files(folder):
        try:
            with safetensors.safe_open(file, framework="numpy") as opened:
                if "lm_head.weight" in opened.keys():  # noqa: SIM118 - not a mapping
                    return False
        except (safetensors.SafetensorError, OSError) as error:
            raise BaseModelError(f"{file}: {error}; fetch or convert the model again") from error
    return True


def folder_sha256(folder: Path, cache_file: Path | None = None) -> str:
    """The identity of the model in a folder: a hash over the names and hashes of its weights and of what makes tokens.

    Args:
        cache_file: where the hashes of files are remembered; see `adapters.base_file`.
    Raises:
        BaseModelError: a file cannot be read. OSError: the cache cannot be written.
    """
    files = [*weight_files(folder), *(folder / name for name in _TEXT_FILES if (folder / name).is_file())]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.name}\0{base_sha256(file, cache_file)}\n".encode())
    return digest.hexdigest()
