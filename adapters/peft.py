"""Adapters as PEFT folders: `adapter_config.json` and `adapter_model.safetensors`, as PEFT and vLLM load them.

Modules are named as the Hugging Face model has them. A model that stores several of the seven linear maps as one matrix
(Phi-3: `qkv_proj`, `gate_up_proj`) is given LoRA on that matrix, of higher rank (`adapters.fusion`); `rank_pattern` and
`alpha_pattern` say so, and its scale is that of all the others.

Reading accepts what can be served exactly and refuses the rest by name. Differences of scale are folded into B when
read (rsLoRA, `alpha_pattern`), and a module of lower rank (`rank_pattern`) is padded with zeros, so that the effect
is the same and one rank and alpha hold for all. float16 and bfloat16 are widened. Pickles (`adapter_model.bin`) are
never opened: loading one runs whatever code its author put there.

Writing always gives float32, and gives the same bytes for the same weights. Durability (fsync, rename) is the caller's:
see `adapters.folder`.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from adapters.errors import MismatchedAdapter, UnreadableAdapter, UnsupportedAdapter
from adapters.fusion import parts_of, stored_matrices, stored_shape
from adapters.shape import LINEAR_MODULES, BaseShape, module_order
from adapters.weights import F32, AdapterWeights

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")

# Larger than rank 256 on every linear map of a 70B model; a file beyond it is no adapter.
MAX_CONFIG_BYTES = 1024 * 1024
MAX_ALPHA = 1e6  # beyond any use, and far from what float32 cannot hold
MAX_WEIGHTS_BYTES = 8 * 1024**3

_PREFIX = "base_model.model."
_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.default)?\.weight")

# Config keys that, when set, change the effect in a way that the serving engine cannot reproduce: key -> what it is.
_REFUSED_SETTINGS = {
    "use_dora": "DoRA",
    "lora_bias": "a bias on B",
    "modules_to_save": "fully trained modules (modules_to_save)",
    "trainable_token_indices": "trained token embeddings",
    "target_parameters": "LoRA on bare parameters (experts)",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "activated LoRA",
    "fan_in_fan_out": "transposed (Conv1D) weights",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "kasa_config": "KaSA",
    "arrow_config": "Arrow routing",
}
# Initialisations that also change the base model's weights, so that the adapter alone is not the whole effect.
_BASE_CHANGING_INITS = ("pissa", "olora", "loftq", "corda", "lora_ga")


def save_peft(folder: Path, weights: AdapterWeights, base_model_name: str) -> None:
    """Write `weights` as a PEFT folder into the existing `folder`.

    Args:
        base_model_name: stands in the config as `base_model_name_or_path`; loaders show it and use it when they are not
            given a base model.
    """
    (folder / CONFIG_FILE).write_bytes(peft_config_bytes(weights, base_model_name))
    (folder / WEIGHTS_FILE).write_bytes(peft_weights_bytes(weights))


def peft_config_bytes(weights: AdapterWeights, base_model_name: str) -> bytes:
    """Content of `adapter_config.json`. Raises UnsupportedAdapter as `stored_matrices` does."""
    stored = stored_matrices(weights)
    split = [module.split(".", 3)[2:] for module in stored]
    layers = sorted({int(layer) for layer, _ in split})
    known = (*LINEAR_MODULES, *weights.base.fused)
    kinds = [kind for kind in known if any(kind == other for _, other in split)]
    widths = {kind.rpartition(".")[2]: stored[module].width for module, (_, kind) in zip(stored, split, strict=True)}
    fused = {name: width for name, width in widths.items() if width > 1}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_name,
        "r": weights.rank,
        "lora_alpha": weights.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
    if len(split) == len(layers) * len(kinds):
        config["target_modules"] = [kind.rpartition(".")[2] for kind in kinds]
        config["layers_to_transform"] = layers
        config["layers_pattern"] = "layers"
    else:  # an uneven choice of modules can only be named one by one
        config["target_modules"] = list(stored)
    if fused:
        config["rank_pattern"] = {name: weights.rank * width for name, width in fused.items()}
        config["alpha_pattern"] = {name: weights.alpha * width for name, width in fused.items()}
    return json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"


def peft_weights_bytes(weights: AdapterWeights) -> bytes:
    """Content of `adapter_model.safetensors`."""
    tensors = {}
    for module, stored in stored_matrices(weights).items():
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = stored.a
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = stored.b
    return safetensors.numpy.save(tensors, {"format": "pt"})


def load_peft(folder: Path, base: BaseShape) -> AdapterWeights:
    """Read a PEFT folder and check it against `base`.

    Raises:
        UnreadableAdapter: a file is missing, truncated or malformed, or only a pickle is there.
        UnsupportedAdapter: the adapter is more than LoRA on the linear maps of the blocks.
        MismatchedAdapter: the adapter was made for a model of another shape.
        NotFiniteAdapter: a matrix holds NaN or infinity.
    """
    config = _load_config(folder)
    _refuse_unsupported(folder, config)
    pairs = _pair_factors(folder, _load_tensors(folder))
    weights = _fold(folder, config, pairs, base)
    weights.check_finite()
    return weights


def _load_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        config = json.loads(_read_regular(path, MAX_CONFIG_BYTES))
    except OSError as error:
        raise UnreadableAdapter(f"{path}: cannot be read ({error.strerror}); give the path of a PEFT folder") from error
    except UnreadableAdapter:
        raise
    except (ValueError, RecursionError) as error:
        raise UnreadableAdapter(f"{path}: not valid JSON ({error}); export the adapter again") from error
    if not isinstance(config, dict):
        raise UnreadableAdapter(f"{path}: expected a JSON object; export the adapter again")
    return config


def _refuse_unsupported(folder: Path, config: Mapping[str, Any]) -> None:
    path = folder / CONFIG_FILE
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedAdapter(f"{path}: peft_type is {kind!r}; only LORA adapters can be served")
    for key, meaning in _REFUSED_SETTINGS.items():
        if config.get(key):
            raise UnsupportedAdapter(f"{path}: uses {meaning}, which cannot be served; train again without {key}")
    if config.get("bias", "none") != "none":
        raise UnsupportedAdapter(f"{path}: trains biases (bias={config['bias']!r}); train again with bias='none'")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        raise UnsupportedAdapter(
            f"{path}: init_lora_weights={init!r} also changed the base model's weights; convert it to a plain LoRA "
            "(PEFT's save_pretrained with path_initial_model_for_weight_conversion) and import that"
        )


def _load_tensors(folder: Path) -> dict[str, F32]:
    path = folder / WEIGHTS_FILE
    if not path.exists():
        for name in PICKLE_FILES:
            if (folder / name).exists():
                raise UnreadableAdapter(
                    f"{folder / name}: a pickle, which can run code when it is loaded, so it is not opened; "
                    "save the adapter as safetensors"
                )
    try:
        entries = safetensors.deserialize(_read_regular(path, MAX_WEIGHTS_BYTES))  # type: ignore[no-untyped-call]  # its stub has no types
    except OSError as error:
        raise UnreadableAdapter(f"{path}: cannot be read ({error.strerror}); export the adapter again") from error
    except safetensors.SafetensorError as error:
        raise UnreadableAdapter(f"{path}: truncated or not safetensors ({error}); copy the file again") from error
    return {name: _as_float32(path, name, entry) for name, entry in entries}


def _read_regular(path: Path, most_bytes: int) -> bytes:
    """The content of an ordinary file: a pipe or a device could be read for ever. Raises UnreadableAdapter, OSError."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableAdapter(f"{path}: not an ordinary file; give the path of a PEFT folder")
    if status.st_size > most_bytes:
        raise UnreadableAdapter(f"{path}: {status.st_size} bytes are too many for an adapter; check the path")
    return path.read_bytes()


