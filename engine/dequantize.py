"""A GGUF file turned once into a Hugging Face folder of plain weights, which is what the trainer maps.

The weights are exactly those that llama.cpp serves, unpacked: training on them leaves kernel rounding as the only
difference between the two engines. Tensors are unpacked and written one at a time, so memory stays at the largest of
them. The folder appears by rename, complete and on disk, or not at all.

The only difference from a folder that transformers would write: Llama 3's rotary scaling is kept as the file states it,
in a tensor `rope_freqs.weight`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from adapters.shape import ARCHITECTURES, LINEAR_MODULES
from adapters.store import publish_folder
from engine.fault import EngineFault
from engine.models import CONFIG_FILE, DIGEST_FILE, DTYPES, MODEL_TYPES, WEIGHTS_FILE, parse_config

_OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
_BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    **{short: module for module, short in LINEAR_MODULES.items()},
}
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_SAFETENSORS_DTYPE = {"bfloat16": ("BF16", 2), "float32": ("F32", 4)}


def dequantize_gguf(path: Path, expected_sha256: str, folder: Path, dtype: str) -> None:
    """Write the model in the GGUF file `path` to `folder` as config.json and model.safetensors of `dtype`.

    Raises:
        EngineFault: model_unreadable (missing, truncated, not GGUF), model_mismatch (not the file with
            `expected_sha256`), model_unsupported (an architecture or option without support).
    """
    try:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise EngineFault("model_unreadable", f"{path}: {error.strerror}") from error
    if found != expected_sha256:
        raise EngineFault(
            "model_mismatch",
            f"{path}: its hash is {found[:16]}, expected {expected_sha256[:16]}; the file changed, restart the daemon",
        )
    try:
        reader = gguf.GGUFReader(path)
        config = hugging_face_config(reader)
        tensors = [(tensor, hugging_face_name(tensor.name)) for tensor in reader.tensors]
        _publish(folder, config, tensors, dtype)
    # gguf raises whatever numpy or its own parsing meets in a damaged file.
    except (ValueError, KeyError, IndexError, OverflowError, UnicodeDecodeError) as error:
        raise EngineFault(
            "model_unreadable", f"{path}: not a complete GGUF model ({error}); fetch the file again"
        ) from error


def hugging_face_config(reader: Any) -> dict[str, Any]:
    """config.json of the model in an open GGUF file.

    Raises:
        EngineFault: model_unsupported.
        KeyError: a key that every model of the architecture has is missing.
    """

    def read(key: str) -> Any:
        field = reader.get_field(key)
        if field is None:
            raise KeyError(key)
        return field.contents()

    arch = read("general.architecture")
    if arch not in MODEL_TYPES.values():
        known = ", ".join(sorted(set(MODEL_TYPES.values())))
        raise EngineFault(
            "model_unsupported", f"architecture {arch!r}: this trainer knows {known}; choose another base"
        )
    for key in ("rope.scaling.type", "attention.sliding_window"):
        field = reader.get_field(f"{arch}.{key}")
        if field is not None and field.contents() not in ("none", 0):
            raise EngineFault("model_unsupported", f"the model sets {key}; choose a base without it")
    n_embd, n_heads = read(f"{arch}.embedding_length"), read(f"{arch}.attention.head_count")
    names = {tensor.name: tensor for tensor in reader.tensors}
    head_dim = reader.get_field(f"{arch}.attention.key_length")
    theta = reader.get_field(f"{arch}.rope.freq_base")
    return {
        "architectures": [_CLASSES[arch]],
        "model_type": arch,
        "num_hidden_layers": read(f"{arch}.block_count"),
        "hidden_size": n_embd,
        "num_attention_heads": n_heads,
        "num_key_value_heads": read(f"{arch}.attention.head_count_kv"),
        "head_dim": head_dim.contents() if head_dim is not None else n_embd // n_heads,
        "intermediate_size": read(f"{arch}.feed_forward_length"),
        "vocab_size": int(names["token_embd.weight"].shape[1]),
        "max_position_embeddings": read(f"{arch}.context_length"),
        "rms_norm_eps": read(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta.contents() if theta is not None else 10000.0},
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in names,
        "eos_token_id": [field.contents() for field in map(reader.get_field, _END_KEYS) if field is not None],
    }


def hugging_face_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor. Raises EngineFault (model_unsupported) for one that has no place."""
    if name in _OUTER_TENSORS:
        return _OUTER_TENSORS[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK_TENSORS:
        return f"model.layers.{parts[1]}.{_BLOCK_TENSORS[parts[2]]}.{parts[3]}"
    raise EngineFault("model_unsupported", f"tensor {name!r} has no place in a plain decoder; choose another base")


def _publish(folder: Path, config: dict[str, Any], tensors: list[tuple[Any, str]], dtype: str) -> None:
    parse_config(config)
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    digest = _write_safetensors(temporary / WEIGHTS_FILE, config, tensors, dtype)
    (temporary / CONFIG_FILE).write_text(json.dumps({**config, "dtype": dtype}, indent=2))
    (temporary / DIGEST_FILE).write_text(digest)
    shutil.rmtree(folder, ignore_errors=True)  # a damaged copy of the same file
    publish_folder(temporary, folder)


def _write_safetensors(path: Path, config: dict[str, Any], tensors: list[tuple[Any, str]], dtype: str) -> str:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    code, item_bytes = _SAFETENSORS_DTYPE[dtype]
    offset = 0
    for tensor, name in tensors:
        size = item_bytes * int(np.prod(tensor.shape))
        shape = [int(n) for n in reversed(tensor.shape)]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 64)  # the tensors behind it lie aligned
    digest = hashlib.sha256()
    head = (memoryview(len(encoded).to_bytes(8, "little")), memoryview(encoded))
    with open(path, "wb") as out:
        for piece in itertools.chain(head, _unpacked(config, tensors, DTYPES[dtype])):
            digest.update(piece)
            out.write(piece)
    return digest.hexdigest()


def _unpacked(config: dict[str, Any], tensors: list[tuple[Any, str]], dtype: torch.dtype) -> Iterator[memoryview]:
    head_counts = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    permuted = ARCHITECTURES[config["model_type"]]
    for tensor, name in tensors:
        unpacked = gguf.dequantize(tensor.data, tensor.tensor_type)
        weights = torch.from_numpy(np.require(unpacked, dtype=np.float32, requirements=["C", "W"]))
        n_heads = head_counts.get(name.split(".")[-2]) if permuted else None
        if n_heads is not None:
            weights = restore_rotary_rows(weights, n_heads)
        array: npt.NDArray[np.uint8] = weights.to(dtype).contiguous().view(torch.uint8).numpy()
        yield array.data.cast("B")


def restore_rotary_rows(weights: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Rows of a Q or K map [n_heads * head_dim, ...], from the interleaved order of GGUF files to Hugging Face's
    halves."""
    pairs = weights.reshape(n_heads, weights.shape[0] // n_heads // 2, 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape)
