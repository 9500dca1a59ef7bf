"""An adapter's tensors: full precision while it is trained, and the precision that the server loads in its files."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from adapters.folder import write_adapter_folder
from engine.lora import lora_from_weights, new_lora, weights_of_lora
from engine.models import Base, load_folder
from engine.protocol import LoraSettings
from tests.engine.train.tiny import BASE_SHA256, write_tiny_model

SETTINGS = LoraSettings(rank=4, alpha=8.0, layers=2)


@pytest.fixture(scope="module")
def half_base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    folder = tmp_path_factory.mktemp("half")
    write_tiny_model(folder)
    return load_folder(folder, "bfloat16", "cpu")


def test_t_lora_5_the_masters_are_float32_on_a_base_of_bfloat16(half_base: Base) -> None:
    assert half_base.head.dtype == torch.bfloat16
    lora = new_lora(half_base.config.shape, SETTINGS, 0, half_base.device)
    assert {parameter.dtype for parameter in lora.parameters()} == {torch.float32}
    again = lora_from_weights(weights_of_lora(lora), half_base.device)
    assert all(torch.equal(a, b) for a, b in zip(lora.parameters(), again.parameters(), strict=True))


def test_t_lora_5_both_files_hold_what_was_trained_in_float32(half_base: Base, tmp_path: Path) -> None:
    lora = new_lora(half_base.config.shape, SETTINGS, 0, half_base.device)
    for _, b in lora.matrices.values():
        b.normal_(0.0, 0.05, generator=torch.Generator().manual_seed(1))
    write_adapter_folder(
        tmp_path / "v1",
        weights_of_lora(lora),
        version=1,
        parent=0,
        base_sha256=BASE_SHA256,
        base_model_name="tiny",
        origin="trained",
        created_at=0.0,
    )
    saved = load_file(tmp_path / "v1" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    served = gguf.GGUFReader(tmp_path / "v1" / "adapter.gguf").tensors
    assert {tensor.tensor_type for tensor in served} == {gguf.GGMLQuantizationType.F32}
    assert len(saved) == len(served) == 2 * len(lora.matrices)


def test_t_lora_6_heads_and_embeddings_are_never_adapted(half_base: Base) -> None:
    everywhere = LoraSettings(rank=2, alpha=2.0, layers=0)
    lora = new_lora(half_base.config.shape, everywhere, 0, half_base.device)
    assert len(lora.matrices) == 7 * half_base.config.shape.n_layers
    assert not any("head" in module or "embed" in module for module in lora.matrices)


def test_t_lora_7_the_effect_is_scaled_by_alpha_over_rank(half_base: Base) -> None:
    assert new_lora(half_base.config.shape, SETTINGS, 0, half_base.device).scale == 2.0
