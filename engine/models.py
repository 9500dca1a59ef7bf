"""The frozen base model as the trainer holds it: one folder of safetensors, mapped into memory.

A GGUF file is dequantised once (`engine.dequantize`) into a folder below the cache, named by the file's hash; a Hugging
Face folder is read where it lies. Both are then loaded by the same code, which maps the weights and copies nothing on a
CPU. Only decoders of the pre-norm, rotary, gated-MLP family are loaded, and any option of theirs that
`engine.train.decoder` does not compute is refused here, so that a model is either computed exactly or not at all.

transformers is not imported: its import alone takes longer than everything this module does, and it takes 16 s for the
conversion that takes 4 s here. Tests hold the two equal.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from adapters.errors import AdapterError
from adapters.shape import LINEAR_MODULES, BaseShape
from engine.fault import EngineFault

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
DIGEST_FILE = "weights.sha256"  # of WEIGHTS_FILE; only in folders that `engine.dequantize` wrote

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

# Hugging Face model type -> GGUF architecture. Mistral is the llama architecture under another name.
MODEL_TYPES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What the forward pass has to know.

    Attributes:
        shape: sizes, as adapters are checked against them.
        norm_eps: added to the mean square in every norm.
        rope_theta: base of the rotary frequencies.
        rope_llama3: the four numbers of Llama 3's frequency scaling (factor, low and high frequency factor, original
            context in tokens), or None for plain frequencies.
        tied: the output head is the embedding matrix.
        eos_ids: tokens that end an answer.
    """

    shape: BaseShape
    norm_eps: float
    rope_theta: float
    rope_llama3: tuple[float, float, float, float] | None
    tied: bool
    eos_ids: frozenset[int]


