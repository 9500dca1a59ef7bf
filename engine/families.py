"""The model families that the decoder computes, and what the configuration of a model of each one says.

A family is one entry of FAMILIES. Every option of a configuration that changes the result is either understood here or
refused with its reason, so that a model is computed exactly or not at all. The names are those of Hugging Face's
config.json; `engine.dequantize` writes such a file for a GGUF model, so there is one reader for both.

Not here: weights (`engine.models`), the computation (`engine.train.decoder`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from adapters.errors import AdapterError
from adapters.shape import BaseShape
from engine.fault import EngineFault

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the models of one Hugging Face model type have in common.

    Attributes:
        arch: GGUF architecture. model_class: Hugging Face's class.
        activations: names of the gate's function in config.json that mean this family's function.
        gate: the function itself: silu, or gelu in its tanh approximation.
        scaled_embedding: embeddings are multiplied by the square root of their width.
        norm_offset: added to every norm's stored weight.
        head_norms: Q and K are normed in each head.
        post_norms: the outputs of attention and of the MLP are normed before they join the stream.
        windows: which blocks attend within a sliding window, where the configuration asks for one: none, all, the ones
            above `max_window_layers`, or all but every sixth.
        served_windows: llama.cpp keeps to the window that a GGUF file states.
        local_rotary: blocks with a window rotate at frequencies of their own.
        tied: the output head is the embedding matrix unless the configuration says otherwise.
    """

    arch: str
    model_class: str
    activations: tuple[str, ...] = ("silu",)
    gate: Literal["silu", "gelu"] = "silu"
    scaled_embedding: bool = False
    norm_offset: float = 0.0
    head_norms: bool = False
    post_norms: bool = False
    windows: Literal["none", "all", "upper", "five_of_six"] = "none"
    served_windows: bool = False
    local_rotary: bool = False
    tied: bool = False


_GEMMA_GELU = ("gelu_pytorch_tanh", "gelu")  # early Gemma configurations say gelu and mean the approximation

# Hugging Face model type -> family. SmolLM is llama, Qwen2.5 is qwen2, Phi-4 is phi3.
FAMILIES = {
    "llama": Family(arch="llama", model_class="LlamaForCausalLM"),
    "mistral": Family(arch="llama", model_class="MistralForCausalLM", windows="all"),
    "qwen2": Family(arch="qwen2", model_class="Qwen2ForCausalLM", windows="upper"),
    "qwen3": Family(arch="qwen3", model_class="Qwen3ForCausalLM", windows="upper", head_norms=True),
    "phi3": Family(arch="phi3", model_class="Phi3ForCausalLM", windows="all"),
    "gemma": Family(
        arch="gemma",
        model_class="GemmaForCausalLM",
        activations=_GEMMA_GELU,
        gate="gelu",
        scaled_embedding=True,
        norm_offset=1.0,
        tied=True,
    ),
    "gemma3_text": Family(
        arch="gemma3",
        model_class="Gemma3ForCausalLM",
        activations=_GEMMA_GELU,
        gate="gelu",
        scaled_embedding=True,
        norm_offset=1.0,
        head_norms=True,
        post_norms=True,
        windows="five_of_six",
        served_windows=True,
        local_rotary=True,
        tied=True,
    ),
}
# The first family of an architecture is the one that its GGUF files are read as.
FAMILY_OF_ARCH = {family.arch: name for name, family in reversed(FAMILIES.items())}

