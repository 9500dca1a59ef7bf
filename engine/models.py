"""The frozen base model as the trainer holds it: one folder of safetensors, mapped into memory.

A GGUF file is dequantised once (`engine.dequantize`) into a folder below the cache, named by the file's hash; a Hugging
Face folder is read where it lies. Both are then loaded by the same code, which maps the weights and copies nothing on a
CPU: matrices that a model stores fused become views of their parts. Where memory is short, the blocks of a GGUF file
are held as they are instead (`engine.quantised`). Which models are loaded, and what their configuration means, is
`engine.families`.

transformers is not imported: its import alone takes longer than everything this module does, and it takes 16 s for the
conversion that takes 4 s here. Tests hold the two equal.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open

from adapters.gguf_header import GgufError, load_header
from adapters.shape import LINEAR_MODULES
from engine.blocks import Blocks
from engine.families import DecoderConfig, inverse_frequencies, read_config
from engine.fault import EngineFault

WEIGHTS_FILE = "model.safetensors"
DIGEST_FILE = "weights.sha256"  # of WEIGHTS_FILE; only in folders that `engine.dequantize` wrote

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

Held = Literal["dequantised", "quantised"]
Weights = Mapping[str, torch.Tensor | Blocks]


@dataclasses.dataclass(frozen=True, slots=True)
class Linear:
    """A frozen linear map. stored: [O, I]. bias: [O], or None."""

    stored: torch.Tensor | Blocks
    bias: torch.Tensor | None

    @property
    def weight(self) -> torch.Tensor:
        """[O, I] in the base's dtype. Of quantised blocks it is unpacked at every access: use it and let it go."""
        return self.stored if isinstance(self.stored, torch.Tensor) else self.stored.unpack()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One decoder block.

    Attributes:
        attention_norm, mlp_norm: factors of the norms before attention and MLP.
        linears: keyed as `adapters.shape.LINEAR_MODULES`.
        head_norms: of Q and of K, or None. post_norms: of the outputs of attention and of the MLP, or None.
        window: how many tokens back attention reaches, the token itself included; None for all.
        rotary: which of the base's sets of frequencies it rotates at.
    """

    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    linears: Mapping[str, Linear]
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    post_norms: tuple[torch.Tensor, torch.Tensor] | None
    window: int | None
    rotary: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A loaded base model: every tensor frozen, of one dtype, on one device.

    Only the factors of norms that are sums (`Family.norm_offset`) are float32 always: rounding would move them all.

    Attributes:
        name: for people and for adapter files.
        embedding: [V, D]. head: [V, D], the same tensor if tied. final_norm: [D].
        inverse_frequencies: of each set, float32[head_dim / 2], radians a position.
    """

    name: str
    config: DecoderConfig
    embedding: torch.Tensor
    head: torch.Tensor
    final_norm: torch.Tensor
    blocks: tuple[Block, ...]
    inverse_frequencies: tuple[torch.Tensor, ...]

    @property
    def eos_ids(self) -> frozenset[int]:
        return self.config.eos_ids

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device


def load_base(
    model_path: str, base_sha256: str, cache_folder: str, dtype: str, device: str, held: Held = "dequantised"
) -> Base:
    """Load the base model of `model_path`: a GGUF file, or a Hugging Face folder with safetensors.

    Args:
        base_sha256: of the GGUF file; names its folder in the cache. Not used for a folder.
        cache_folder: where dequantised models are kept, as `base-<sha16>-<dtype>/`.
        dtype: "bfloat16" or "float32", of weights and products.
        device: as torch names it.
        held: unpacked, or a GGUF file's blocks as they are; the numbers computed with are the same.

    Raises:
        EngineFault: model_unreadable, model_unsupported, or model_mismatch (the file is not the one with that hash).
    """
    path = Path(model_path)
    if path.is_dir():
        if held == "quantised":
            raise EngineFault(
                "model_unsupported", f"{path}: only a .gguf file has blocks; set learn.base_weights to dequantised"
            )
        return load_folder(path, dtype, device)
    if held == "quantised":
        from engine.quantised import load_quantised

        return load_quantised(path, base_sha256, dtype, device)
    folder = Path(cache_folder) / base_name(base_sha256, dtype)
    if not is_intact(folder):
        from engine.dequantize import dequantize_gguf  # reads GGUF: only the first start needs it

        dequantize_gguf(path, base_sha256, folder, dtype)
    return load_folder(folder, dtype, device)


def dequantised_bytes(model_path: str, dtype: str) -> int:
    """Of all weights of a GGUF file, unpacked to `dtype`; 0 for a folder. Raises EngineFault (model_unreadable)."""
    path = Path(model_path)
    if path.is_dir():
        return 0
    try:
        tensors = load_header(path).tensors.values()
    except (OSError, GgufError) as error:
        raise EngineFault("model_unreadable", f"{path}: {error}") from error
    return DTYPES[dtype].itemsize * sum(math.prod(tensor.shape) for tensor in tensors)