class Linear(NamedTuple):
    """weight[O, I] and bias[O] (or None) of a frozen linear map."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One decoder block. `linears` is keyed as `adapters.shape.LINEAR_MODULES`; `head_norms` (Q's, K's) is Qwen3's."""

    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    linears: Mapping[str, Linear]
    head_norms: tuple[torch.Tensor, torch.Tensor] | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A loaded base model: every tensor frozen, of one dtype, on one device.

    Attributes:
        name: for people and for adapter files.
        embedding: [V, D]. head: [V, D], the same tensor if tied. final_norm: [D].
        inverse_frequencies: float32[head_dim / 2], radians a position.
    """

    name: str
    config: DecoderConfig
    embedding: torch.Tensor
    head: torch.Tensor
    final_norm: torch.Tensor
    blocks: tuple[Block, ...]
    inverse_frequencies: torch.Tensor

    @property
    def eos_ids(self) -> frozenset[int]:
        return self.config.eos_ids

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device


def load_base(model_path: str, base_sha256: str, cache_folder: str, dtype: str, device: str) -> Base:
    """Load the base model of `model_path`: a GGUF file, or a Hugging Face folder with safetensors.

    Args:
        base_sha256: of the GGUF file; names its folder in the cache. Not used for a folder.
        cache_folder: where dequantised models are kept, as `base-<sha16>-<dtype>/`.
        dtype: "bfloat16" or "float32", of weights and products.
        device: as torch names it.

    Raises:
        EngineFault: model_unreadable, model_unsupported, or model_mismatch (the file is not the one with that hash).
    """
    path = Path(model_path)
    if path.is_dir():
        return load_folder(path, dtype, device)
    folder = Path(cache_folder) / f"base-{base_sha256[:16]}-{dtype}"
    if not is_intact(folder):
        from engine.dequantize import dequantize_gguf  # reads GGUF: only the first start needs it

        dequantize_gguf(path, base_sha256, folder, dtype)
    return load_folder(folder, dtype, device)


def is_intact(folder: Path) -> bool:
    """Whether `folder` holds a complete dequantised model whose weights hash as they did when it was written."""
    try:
        expected = (folder / DIGEST_FILE).read_text()
        with open(folder / WEIGHTS_FILE, "rb") as weights:
            return hashlib.file_digest(weights, "sha256").hexdigest() == expected
    except OSError:
        return False


def load_folder(folder: Path, dtype: str, device: str) -> Base:
    """Load a Hugging Face folder: config.json and one or several safetensors files.

    Raises:
        EngineFault: model_unreadable or model_unsupported.
    """
    config = read_config(folder)
    tensors = _open_tensors(folder, DTYPES[dtype], torch.device(device))
    try:
        return _assemble(folder.name, config, tensors)
    except KeyError as error:
        raise EngineFault(
            "model_unreadable", f"{folder}: tensor {error.args[0]!r} is missing; export the model again"
        ) from error


def read_config(folder: Path) -> DecoderConfig:
    """The decoder's configuration from config.json.

    Raises:
        EngineFault: model_unreadable, or model_unsupported for a model that the decoder does not compute exactly.
    """
    try:
        raw: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text())
        return parse_config(raw)
    except (OSError, ValueError) as error:
        raise EngineFault("model_unreadable", f"{folder / CONFIG_FILE}: {error}") from error
    except KeyError as error:
        raise EngineFault("model_unreadable", f"{folder / CONFIG_FILE}: key {error.args[0]!r} is missing") from error


def parse_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The configuration in a Hugging Face config map. Raises EngineFault (model_unsupported) and KeyError."""
    model_type = raw["model_type"]
    if model_type not in MODEL_TYPES:
        raise _unsupported(f"model type {model_type!r}; this trainer knows {', '.join(MODEL_TYPES)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise _unsupported(f"activation {raw['hidden_act']!r}; it knows silu")
    if raw.get("sliding_window") and raw.get("use_sliding_window", model_type == "mistral"):
        raise _unsupported("attention in a sliding window")
    n_heads, n_embd = raw["num_attention_heads"], raw["hidden_size"]
    rope = raw.get("rope_parameters") or {**(raw.get("rope_scaling") or {}), "rope_theta": raw.get("rope_theta", 1e4)}
    eos = raw.get("eos_token_id")
    try:
        shape = BaseShape(
            arch=MODEL_TYPES[model_type],
            n_layers=raw["num_hidden_layers"],
            n_embd=n_embd,
            n_heads=n_heads,
            n_kv_heads=raw.get("num_key_value_heads") or n_heads,
            head_dim=raw.get("head_dim") or n_embd // n_heads,
            n_ff=raw["intermediate_size"],
            n_vocab=raw["vocab_size"],
        )
    except AdapterError as error:
        raise EngineFault("model_unsupported", str(error)) from error
    return DecoderConfig(
        shape=shape,
        norm_eps=raw["rms_norm_eps"],
        rope_theta=float(rope["rope_theta"]),
        rope_llama3=_parse_rope_scaling(rope),
        tied=bool(raw.get("tie_word_embeddings", False)),
        eos_ids=frozenset([eos] if isinstance(eos, int) else eos or ()),
    )


def _parse_rope_scaling(rope: Mapping[str, Any]) -> tuple[float, float, float, float] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        factor, low, high, context_tokens = (float(rope[key]) for key in keys)
        return factor, low, high, context_tokens
    raise _unsupported(f"rotary scaling {kind!r}; it knows llama3's")


def inverse_frequencies(config: DecoderConfig) -> torch.Tensor:
    """float32[head_dim / 2]: radians a position of each rotated pair."""
    head_dim = config.shape.head_dim
    plain = 1.0 / (config.rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if config.rope_llama3 is None:
        return plain
    factor, low, high, context_tokens = config.rope_llama3
    wavelength = 2 * math.pi / plain
    blend = ((context_tokens / wavelength - low) / (high - low)).clamp(0.0, 1.0)  # 0: fully scaled, 1: untouched
    return (1 - blend) * plain / factor + blend * plain


def _open_tensors(folder: Path, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineFault("model_unreadable", f"{folder}: no .safetensors file; convert the model's weights first")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    tensors[name] = opened.get_tensor(name).to(device=device, dtype=dtype)
        except (SafetensorError, OSError) as error:
            raise EngineFault("model_unreadable", f"{file}: {error}; fetch or convert the model again") from error
    return tensors


def _assemble(name: str, config: DecoderConfig, tensors: dict[str, torch.Tensor]) -> Base:
    shape = config.shape
    embedding = _take(tensors, "model.embed_tokens.weight", shape.n_vocab, shape.n_embd)
    frequencies = inverse_frequencies(config).to(embedding.device)
    if "rope_freqs.weight" in tensors:  # GGUF states Llama 3's scaling as one divisor a frequency
        frequencies = frequencies / _take(tensors, "rope_freqs.weight", shape.head_dim // 2).float()
    return Base(
        name=name,
        config=config,
        embedding=embedding,
        head=embedding if config.tied else _take(tensors, "lm_head.weight", shape.n_vocab, shape.n_embd),
        final_norm=_take(tensors, "model.norm.weight", shape.n_embd),
        blocks=tuple(_block(config, tensors, layer) for layer in range(shape.n_layers)),
        inverse_frequencies=frequencies,
    )


def _block(config: DecoderConfig, tensors: dict[str, torch.Tensor], layer: int) -> Block:
    shape, prefix = config.shape, f"model.layers.{layer}."
    linears = {}
    for kind in LINEAR_MODULES:
        n_out, n_in = shape.module_shape(prefix + kind)
        bias = f"{prefix}{kind}.bias"
        linears[kind] = Linear(
            _take(tensors, f"{prefix}{kind}.weight", n_out, n_in),
            _take(tensors, bias, n_out) if bias in tensors else None,
        )
    head_norms = None
    if shape.arch == "qwen3":
        head_norms = (
            _take(tensors, f"{prefix}self_attn.q_norm.weight", shape.head_dim),
            _take(tensors, f"{prefix}self_attn.k_norm.weight", shape.head_dim),
        )
    return Block(
        attention_norm=_take(tensors, f"{prefix}input_layernorm.weight", shape.n_embd),
        mlp_norm=_take(tensors, f"{prefix}post_attention_layernorm.weight", shape.n_embd),
        linears=linears,
        head_norms=head_norms,
    )


def _take(tensors: dict[str, torch.Tensor], name: str, *expected: int) -> torch.Tensor:
    tensor = tensors[name]
    if tensor.shape != expected:
        raise EngineFault(
            "model_unreadable", f"tensor {name!r}: shape {list(tensor.shape)}, config.json says {list(expected)}"
        )
    return tensor


def _unsupported(what: str) -> EngineFault:
    return EngineFault("model_unsupported", f"the model has {what}; serve it without learning, or choose another base")
