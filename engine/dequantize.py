"""A GGUF file turned once into a Hugging Face folder of plain weights, which is what the trainer maps.

The weights are exactly those that llama.cpp serves, unpacked: training on them leaves kernel rounding as the only
difference between the two engines. Tensors are unpacked and written one at a time, so memory stays at the largest of
them. The folder appears by rename, complete and on disk, or not at all.

The only difference from a folder that transformers would write: Llama 3's rotary scaling is kept as the file states it,
in a tensor `rope_freqs.weight`. What llama.cpp leaves out of a model is left out here too (Phi-3's sliding window): the
model that is trained is the one that is served.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from adapters.llamacpp_format import stored_tensors
from adapters.shape import ARCHITECTURES
from adapters.store import publish_folder
from engine.families import (
    CONFIG_FILE,
    FAMILIES,
    FAMILY_OF_ARCH,
    Family,
    parse_config,
    refusal_of_type,
    unsupported,
)
from engine.fault import EngineFault
from engine.models import DIGEST_FILE, DTYPES, WEIGHTS_FILE

_OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
_NORM_TENSORS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEAD_NORM_TENSORS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
# Where attention and MLP have norms behind them too, the one before the MLP has another name.
_POST_NORM_TENSORS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
# Tokens that llama.cpp ends an answer at by their text, whatever the keys say; those of gpt-oss and Gemma 4 left out.
_END_TEXTS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>"),
)
# Tensors that change the result and are not computed: name -> what it is.
_REFUSED_TENSORS = {
    "rope_factors_long.weight": "rotary factors that depend on the length of the context (longrope)",
    "rope_factors_short.weight": "rotary factors that depend on the length of the context (longrope)",
}
_SAFETENSORS_DTYPE = {"bfloat16": ("BF16", 2), "float32": ("F32", 4)}


def dequantize_gguf(path: Path, expected_sha256: str, folder: Path, dtype: str) -> None:
    """Write the model in the GGUF file `path` to `folder` as config.json and model.safetensors of `dtype`.

    Raises:
        EngineFault: model_unreadable (missing, truncated, not GGUF), model_mismatch (not the file with
            `expected_sha256`), model_unsupported (an architecture or option without support).
    """
    with opened_gguf(path, expected_sha256) as reader:
        config = hugging_face_config(reader)
        family = FAMILIES[config["model_type"]]
        tensors = [(tensor, hugging_face_name(tensor.name, family)) for tensor in reader.tensors]
        _publish(folder, config, tensors, dtype)


@contextlib.contextmanager
def opened_gguf(path: Path, expected_sha256: str) -> Iterator[Any]:
    """The reader of the GGUF file `path`, whose tensors are mapped into memory. What is done with it may raise
    whatever damaged bytes lead to.

    Raises:
        EngineFault: model_unreadable, model_mismatch; see `dequantize_gguf`.
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
        # Copy on write: torch wants memory that it may write to, and never does.
        yield gguf.GGUFReader(path, "c")
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

    def read(key: str, default: Any = None) -> Any:
        field = reader.get_field(key)
        if field is None and default is None:
            raise KeyError(key)
        return default if field is None else field.contents()

    arch = read("general.architecture")
    if arch not in FAMILY_OF_ARCH:
        raise refusal_of_type("architecture", arch, sorted(FAMILY_OF_ARCH))
    model_type = FAMILY_OF_ARCH[arch]
    family = FAMILIES[model_type]
    n_layers, n_embd, n_heads = (
        read(f"{arch}.{key}") for key in ("block_count", "embedding_length", "attention.head_count")
    )
    n_kv_heads, n_ff = read(f"{arch}.attention.head_count_kv", n_heads), read(f"{arch}.feed_forward_length")
    if not all(isinstance(count, int) for count in (n_heads, n_kv_heads, n_ff)):
        raise unsupported("blocks of different sizes")
    head_dim = read(f"{arch}.attention.key_length", n_embd // n_heads)
    if read(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise unsupported("rotary embedding of a part of each head (rope.dimension_count)")
    names = {tensor.name: tensor for tensor in reader.tensors}
    return {
        "architectures": [family.model_class],
        "model_type": model_type,
        "num_hidden_layers": n_layers,
        "hidden_size": n_embd,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": n_ff,
        "vocab_size": int(names["token_embd.weight"].shape[1]),
        "max_position_embeddings": read(f"{arch}.context_length"),
        "rms_norm_eps": read(f"{arch}.attention.layer_norm_rms_epsilon"),
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "hidden_act": family.activations[0],
        "tie_word_embeddings": "output.weight" not in names,
        **_rotary_and_window(family, read, n_layers=n_layers, n_embd=n_embd, n_heads=n_heads, head_dim=head_dim),
        "eos_token_id": _end_tokens(reader),
    }


def _rotary_and_window(
    family: Family, read: Callable[..., Any], *, n_layers: int, n_embd: int, n_heads: int, head_dim: int
) -> dict[str, Any]:
    """The part of the configuration that GGUF files state in another way than Hugging Face."""
    arch = family.arch
    scaling = read(f"{arch}.rope.scaling.type", "none")
    factor = read(f"{arch}.rope.scaling.factor", 0.0)
    if scaling not in ("none", "linear"):
        raise unsupported(f"the rotary scaling {scaling!r}")
    for key in ("rope.scale_linear", "rope.scaling.attn_factor"):
        if read(f"{arch}.{key}", 1.0) not in (0.0, 1.0):
            raise unsupported(f"a rotary scaling ({key}) that this trainer does not compute")
    if scaling == "none" and factor not in (0.0, 1.0):
        raise unsupported("a factor of rotary scaling (rope.scaling.factor) without its type")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": read(f"{arch}.rope.freq_base", 10000.0)}
    if scaling == "linear" and factor:
        rope |= {"rope_type": "linear", "factor": factor}
    if not family.served_windows:
        # llama.cpp knows the key of Phi-3 and attends to everything nevertheless; for the others it has no such key.
        if family.windows != "all" and read(f"{arch}.attention.sliding_window", 0):
            raise unsupported("attention in a sliding window, which llama.cpp does not compute for it")
        return {"rope_parameters": rope}
    # llama.cpp has these figures in its code and not from the file.
    is_27b = n_layers == 62
    local = {"rope_type": "default", "rope_theta": read(f"{arch}.rope.freq_base_swa", 10000.0)}
    return {
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
        "sliding_window": read(f"{arch}.attention.sliding_window"),
        "layer_types": ["full_attention" if (n + 1) % 6 == 0 else "sliding_attention" for n in range(n_layers)],
        "query_pre_attn_scalar": n_embd // n_heads if is_27b else head_dim,
        "hidden_activation": family.activations[0],
    }


def _end_tokens(reader: Any) -> list[int]:
    fields = [reader.get_field(key) for key in _END_KEYS]
    ends = {field.contents() for field in fields if field is not None}
    tokens = reader.get_field("tokenizer.ggml.tokens")
    if tokens is not None:
        texts = tokens.contents()
        ends |= {texts.index(text) for text in _END_TEXTS if text in texts}
    return sorted(ends)


def hugging_face_name(name: str, family: Family) -> str:
    """The Hugging Face name of a GGUF tensor. Raises EngineFault (model_unsupported) for one that has no place."""
    if name in _OUTER_TENSORS:
        return _OUTER_TENSORS[name]
    if name in _REFUSED_TENSORS:
        raise unsupported(_REFUSED_TENSORS[name])
    linears = {tensor: module for module, tensor in stored_tensors(family.arch).items()}
    norms = (
        _NORM_TENSORS
        | (_HEAD_NORM_TENSORS if family.head_norms else {})
        | (_POST_NORM_TENSORS if family.post_norms else {})
    )
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk":
        places = linears | norms if parts[3] == "weight" else linears if parts[3] == "bias" else {}
        if parts[2] in places:
            return f"model.layers.{parts[1]}.{places[parts[2]]}.{parts[3]}"
    raise unsupported(
        f"the tensor {name!r}, which a plain {family.arch} does not have: neither could an adapter be written for it"
    )


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
    for tensor, name in tensors:
        numbers = plain_numbers(config, tensor, name).to(dtype)
        array: npt.NDArray[np.uint8] = numbers.contiguous().view(torch.uint8).numpy()
        yield array.data.cast("B")


def plain_numbers(config: dict[str, Any], tensor: Any, name: str) -> torch.Tensor:
    """float32 of one of a GGUF file's tensors, as Hugging Face has the tensor `name`."""
    unpacked = gguf.dequantize(tensor.data, tensor.tensor_type)
    weights = torch.from_numpy(np.require(unpacked, dtype=np.float32, requirements=["C", "W"]))
    module = name.split(".")[-2]
    if module.endswith("norm"):  # the file has the factor itself
        weights = weights - FAMILIES[config["model_type"]].norm_offset
    return rows_in_order(config, weights, name)


def rows_in_order(config: dict[str, Any], rows: torch.Tensor, name: str) -> torch.Tensor:
    """`rows` of the tensor `name`, numbers or bytes, in Hugging Face's order."""
    n_heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(
        name.split(".")[-2]
    )
    if n_heads is None or not ARCHITECTURES[FAMILIES[config["model_type"]].arch].permutes_qk:
        return rows
    return restore_rotary_rows(rows, n_heads)


def restore_rotary_rows(weights: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Rows of a Q or K map [n_heads * head_dim, ...], from the interleaved order of GGUF files to Hugging Face's
    halves."""
    pairs = weights.reshape(n_heads, weights.shape[0] // n_heads // 2, 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape)