def base_name(base_sha256: str, dtype: str) -> str:
    """Of a base that comes from a GGUF file, however it is held: its folder in the cache."""
    return f"base-{base_sha256[:16]}-{dtype}"


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
        return assemble(folder.name, config, tensors)
    except KeyError as error:
        raise EngineFault(
            "model_unreadable", f"{folder}: tensor {error.args[0]!r} is missing; export the model again"
        ) from error


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


def assemble(name: str, config: DecoderConfig, tensors: Weights) -> Base:
    """A base of tensors by their Hugging Face names.

    Raises:
        KeyError: one is missing. EngineFault: one has another shape than the configuration says.
    """
    shape = config.shape
    embedding = _take(tensors, "model.embed_tokens.weight", shape.n_vocab, shape.n_embd)
    frequencies = [inverse_frequencies(one, shape.head_dim).to(embedding.device) for one in config.rotaries]
    if "rope_freqs.weight" in tensors:  # GGUF states Llama 3's scaling as one divisor a frequency
        divisors = _take(tensors, "rope_freqs.weight", shape.head_dim // 2).float()
        frequencies = [one / divisors for one in frequencies]
    return Base(
        name=name,
        config=config,
        embedding=embedding,
        head=embedding if config.tied else _take(tensors, "lm_head.weight", shape.n_vocab, shape.n_embd),
        final_norm=_norm(config, tensors, "model.norm.weight"),
        blocks=tuple(_block(config, tensors, layer) for layer in range(shape.n_layers)),
        inverse_frequencies=tuple(frequencies),
    )


def _block(config: DecoderConfig, tensors: Weights, layer: int) -> Block:
    prefix, family = f"model.layers.{layer}.", config.family
    # With norms behind attention too, the name of the norm before the MLP means the one behind attention.
    behind, before = "post_attention_layernorm", "pre_feedforward_layernorm"
    mlp_norm = before if family.post_norms else behind
    head_norms = post_norms = None
    if family.head_norms:
        head_norms = (
            _norm(config, tensors, f"{prefix}self_attn.q_norm.weight", config.shape.head_dim),
            _norm(config, tensors, f"{prefix}self_attn.k_norm.weight", config.shape.head_dim),
        )
    if family.post_norms:
        post_norms = (
            _norm(config, tensors, f"{prefix}{behind}.weight"),
            _norm(config, tensors, f"{prefix}post_feedforward_layernorm.weight"),
        )
    window = config.windows[layer]
    return Block(
        attention_norm=_norm(config, tensors, f"{prefix}input_layernorm.weight"),
        mlp_norm=_norm(config, tensors, f"{prefix}{mlp_norm}.weight"),
        linears=_linears(config, tensors, prefix),
        head_norms=head_norms,
        post_norms=post_norms,
        window=window,
        rotary=len(config.rotaries) - 1 if window is not None else 0,
    )


def _linears(config: DecoderConfig, tensors: Weights, prefix: str) -> dict[str, Linear]:
    shape = config.shape
    whole_of = {part: (whole, parts) for whole, parts in shape.fused.items() for part in parts}
    linears = {}
    for kind in LINEAR_MODULES:
        stored, parts = whole_of.get(kind, (kind, (kind,)))
        heights = [shape.module_shape(prefix + part)[0] for part in parts]
        n_out, n_in = sum(heights), shape.module_shape(prefix + kind)[1]
        weight, bias = f"{prefix}{stored}.weight", f"{prefix}{stored}.bias"
        at = parts.index(kind)
        linears[kind] = Linear(
            _matrix(tensors, weight, n_out, n_in).split(heights)[at],
            _take(tensors, bias, n_out).split(heights)[at] if bias in tensors else None,
        )
    return linears


def _norm(config: DecoderConfig, tensors: Weights, name: str, width: int | None = None) -> torch.Tensor:
    weight = _take(tensors, name, width or config.shape.n_embd)
    offset = config.family.norm_offset
    return weight.float() + offset if offset else weight


def _take(tensors: Weights, name: str, *expected: int) -> torch.Tensor:
    tensor = _matrix(tensors, name, *expected)
    assert isinstance(tensor, torch.Tensor)  # only the matrices of linear maps are loaded as blocks
    return tensor


def _matrix(tensors: Weights, name: str, *expected: int) -> torch.Tensor | Blocks:
    tensor = tensors[name]
    if tensor.shape != expected:
        raise EngineFault(
            "model_unreadable", f"tensor {name!r}: shape {list(tensor.shape)}, config.json says {list(expected)}"
        )
    return tensor
