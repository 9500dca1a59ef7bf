"""The frozen base in the blocks of its GGUF file, unpacked map by map where they are used (`engine.blocks`).

For a card that has no room for the unpacked weights: of a model of 8 thousand million weights in Q4_K the maps take 4
GB instead of 14. Embedding, output head, norms and biases are unpacked once: rows of the one are looked up at every
token, the other is multiplied in chunks again and again. The same holds for maps of a type that is not in UNPACKERS,
and for plain ones.

On a CPU the blocks are the mapped file itself, which llama.cpp has mapped too: they take no memory of their own, but
for the rows of Q and K where the file has them in another order. Nothing is written to the cache.

The weights are those that are served, which is why they are the file's own blocks and no other library's: a base that
is quantised once more (NF4, 8 bits) is another model than the one that answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine.blocks import UNPACKERS, Blocks
from engine.dequantize import (
    hugging_face_config,
    hugging_face_name,
    opened_gguf,
    plain_numbers,
    rows_in_order,
)
from engine.families import FAMILIES, parse_config
from engine.models import DTYPES, Base, assemble, base_name


def load_quantised(path: Path, expected_sha256: str, dtype: str, device: str) -> Base:
    """Load the GGUF file `path`.

    Args:
        dtype: "bfloat16" or "float32", of what is unpacked and of products. device: as torch names it.

    Raises:
        EngineFault: as `engine.dequantize.dequantize_gguf`.
    """
    with opened_gguf(path, expected_sha256) as reader:
        config = hugging_face_config(reader)
        family = FAMILIES[config["model_type"]]
        tensors = {}
        for tensor in reader.tensors:
            name = hugging_face_name(tensor.name, family)
            tensors[name] = _held(config, tensor, name, DTYPES[dtype], torch.device(device))
        return assemble(base_name(expected_sha256, dtype), parse_config(config), tensors)


def _held(
    config: dict[str, Any], tensor: Any, name: str, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | Blocks:
    if name.endswith("_proj.weight") and tensor.tensor_type in UNPACKERS:
        rows = rows_in_order(config, torch.from_numpy(tensor.data), name)
        return Blocks(rows.to(device), tensor.tensor_type, dtype)
    return plain_numbers(config, tensor, name).to(device=device, dtype=dtype)