def _as_float32(path: Path, name: str, entry: Mapping[str, Any]) -> F32:
    data, shape, dtype = entry["data"], entry["shape"], entry["dtype"]
    if dtype == "F32":
        flat = np.frombuffer(data, "<f4")
    elif dtype == "F16":
        flat = np.frombuffer(data, "<f2")
    elif dtype == "BF16":
        flat = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        raise UnsupportedAdapter(f"{path}: {name} is {dtype}; save the adapter as F32, F16 or BF16")
    return flat.reshape(shape).astype(np.float32, copy=False)


def _pair_factors(folder: Path, tensors: Mapping[str, F32]) -> dict[str, tuple[F32, F32]]:
    path = folder / WEIGHTS_FILE
    factors: dict[str, dict[str, F32]] = {}
    for name, tensor in tensors.items():
        match = _KEY.fullmatch(name)
        if match is None:
            raise UnsupportedAdapter(f"{path}: {name} is not a plain LoRA matrix; {_what_it_is(name)}")
        module = match["module"]
        if "embed_tokens" in module or "lm_head" in module:
            raise UnsupportedAdapter(f"{path}: {name} is not a plain LoRA matrix; {_what_it_is(name)}")
        if tensor.ndim != 2:
            raise MismatchedAdapter(f"{path}: {name} has {tensor.ndim} dimensions, expected 2; export it again")
        factors.setdefault(module, {})[match["factor"]] = tensor
    for module, found in factors.items():
        for factor in "AB":
            if factor not in found:
                raise UnreadableAdapter(
                    f"{path}: {module} has no lora_{factor}; the file is incomplete, export it again"
                )
    return {module: (found["A"], found["B"]) for module, found in factors.items()}


