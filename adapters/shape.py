"""The facts of a base model that decide whether an adapter fits it, and how its modules are called.

A module is named by its Hugging Face path without any wrapper's prefix: `model.layers.20.self_attn.q_proj`. Only the
seven linear maps of a block can be adapted: embeddings, the output head and norms cannot (see `adapters.peft`). An
architecture that stores several of the seven as one matrix is adapted on the seven all the same; its files hold what
`adapters.fusion` makes of them.

Pure data and arithmetic; reading the facts from a file is `adapters.llamacpp_format.read_base_shape`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from adapters.errors import MismatchedAdapter, UnsupportedAdapter

# Module path inside a block -> name of the same tensor in a GGUF file.
LINEAR_MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

# The same of a matrix that is several modules in one.
FUSED_MODULES = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}


@dataclasses.dataclass(frozen=True, slots=True)
class Architecture:
    """How one GGUF architecture stores the linear maps of a block.

    Attributes:
        permutes_qk: the rows of Q and K are reordered for interleaved rotary embedding.
        fused: module of FUSED_MODULES -> the modules whose rows lie in it, one behind the other.
    """

    permutes_qk: bool = False
    fused: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


ARCHITECTURES = {
    "llama": Architecture(permutes_qk=True),
    "granite": Architecture(permutes_qk=True),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "phi3": Architecture(
        fused={
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        }
    ),
    "gemma": Architecture(),
    "gemma2": Architecture(),
    "gemma3": Architecture(),
}

_MODULE_PATH = re.compile(r"model\.layers\.(0|[1-9][0-9]*)\.([a-z_]+\.[a-z_]+)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BaseShape:
    """Shape of a decoder-only transformer, as its GGUF metadata states it.

    Attributes:
        arch: GGUF architecture name, e.g. "llama" (SmolLM2, Mistral and Llama all are).
        n_layers: number of blocks.
        n_embd: width of the residual stream.
        n_heads, n_kv_heads: query heads, and key/value heads (fewer with grouped-query attention).
        head_dim: width of one head.
        n_ff: hidden width of the feed-forward part.
        n_vocab: number of token ids.
    """

    arch: str
    n_layers: int
    n_embd: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_ff: int
    n_vocab: int

    def __post_init__(self) -> None:
        if self.arch not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise UnsupportedAdapter(f"base model: architecture {self.arch!r} is not supported; use one of {known}")

    @property
    def permutes_qk(self) -> bool:
        """True if the GGUF file stores the rows of Q and K in another order than the Hugging Face weights."""
        return ARCHITECTURES[self.arch].permutes_qk

    @property
    def fused(self) -> Mapping[str, tuple[str, ...]]:
        """Module that the model stores -> the modules in it; empty if it stores the seven as they are."""
        return ARCHITECTURES[self.arch].fused

    def module_shape(self, module: str) -> tuple[int, int]:
        """(n_out, n_in) of `module`'s weight.

        Raises:
            MismatchedAdapter: the base has no such module, or it cannot be adapted.
        """
        layer, kind = split_module(module)
        if layer >= self.n_layers:
            raise MismatchedAdapter(
                f"{module}: the base model has {self.n_layers} layers (0 to {self.n_layers - 1}); "
                "use an adapter that was trained on this base"
            )
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (q, self.n_embd),
            "self_attn.k_proj": (kv, self.n_embd),
            "self_attn.v_proj": (kv, self.n_embd),
            "self_attn.o_proj": (self.n_embd, q),
            "mlp.gate_proj": (self.n_ff, self.n_embd),
            "mlp.up_proj": (self.n_ff, self.n_embd),
            "mlp.down_proj": (self.n_embd, self.n_ff),
        }[kind]

    def top_modules(self, layers: int) -> tuple[str, ...]:
        """Names of the seven linear modules of the topmost `layers` blocks (0: of all), in order of depth."""
        first = max(0, self.n_layers - layers) if layers else 0
        return tuple(f"model.layers.{n}.{kind}" for n in range(first, self.n_layers) for kind in LINEAR_MODULES)


def split_module(module: str) -> tuple[int, str]:
    """`(20, "self_attn.q_proj")` of "model.layers.20.self_attn.q_proj".

    Raises:
        MismatchedAdapter: not the path of one of the seven linear modules of a block.
    """
    match = _MODULE_PATH.fullmatch(module)
    if match is None or match[2] not in LINEAR_MODULES:
        raise MismatchedAdapter(
            f"{module}: not a module that can be adapted; expected model.layers.N. followed by one of "
            + ", ".join(LINEAR_MODULES)
        )
    return int(match[1]), match[2]


def module_order(module: str) -> tuple[int, int]:
    """Sort key that puts modules in the order in which the model applies them."""
    layer, kind = split_module(module)
    return layer, list(LINEAR_MODULES).index(kind)