# Related models that look as if they might work: model type or architecture -> why they do not.
_REFUSED = {
    "gemma2": "its attention scores and logits are capped by a tanh, which this trainer does not compute",
    "gemma3": "it reads images too; convert its language model alone (model type gemma3_text), or use its GGUF file",
    "granite": "its embeddings, residuals and logits have multipliers, which this trainer does not compute",
}
# Options that change the result and are not computed: key -> what it is.
_REFUSED_OPTIONS = {
    "attn_logit_softcapping": "capped attention scores",
    "final_logit_softcapping": "capped logits",
    "use_bidirectional_attention": "attention to later tokens",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """One set of rotary frequencies.

    Attributes:
        theta: base of the frequencies.
        factor: all frequencies are divided by it.
        llama3: the four numbers of Llama 3's scaling (factor, low and high frequency factor, original context in
            tokens), or None.
    """

    theta: float
    factor: float = 1.0
    llama3: tuple[float, float, float, float] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What the forward pass has to know.

    Attributes:
        family: what all models of its type have in common.
        shape: sizes, as adapters are checked against them.
        norm_eps: added to the mean square in every norm.
        attention_scale: factor of the products of queries and keys.
        rotaries: frequencies; blocks with a window use the second if there are two.
        windows: of each block, how many tokens back attention reaches (the token itself included), or None for all.
        tied: the output head is the embedding matrix.
        eos_ids: tokens that end an answer.
    """

    family: Family
    shape: BaseShape
    norm_eps: float
    attention_scale: float
    rotaries: tuple[Rotary, ...]
    windows: tuple[int | None, ...]
    tied: bool
    eos_ids: frozenset[int]


def read_config(folder: Path) -> DecoderConfig:
    """The configuration of the model in a Hugging Face folder.

    Raises:
        EngineFault: model_unreadable, or model_unsupported for a model that the decoder does not compute exactly.
    """
    try:
        raw: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text())
        config = parse_config(raw)
        generation = folder / GENERATION_FILE
        ends = _token_ids(json.loads(generation.read_text()).get("eos_token_id")) if generation.exists() else ()
    except (OSError, ValueError) as error:
        raise EngineFault("model_unreadable", f"{folder / CONFIG_FILE}: {error}") from error
    except KeyError as error:
        raise EngineFault("model_unreadable", f"{folder / CONFIG_FILE}: key {error.args[0]!r} is missing") from error
    # A chat model's end of turn often stands in the second file only.
    return dataclasses.replace(config, eos_ids=config.eos_ids.union(ends))


def parse_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The configuration in a Hugging Face config map. Raises EngineFault (model_unsupported) and KeyError."""
    family = _family(raw["model_type"])
    _refuse_options(raw, family)
    n_heads, n_embd = raw["num_attention_heads"], raw["hidden_size"]
    head_dim = raw.get("head_dim") or n_embd // n_heads
    try:
        shape = BaseShape(
            arch=family.arch,
            n_layers=raw["num_hidden_layers"],
            n_embd=n_embd,
            n_heads=n_heads,
            n_kv_heads=raw.get("num_key_value_heads") or n_heads,
            head_dim=head_dim,
            n_ff=raw["intermediate_size"],
            n_vocab=raw["vocab_size"],
        )
    except AdapterError as error:
        raise EngineFault("model_unsupported", str(error)) from error
    return DecoderConfig(
        family=family,
        shape=shape,
        norm_eps=raw["rms_norm_eps"],
        attention_scale=float(raw.get("query_pre_attn_scalar") or head_dim) ** -0.5,
        rotaries=_rotaries(raw, family),
        windows=_windows(raw, family, shape.n_layers),
        tied=bool(raw.get("tie_word_embeddings", family.tied)),
        eos_ids=frozenset(_token_ids(raw.get("eos_token_id"))),
    )


def unsupported(what: str) -> EngineFault:
    """The fault of a model that cannot be computed exactly."""
    return EngineFault("model_unsupported", f"the model has {what}; serve it without learning, or choose another base")


def inverse_frequencies(rotary: Rotary, head_dim: int) -> torch.Tensor:
    """float32[head_dim / 2]: radians a position of each rotated pair."""
    plain = 1.0 / (rotary.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)) / rotary.factor
    if rotary.llama3 is None:
        return plain
    factor, low, high, context_tokens = rotary.llama3
    wavelength = 2 * math.pi / plain
    blend = ((context_tokens / wavelength - low) / (high - low)).clamp(0.0, 1.0)  # 0: fully scaled, 1: untouched
    return (1 - blend) * plain / factor + blend * plain


def _family(model_type: str) -> Family:
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    raise refusal_of_type("model type", model_type, sorted(FAMILIES))


def refusal_of_type(what: str, name: str, known: list[str]) -> EngineFault:
    """The fault of a model type or architecture that is in no family."""
    reason = _REFUSED.get(name, f"this trainer knows {', '.join(known)}")
    return unsupported(f"the {what} {name!r}: {reason}")


def _refuse_options(raw: Mapping[str, Any], family: Family) -> None:
    for key in ("hidden_act", "hidden_activation"):
        if (raw.get(key) or family.activations[0]) not in family.activations:
            raise unsupported(f"the activation {raw[key]!r}; this trainer knows {family.activations[0]} for it")
    for key, meaning in _REFUSED_OPTIONS.items():
        if raw.get(key):
            raise unsupported(f"{meaning} ({key} = {raw[key]!r})")


def _token_ids(value: Any) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value or ())


def _windows(raw: Mapping[str, Any], family: Family, n_layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    if not window or not raw.get("use_sliding_window", family.windows in ("all", "five_of_six")):
        if family.local_rotary:
            raise unsupported("no sliding window, though its blocks rotate as if they had one")
        return (None,) * n_layers
    kinds: list[str] | None = raw.get("layer_types")
    known = {"none": (), "all": ("sliding_attention",)}.get(family.windows, ("sliding_attention", "full_attention"))
    if not known or (kinds is not None and not (len(kinds) == n_layers and set(kinds) <= set(known))):
        raise unsupported("attention in a sliding window in a way that its family does not have")
    if kinds is not None:
        inside = [kind == "sliding_attention" for kind in kinds]
    elif family.windows == "upper":
        inside = [layer >= raw["max_window_layers"] for layer in range(n_layers)]
    elif family.windows == "five_of_six":
        inside = [(layer + 1) % (raw.get("sliding_window_pattern") or 6) != 0 for layer in range(n_layers)]
    else:
        inside = [True] * n_layers
    return tuple(window if one else None for one in inside)


def _rotaries(raw: Mapping[str, Any], family: Family) -> tuple[Rotary, ...]:
    new, old = raw.get("rope_parameters"), raw.get("rope_scaling") or {}
    part = raw.get("partial_rotary_factor", 1.0)
    if family.local_rotary:
        if new is not None:
            return _rotary(new["full_attention"], part), _rotary(new["sliding_attention"], part)
        local = Rotary(theta=float(raw.get("rope_local_base_freq", 1e4)))
        return _rotary({**old, "rope_theta": raw.get("rope_theta", 1e6)}, part), local
    return (_rotary(new or {**old, "rope_theta": raw.get("rope_theta", 1e4)}, part),)


def _rotary(rope: Mapping[str, Any], part: float) -> Rotary:
    theta = float(rope["rope_theta"])
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", part) != 1.0:
        raise unsupported(f"rotary embedding of a part of each head ({rope.get('partial_rotary_factor', part)})")
    if kind == "default":
        return Rotary(theta=theta)
    if kind == "linear":
        return Rotary(theta=theta, factor=float(rope["factor"]))
    if kind == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        factor, low, high, context_tokens = (float(rope[key]) for key in keys)
        return Rotary(theta=theta, llama3=(factor, low, high, context_tokens))
    raise unsupported(f"the rotary scaling {kind!r}; this trainer knows linear and Llama 3's")
