"""Do both engines compute the same for every family, adapters too? llama.cpp on tiny float32 files against torch.

The files have float32 weights, so what is left between the engines is the float16 of llama.cpp's keys and values and
its table for gelu: a hundred times less than on a quantised model. Each family's adapter is also written wrongly, in
the way in which this family can be got wrong, and that must be out of bounds: rows of Q and K in the other order, or
parts of a fused matrix exchanged.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from adapters import llamacpp_format
from adapters.weights import AdapterWeights
from engine.generate.llamacpp import Context, Model
from engine.generate.scheduler import Entry
from engine.lora import lora_from_weights, new_lora, weights_of_lora
from engine.models import Base, load_base, load_folder
from engine.protocol import LoraSettings
from engine.train import decoder
from tests.engine.families import SERVED, write_family, write_family_gguf

TOKENS = (5, 9, 2, 44, 61, 7, *range(10, 40))

# Mean |difference| of all log-probabilities, in nats. Measured: at most 0.0006, with gelu 0.0036; an adapter written
# wrongly 0.04 and more, with gelu 0.4.
BOUNDS = {"silu": 0.001, "gelu": 0.006}
FAR = 20  # times the bound


@dataclasses.dataclass(frozen=True)
class Engines:
    """Both engines on one file, and an adapter with an effect on every module."""

    path: Path
    model: Model
    context: Context
    base: Base
    adapter: AdapterWeights

    @property
    def bound(self) -> float:
        return BOUNDS[self.base.config.family.gate]

    def served(self, adapter_file: Path | None) -> torch.Tensor:
        """float32[T, V]: log-probabilities by llama.cpp."""
        adapter = None if adapter_file is None else self.model.load_adapter(str(adapter_file))
        self.context.set_adapter(adapter)
        try:
            rows = self.context.decode([Entry(0, i, token, True) for i, token in enumerate(TOKENS)])
            return torch.tensor(np.array(rows)).log_softmax(-1)
        finally:
            self.context.set_adapter(None)
            if adapter is not None:
                adapter.free()

    def trained(self, weights: AdapterWeights | None, base: Base | None = None) -> torch.Tensor:
        """The same by the trainer."""
        base = base or self.base
        lora = None if weights is None else lora_from_weights(weights, torch.device("cpu"))
        stream, packing = decoder.embed(base, TOKENS), decoder.pack(base, [len(TOKENS)])
        stream = decoder.run_blocks(base, stream, packing, lora, 0, base.config.shape.n_layers)
        return (decoder.final_norm(base, stream) @ base.head.T).float().log_softmax(-1)


def build_engines(folder: Path, family: str, **keys: int) -> Engines:
    torch.set_num_threads(1)
    path = folder / "model.gguf"
    write_family_gguf(path, write_family(folder / "folder", family), **keys)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    base = load_base(str(path), sha256, str(folder / "cache"), "float32", "cpu")
    model = Model(str(path), gpu_layers=0)
    context = Context(model, context_tokens=256, n_sequences=1, max_rows=len(TOKENS), threads=1)
    lora = new_lora(base.config.shape, LoraSettings(rank=3, alpha=6.0, layers=2), 5, base.device)
    generator = torch.Generator().manual_seed(6)
    for module, (_, b) in lora.matrices.items():
        # Q and K stronger than the rest: attention forgives much, and the order of rows concerns only them.
        b.normal_(0.0, 0.8 if module.endswith(("q_proj", "k_proj")) else 0.2, generator=generator)
    return Engines(path, model, context, base, weights_of_lora(lora))


@pytest.fixture(scope="module", params=list(SERVED))
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return build_engines(tmp_path_factory.mktemp("family"), request.param)


def write_adapter(folder: Path, weights: AdapterWeights) -> Path:
    path = folder / "adapter.gguf"
    llamacpp_format.save_gguf_adapter(path, weights, version=1, parent=0, base_sha256="0" * 64)
    return path


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().mean())


def written_wrongly(weights: AdapterWeights) -> AdapterWeights:
    """The adapter changed so that its file is what a plausible mistake of this family would write."""
    matrices = dict(weights.matrices)
    heads = {"q_proj": weights.base.n_heads, "k_proj": weights.base.n_kv_heads}
    reorder = llamacpp_format.unpermute_rows if weights.base.permutes_qk else llamacpp_format.permute_rows
    for module, (a, b) in weights.matrices.items():
        kind = module.rpartition(".")[2]
        if weights.base.fused:  # another order of the parts
            other = {"k_proj": "v_proj", "v_proj": "k_proj", "gate_proj": "up_proj", "up_proj": "gate_proj"}
            matrices[module] = weights.matrices[module.replace(kind, other.get(kind, kind))]
        elif kind in heads:
            matrices[module] = (a, reorder(b, heads[kind]))
    return dataclasses.replace(weights, matrices=matrices)


def test_t_sync_1_without_an_adapter_both_engines_agree(engines: Engines) -> None:
    assert gap(engines.served(None), engines.trained(None)) < engines.bound


def test_t_sync_1_t_sync_2_with_an_adapter_both_engines_agree_and_it_has_an_effect(
    engines: Engines, tmp_path: Path
) -> None:
    served, bare = engines.served(write_adapter(tmp_path, engines.adapter)), engines.served(None)
    assert gap(served, engines.trained(engines.adapter)) < engines.bound
    assert gap(served, bare) > FAR * engines.bound


def test_the_trainer_in_bfloat16_agrees_too(engines: Engines, tmp_path: Path) -> None:
    sha256 = hashlib.sha256(engines.path.read_bytes()).hexdigest()
    base = load_base(str(engines.path), sha256, str(tmp_path), "bfloat16", "cpu")
    assert gap(engines.served(write_adapter(tmp_path, engines.adapter)), engines.trained(engines.adapter, base)) < 0.1


def test_an_adapter_file_written_wrongly_is_out_of_bounds(engines: Engines, tmp_path: Path) -> None:
    served = engines.served(write_adapter(tmp_path, written_wrongly(engines.adapter)))
    assert gap(served, engines.trained(engines.adapter)) > FAR * engines.bound


def test_t_lora_7_a_wrong_alpha_is_out_of_bounds(engines: Engines, tmp_path: Path) -> None:
    doubled = dataclasses.replace(engines.adapter, alpha=2 * engines.adapter.alpha)
    assert gap(engines.served(write_adapter(tmp_path, doubled)), engines.trained(engines.adapter)) > FAR * engines.bound


def test_the_file_of_an_adapter_is_read_back_bit_for_bit(engines: Engines, tmp_path: Path) -> None:
    path = write_adapter(tmp_path, engines.adapter)
    read, _ = llamacpp_format.load_gguf_adapter(path, llamacpp_format.read_base_shape(engines.path))
    assert read.sha256() == engines.adapter.sha256()


def test_phi_3s_window_is_left_out_where_llama_cpp_leaves_it_out(tmp_path: Path) -> None:
    engines = build_engines(tmp_path, "phi3", attention__sliding_window=5)
    assert gap(engines.served(None), engines.trained(None)) < engines.bound
    windowed = tuple(dataclasses.replace(block, window=5) for block in engines.base.blocks)
    strict = dataclasses.replace(engines.base, blocks=windowed)
    assert gap(engines.served(None), engines.trained(None, strict)) > FAR * engines.bound


def test_gemma_3s_window_is_kept_by_both(tmp_path: Path) -> None:
    engines = build_engines(tmp_path, "gemma3")
    everything = tuple(dataclasses.replace(block, window=None) for block in engines.base.blocks)
    blind = dataclasses.replace(engines.base, blocks=everything)
    assert gap(engines.served(None), engines.trained(None, blind)) > FAR * engines.bound
    assert load_folder(tmp_path / "folder", "float32", "cpu").config.windows == engines.base.config.windows