def _what_it_is(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return "train again without DoRA"
    if "embed" in name or "lm_head" in name:
        return "embeddings and the output head cannot be adapted; train again without them"
    return "train again with LoRA on linear modules only (no bias, no modules_to_save)"


def _fold(
    folder: Path, config: Mapping[str, Any], pairs: Mapping[str, tuple[F32, F32]], base: BaseShape
) -> AdapterWeights:
    """Give every module one rank and one scale without changing any module's effect."""
    path = folder / CONFIG_FILE
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise UnreadableAdapter(f"{path}: r is {rank!r}, expected a positive integer; export the adapter again")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha <= MAX_ALPHA:
        raise UnreadableAdapter(
            f"{path}: lora_alpha is {alpha!r}, expected a positive number up to {MAX_ALPHA:g}; export it again"
        )
    rslora = bool(config.get("use_rslora"))
    ranks = {m: _by_pattern(path, config, "rank_pattern", m, rank) for m in pairs}
    alphas = {m: _by_pattern(path, config, "alpha_pattern", m, alpha) for m in pairs}
    parts: dict[str, tuple[F32, F32]] = {}
    scales: dict[str, float] = {}
    for module, (a, b) in pairs.items():
        n_out, n_in = stored_shape(base, module)
        expected = (ranks[module], n_in), (n_out, ranks[module])
        if (a.shape, b.shape) != expected:
            raise MismatchedAdapter(
                f"{folder / WEIGHTS_FILE}: {module} has A{list(a.shape)} and B{list(b.shape)}, this base model needs "
                f"A{list(expected[0])} and B{list(expected[1])}; use an adapter that was trained on this base"
            )
        found = parts_of(base, module, a, b, rank)
        scale = alphas[module] / (math.sqrt(ranks[module]) if rslora else ranks[module])
        parts |= found
        scales |= dict.fromkeys(found, scale)
    return _unify(base, parts, scales, rank, alpha)


def _unify(
    base: BaseShape, parts: Mapping[str, tuple[F32, F32]], scales: Mapping[str, float], rank: int, alpha: float
) -> AdapterWeights:
    """`rank`, `alpha`: as the file states them; they are kept where every module has them."""
    top_rank = max((a.shape[0] for a, _ in parts.values()), default=rank)
    different = set(scales.values())
    # The adapter's own scale is kept where the modules agree on it, so that nothing is folded that need not be.
    if different == {alpha / rank} and top_rank == rank:
        alpha_out = float(alpha)
    else:
        alpha_out = different.pop() * top_rank if len(different) == 1 else float(alpha)
    matrices = {}
    for module in sorted(parts, key=module_order):
        a, b = parts[module]
        missing = top_rank - a.shape[0]
        ratio = scales[module] * top_rank / alpha_out
        scaled = b if scales[module] == alpha_out / top_rank else (b * np.float32(ratio)).astype(np.float32)
        matrices[module] = (np.pad(a, ((0, missing), (0, 0))), np.pad(scaled, ((0, 0), (0, missing))))
    return AdapterWeights(base=base, rank=top_rank, alpha=alpha_out, matrices=matrices)


def _by_pattern(path: Path, config: Mapping[str, Any], key: str, module: str, default: Any) -> Any:
    """Value of `module` in PEFT's rank_pattern or alpha_pattern, whose keys are regexes for the end of a path."""
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise UnreadableAdapter(f"{path}: {key} must be an object; export the adapter again")
    for pattern, value in patterns.items():
        try:
            found = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            raise UnreadableAdapter(f"{path}: {key} has the bad pattern {pattern!r} ({error})") from error
        if found:
            whole = key != "rank_pattern" or isinstance(value, int)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not whole or not (value > 0 and math.isfinite(value)):
                raise UnreadableAdapter(f"{path}: {key}[{pattern!r}] is {value!r}, expected a positive number")
            return value
    return default
