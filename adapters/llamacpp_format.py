"""Adapters as llama.cpp LoRA files (GGUF), and the facts of a base model file.

llama.cpp stores the rows of Q and K of llama-like models in another order than Hugging Face, because it rotates
neighbouring pairs where Hugging Face rotates halves. So the rows of B of those modules are reordered when written and
put back when read; A is never touched. Leaving that out gives a file that loads and serves a plausible but different
model.

Matrices that the model stores fused are adapted as `adapters.fusion` says. llama.cpp divides alpha by each matrix's own
rank, so B of a fused one is written multiplied by its width.

llama.cpp checks architecture, names and shapes only. The `edged.*` keys state which base and version the file is for.

The written bytes are a function of the arguments alone. Durability is the caller's: see `adapters.folder`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import numpy as np

from adapters.errors import BaseModelError, MismatchedAdapter, UnreadableAdapter, UnsupportedAdapter
from adapters.fusion import parts_of, stored_matrices, stored_shape
from adapters.gguf_header import GgufError, GgufHeader, SkippedArray, TensorEntry, load_header
from adapters.shape import ARCHITECTURES, FUSED_MODULES, LINEAR_MODULES, BaseShape
from adapters.weights import F32, AdapterWeights

KEY_BASE_SHA256 = "edged.base_sha256"
KEY_VERSION = "edged.policy_version"
KEY_PARENT = "edged.parent"
KEY_RANK = "edged.lora_rank"  # of the adapter; only where fused matrices have another

_ALPHA = "adapter.lora.alpha"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GgufLineage:
    """What a GGUF adapter says of itself. `None`: the file does not say (it was not written by edged)."""

    version: int | None
    parent: int | None
    base_sha256: str | None


def stored_tensors(arch: str) -> dict[str, str]:
    """Module inside a block, as a model of this architecture stores it -> name of its tensor in the GGUF file."""
    fused = ARCHITECTURES[arch].fused
    parts = {part for parts in fused.values() for part in parts}
    whole = {module: tensor for module, tensor in FUSED_MODULES.items() if module in fused}
    return {module: tensor for module, tensor in LINEAR_MODULES.items() if module not in parts} | whole


def permute_rows(b: F32, n_heads: int) -> F32:
    """Hugging Face row order -> llama.cpp row order of a Q or K projection.

    Args:
        b: float32[O, r] with O = n_heads * head size; n_heads: heads of this projection (KV heads for K).
    """
    n_out, rank = b.shape
    return np.ascontiguousarray(b.reshape(n_heads, 2, n_out // n_heads // 2, rank).swapaxes(1, 2).reshape(n_out, rank))


def unpermute_rows(b: F32, n_heads: int) -> F32:
    """Inverse of `permute_rows`."""
    n_out, rank = b.shape
    return np.ascontiguousarray(b.reshape(n_heads, n_out // n_heads // 2, 2, rank).swapaxes(1, 2).reshape(n_out, rank))


def save_gguf_adapter(
    path: Path, weights: AdapterWeights, *, version: int, parent: int | None, base_sha256: str
) -> None:
    """Write `weights` as a llama.cpp LoRA file in float32.

    Args:
        version, parent: of the adapter in the lineage; parent None: it has no parent here.
        base_sha256: of the base model file that it is for.
    Raises:
        UnsupportedAdapter: it adapts only some of the modules that the model stores as one matrix.
    """
    stored = stored_matrices(weights)
    tensor_of = stored_tensors(weights.base.arch)
    writer = gguf.GGUFWriter(path, weights.base.arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32(_ALPHA, weights.alpha)
    writer.add_string(KEY_VERSION, str(version))
    writer.add_string(KEY_PARENT, "" if parent is None else str(parent))
    writer.add_string(KEY_BASE_SHA256, base_sha256)
    if weights.base.fused:
        writer.add_uint32(KEY_RANK, weights.rank)
    for module, matrices in stored.items():
        _, _, layer, kind = module.split(".", 3)
        heads = _permuted_heads(weights.base, kind)
        b = permute_rows(matrices.b, heads) if heads else matrices.b
        name = f"blk.{layer}.{tensor_of[kind]}.weight"
        writer.add_tensor(f"{name}.lora_a", matrices.a)
        writer.add_tensor(f"{name}.lora_b", b if matrices.width == 1 else b * np.float32(matrices.width))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def load_gguf_adapter(path: Path, base: BaseShape) -> tuple[AdapterWeights, GgufLineage]:
    """Read a llama.cpp LoRA file and check it against `base`.

    Raises:
        UnreadableAdapter: missing, truncated, or not a GGUF adapter.
        UnsupportedAdapter: quantised matrices, ranks that differ, or more than LoRA on the blocks' linear maps.
        MismatchedAdapter: made for another architecture or shape.
        NotFiniteAdapter: a matrix holds NaN or infinity.
    """
    try:
        header = load_header(path)
    except OSError as error:
        raise UnreadableAdapter(f"{path}: cannot be read ({error.strerror}); export the adapter again") from error
    except GgufError as error:
        raise UnreadableAdapter(f"{path}: not a whole GGUF file: {error}; copy the file again") from error
    metadata = header.metadata
    if metadata.get("general.type") != "adapter" or metadata.get("adapter.type") != "lora":
        raise UnreadableAdapter(f"{path}: a GGUF file, but not a LoRA adapter; give the path of an adapter")
    if metadata.get("general.architecture") != base.arch:
        raise MismatchedAdapter(
            f"{path}: made for architecture {metadata.get('general.architecture')!r}, the base model is {base.arch!r}; "
            "use an adapter that was trained on this base"
        )
    alpha = metadata.get(_ALPHA)
    if not isinstance(alpha, float) or not alpha > 0:
        # llama.cpp takes a missing or zero alpha as "do not divide by the rank": no PEFT adapter has that effect.
        raise UnsupportedAdapter(f"{path}: {_ALPHA} is {alpha!r}; convert the adapter again with a positive alpha")
    matrices = _load_matrices(path, header, base)
    ranks = {a.shape[0] for a, _ in matrices.values()}
    if len(ranks) != 1:
        raise UnsupportedAdapter(f"{path}: ranks differ by module ({sorted(ranks)}); import its PEFT folder instead")
    weights = AdapterWeights(base=base, rank=ranks.pop(), alpha=alpha, matrices=matrices)
    weights.check_finite()
    return weights, _lineage(header)


def read_base_shape(path: Path) -> BaseShape:
    """Shape of the base model in the GGUF file at `path`, from its metadata alone (milliseconds).

    Raises:
        BaseModelError: missing, truncated, not a GGUF model, or without a field that is needed.
        UnsupportedAdapter: an architecture that edged does not know.
    """
    try:
        header = load_header(path)
    except OSError as error:
        raise BaseModelError(f"{path}: the model cannot be read ({error.strerror}); check the path") from error
    except GgufError as error:
        raise BaseModelError(f"{path}: not a whole GGUF model: {error}; download or copy it again") from error
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise BaseModelError(f"{path}: a GGUF file of type {kind!r}, not a model; give the base model's file")
    arch = header.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise BaseModelError(
            f"{path}: architecture {arch!r} is not supported; use a model of one of {', '.join(sorted(ARCHITECTURES))}"
        )

    def count(key: str, default: int | None = None) -> int:
        value = header.metadata.get(f"{arch}.{key}", default)
        if not isinstance(value, int) or value < 1:
            raise BaseModelError(f"{path}: {arch}.{key} is {value!r}, expected a positive integer; convert it again")
        return value

    n_embd, n_heads = count("embedding_length"), count("attention.head_count")
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    n_tokens = tokens.length if isinstance(tokens, SkippedArray) else len(tokens) if isinstance(tokens, list) else None
    return BaseShape(
        arch=arch,
        n_layers=count("block_count"),
        n_embd=n_embd,
        n_heads=n_heads,
        n_kv_heads=count("attention.head_count_kv", n_heads),
        head_dim=count("attention.key_length", n_embd // n_heads),
        n_ff=count("feed_forward_length"),
        n_vocab=count("vocab_size", n_tokens),
    )


def _permuted_heads(base: BaseShape, kind: str) -> int:
    """Heads whose rows of B are reordered in the GGUF file; 0: the rows stay as they are."""
    if not base.permutes_qk:
        return 0
    return {"self_attn.q_proj": base.n_heads, "self_attn.k_proj": base.n_kv_heads}.get(kind, 0)


def _load_matrices(path: Path, header: GgufHeader, base: BaseShape) -> dict[str, tuple[F32, F32]]:
    module_of = {tensor: module for module, tensor in stored_tensors(base.arch).items()}
    factors: dict[str, dict[str, F32]] = {}
    with path.open("rb") as file:
        for name, entry in header.tensors.items():
            stem, _, factor = name.rpartition(".lora_")
            parts = stem.split(".")
            if factor not in ("a", "b") or len(parts) != 4 or parts[0] != "blk" or parts[2] not in module_of:
                raise UnsupportedAdapter(
                    f"{path}: tensor {name} is not LoRA on a linear map of a block; train again without it"
                )
            file.seek(entry.offset_bytes)
            matrix = _to_float32(path, name, entry, file.read(entry.n_bytes))
            factors.setdefault(f"model.layers.{parts[1]}.{module_of[parts[2]]}", {})[factor] = matrix
    rank = header.metadata.get(KEY_RANK)
    matrices: dict[str, tuple[F32, F32]] = {}
    for module, found in factors.items():
        n_out, n_in = stored_shape(base, module)
        if found.keys() != {"a", "b"}:
            raise UnreadableAdapter(f"{path}: {module} has only lora_{''.join(found)}; export the adapter again")
        a, b = found["a"], found["b"]
        if a.shape != (a.shape[0], n_in) or b.shape != (n_out, a.shape[0]):
            raise MismatchedAdapter(
                f"{path}: {module} has A{list(a.shape)} and B{list(b.shape)}, this base model has a weight of "
                f"{[n_out, n_in]} there; use an adapter that was trained on this base"
            )
        matrices |= _unpacked(base, module, a, b, rank if isinstance(rank, int) else None)
    return matrices


def _unpacked(base: BaseShape, module: str, a: F32, b: F32, rank: int | None) -> dict[str, tuple[F32, F32]]:
    """One module of a file as modules of the adapter, at the scale alpha / (their own rank)."""
    heads = _permuted_heads(base, module.split(".", 3)[3])
    if heads:
        return {module: (a, unpermute_rows(b, heads))}
    parts = parts_of(base, module, a, b, rank)
    return {part: (pa, _at_rank(pb, pa.shape[0] / a.shape[0])) for part, (pa, pb) in parts.items()}


def _at_rank(b: F32, ratio: float) -> F32:
    return b if ratio == 1.0 else np.ascontiguousarray(b * np.float32(ratio))


def _to_float32(path: Path, name: str, entry: TensorEntry, data: bytes) -> F32:
    if entry.type == gguf.GGMLQuantizationType.F32:
        flat = np.frombuffer(data, "<f4")
    elif entry.type == gguf.GGMLQuantizationType.F16:
        flat = np.frombuffer(data, "<f2")
    else:
        raise UnsupportedAdapter(f"{path}: {name} is {entry.type.name}; convert the adapter to F32 or F16")
    if len(entry.shape) != 2:
        raise MismatchedAdapter(f"{path}: {name} has {len(entry.shape)} dimensions, expected 2; convert it again")
    return flat.reshape(entry.shape).astype(np.float32)


def _lineage(header: GgufHeader) -> GgufLineage:
    def number(key: str) -> int | None:
        value = header.metadata.get(key)
        return int(value) if isinstance(value, str) and value.isdecimal() else None

    base_sha256 = header.metadata.get(KEY_BASE_SHA256)
    return GgufLineage(
        version=number(KEY_VERSION),
        parent=number(KEY_PARENT),
        base_sha256=base_sha256 if isinstance(base_sha256, str) else None,
    )
