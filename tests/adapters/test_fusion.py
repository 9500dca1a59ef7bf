"""Adapters on modules that a model stores as one matrix: what the files hold, and what is read from them."""

from __future__ import annotations

import dataclasses

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.errors import MismatchedAdapter, UnsupportedAdapter
from adapters.fusion import parts_of, stored_matrices, stored_shape
from adapters.llamacpp_format import load_gguf_adapter, save_gguf_adapter
from adapters.peft import load_peft, save_peft
from adapters.shape import BaseShape
from adapters.weights import AdapterWeights

PHI3 = BaseShape(arch="phi3", n_layers=2, n_embd=12, n_heads=3, n_kv_heads=1, head_dim=4, n_ff=10, n_vocab=64)
QKV, GATE_UP = "model.layers.1.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj"
PARTS = [f"model.layers.1.self_attn.{name}_proj" for name in "qkv"]


@pytest.fixture
def phi3(build_weights):
    """All seven modules of the last block, at a scale that binary fractions cannot hold."""
    return build_weights(shape=PHI3, modules=PHI3.top_modules(1), rank=3, alpha=0.7)


def effect(pair):
    a, b = (matrix.astype(np.float64) for matrix in pair)
    return b @ a


def test_the_whole_has_the_effect_of_its_parts_one_below_the_other(phi3):
    for whole, kinds in PHI3.fused.items():
        stored = stored_matrices(phi3)[f"model.layers.1.{whole}"]
        parts = np.concatenate([effect(phi3.matrices[f"model.layers.1.{kind}"]) for kind in kinds])
        np.testing.assert_allclose(stored.b.astype(np.float64) @ stored.a, parts, rtol=1e-12, atol=1e-12)
        assert (stored.b.shape[0], stored.a.shape[1]) == stored_shape(PHI3, f"model.layers.1.{whole}")


def test_ranks_are_rounded_up_to_a_power_of_two_times_the_adapters(phi3):
    stored = stored_matrices(phi3)
    assert {module.rpartition(".")[2]: (one.width, one.a.shape[0]) for module, one in stored.items()} == {
        "qkv_proj": (4, 12), "o_proj": (1, 3), "gate_up_proj": (2, 6), "down_proj": (1, 3),
    }  # fmt: skip


def test_other_architectures_store_the_seven_as_they_are(weights):
    assert {module: (one.a, one.b) for module, one in stored_matrices(weights).items()} == weights.matrices


@given(rank=st.integers(1, 5), alpha=st.floats(1e-3, 1e3), is_fresh=st.booleans(), seed=st.integers(0, 99))
def test_both_formats_give_a_fused_adapter_back_bit_for_bit(tmp_path_factory, rank, alpha, is_fresh, seed):
    rng = np.random.default_rng(seed)
    matrices = {}
    for module in PHI3.top_modules(0):
        n_out, n_in = PHI3.module_shape(module)
        b = np.zeros((n_out, rank), np.float32) if is_fresh else rng.standard_normal((n_out, rank), dtype=np.float32)
        matrices[module] = rng.standard_normal((rank, n_in), dtype=np.float32), b
    weights = AdapterWeights(base=PHI3, rank=rank, alpha=float(np.float32(alpha)), matrices=matrices)
    folder = tmp_path_factory.mktemp("fused")
    save_peft(folder, weights, "tiny")
    save_gguf_adapter(folder / "a.gguf", weights, version=1, parent=0, base_sha256="0" * 64)
    assert load_peft(folder, PHI3).sha256() == weights.sha256()
    assert load_gguf_adapter(folder / "a.gguf", PHI3)[0].sha256() == weights.sha256()


@pytest.mark.parametrize(("alpha", "rank"), [(1.0, 49), (16.0, 49), (0.7, 3)])
def test_alpha_survives_though_alpha_over_rank_is_rounded(tmp_path, build_weights, base, alpha, rank):
    weights = build_weights(rank=rank, alpha=alpha)
    save_peft(tmp_path, weights, "tiny")
    assert load_peft(tmp_path, base).sha256() == weights.sha256()


def test_llama_cpps_scale_of_every_matrix_is_that_of_the_adapter(tmp_path, phi3):
    """llama.cpp multiplies by alpha / (rank of the matrix)."""
    save_gguf_adapter(tmp_path / "a", phi3, version=1, parent=0, base_sha256="0" * 64)
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "a").tensors}
    assert sorted({name.split(".")[2] for name in found}) == ["attn_output", "attn_qkv", "ffn_down", "ffn_up"]
    a, b = found["blk.1.attn_qkv.weight.lora_a"], found["blk.1.attn_qkv.weight.lora_b"]
    parts = np.concatenate([phi3.scale * effect(phi3.matrices[part]) for part in PARTS])
    np.testing.assert_allclose(phi3.alpha / a.shape[0] * effect((a, b)), parts, rtol=1e-6, atol=1e-6)


def test_lora_trained_on_the_whole_gives_every_part_all_of_a(phi3):
    rng = np.random.default_rng(3)
    for rank in (2, 12):  # 12: as high as that of an adapter of rank 3 on the parts, and yet not one
        a, b = rng.standard_normal((rank, 12), dtype=np.float32), rng.standard_normal((20, rank), dtype=np.float32)
        parts = parts_of(PHI3, QKV, a, b, 3)
        assert list(parts) == PARTS
        assert all(part_a is a for part_a, _ in parts.values())
        np.testing.assert_array_equal(np.concatenate([part_b for _, part_b in parts.values()]), b)


def test_part_of_a_fused_matrix_cannot_be_written_alone(tmp_path, phi3):
    some = {module: pair for module, pair in phi3.matrices.items() if not module.endswith("v_proj")}
    partial = dataclasses.replace(phi3, matrices=some)
    with pytest.raises(UnsupportedAdapter, match=r"v_proj: not adapted.*qkv_proj.*all of them or none"):
        save_gguf_adapter(tmp_path / "a", partial, version=1, parent=0, base_sha256="0" * 64)
    with pytest.raises(UnsupportedAdapter, match="all of them or none"):
        save_peft(tmp_path, partial, "tiny")
    assert list(tmp_path.iterdir()) == []


def test_a_module_that_the_base_has_only_inside_another_is_refused(phi3, base):
    with pytest.raises(MismatchedAdapter, match=r"stores it as part of self_attn\.qkv_proj"):
        stored_shape(PHI3, PARTS[0])
    with pytest.raises(MismatchedAdapter, match="not a module that can be adapted"):
        stored_shape(base, QKV)
