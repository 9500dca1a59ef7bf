"""PEFT folders: round trips, folding of scales, refusals, and what PEFT itself makes of them."""

from __future__ import annotations

import dataclasses
import json
import os

import numpy as np
import pytest
import safetensors.numpy

from adapters.errors import MismatchedAdapter, NotFiniteAdapter, UnreadableAdapter, UnsupportedAdapter
from adapters.peft import CONFIG_FILE, WEIGHTS_FILE, load_peft, save_peft


@pytest.fixture
def folder(tmp_path, weights):
    """A good PEFT folder of `weights`."""
    save_peft(tmp_path, weights, "tiny")
    return tmp_path


def change_config(folder, **changes):
    path = folder / CONFIG_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(folder, change):
    path = folder / WEIGHTS_FILE
    path.write_bytes(safetensors.numpy.save(change(safetensors.numpy.load(path.read_bytes()))))


def key(module, factor):
    return f"base_model.model.{module}.lora_{factor}.weight"


# ---------------------------------------------------------------------------------------------------- round trips


def test_what_was_saved_is_loaded_bit_for_bit(folder, weights, base):
    assert load_peft(folder, base).sha256() == weights.sha256()


def test_the_same_weights_give_the_same_bytes(folder, weights, tmp_path_factory):
    again = tmp_path_factory.mktemp("again")
    save_peft(again, weights, "tiny")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_an_uneven_choice_of_modules_survives(tmp_path, build_weights, base):
    uneven = build_weights(modules=["model.layers.0.mlp.down_proj", "model.layers.2.self_attn.q_proj"])
    save_peft(tmp_path, uneven, "tiny")
    assert load_peft(tmp_path, base).sha256() == uneven.sha256()


def test_the_config_names_modules_and_layers_as_loaders_expect(folder):
    config = json.loads((folder / CONFIG_FILE).read_text())
    assert config["task_type"] == "CAUSAL_LM"
    assert config["layers_to_transform"] == [1, 2]
    assert set(config["target_modules"]) == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip


@pytest.mark.parametrize("modules", [None, ["model.layers.0.mlp.down_proj", "model.layers.2.self_attn.q_proj"]])
def test_peft_loads_the_folder_and_computes_our_effect(tmp_path, build_weights, base, modules):
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    weights = build_weights(modules=modules)
    save_peft(tmp_path, weights, "tiny")
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=base.n_vocab,
            hidden_size=base.n_embd,
            intermediate_size=base.n_ff,
            num_hidden_layers=base.n_layers,
            num_attention_heads=base.n_heads,
            num_key_value_heads=base.n_kv_heads,
            head_dim=base.head_dim,
        )
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged = peft.PeftModel.from_pretrained(model, str(tmp_path)).merge_and_unload().state_dict()
    changed = {name for name, tensor in merged.items() if not torch.equal(tensor, before[name])}
    assert changed == {f"{module}.weight" for module in weights.matrices}
    for module, (a, b) in weights.matrices.items():
        moved = (merged[f"{module}.weight"] - before[f"{module}.weight"]).numpy()
        np.testing.assert_allclose(moved, weights.scale * b @ a, rtol=1e-4, atol=1e-4)


# -------------------------------------------------------------------------------------------------------- folding


def expected_norm(weights, factors):
    """Norm of the effect when each module's is multiplied by its factor (1 where none is given)."""
    norms = [
        weights.scale * np.linalg.norm(b.astype(np.float64) @ a) * factors.get(module, 1.0)
        for module, (a, b) in weights.matrices.items()
    ]
    return float(np.linalg.norm(norms))


def test_rslora_is_folded_into_alpha_and_the_matrices_stay(folder, weights, base):
    change_config(folder, use_rslora=True)
    loaded = load_peft(folder, base)
    assert loaded.alpha == pytest.approx(weights.alpha * np.sqrt(weights.rank), rel=1e-12)
    for module, (a, b) in weights.matrices.items():
        assert np.array_equal(loaded.matrices[module][0], a)
        assert np.array_equal(loaded.matrices[module][1], b)


def test_alpha_pattern_is_folded_into_b(folder, weights, base):
    change_config(folder, alpha_pattern={"q_proj": 12, r"layers\.1\.mlp\.up_proj": 3.0})
    factors = {
        "model.layers.1.self_attn.q_proj": 2.0,
        "model.layers.2.self_attn.q_proj": 2.0,
        "model.layers.1.mlp.up_proj": 0.5,
    }
    loaded = load_peft(folder, base)
    assert loaded.norm() == pytest.approx(expected_norm(weights, factors), rel=1e-6)
    for module, factor in factors.items():
        np.testing.assert_array_equal(loaded.matrices[module][1], weights.matrices[module][1] * np.float32(factor))


def test_a_module_of_lower_rank_is_padded_without_changing_its_effect(folder, weights, base):
    module = "model.layers.2.mlp.down_proj"
    a, b = weights.matrices[module]
    change_tensors(
        folder,
        lambda tensors: {**tensors, key(module, "A"): a[:1].copy(), key(module, "B"): b[:, :1].copy()},
    )
    change_config(folder, rank_pattern={module: 1})
    loaded = load_peft(folder, base)
    assert loaded.rank == weights.rank
    loaded_a, loaded_b = loaded.matrices[module]
    # PEFT divides alpha by the module's own rank, 1.
    np.testing.assert_allclose(loaded.scale * loaded_b @ loaded_a, weights.alpha * b[:, :1] @ a[:1], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_files_are_widened(folder, weights, base, dtype):
    tensors = {}
    header, body = {}, b""
    for module, pair in weights.matrices.items():
        for factor, matrix in zip("AB", pair, strict=True):
            if dtype == "F16":
                raw, wide = matrix.astype("<f2").tobytes(), matrix.astype(np.float16).astype(np.float32)
            else:
                top = (matrix.view("<u4") >> 16).astype("<u2")
                raw, wide = top.tobytes(), (top.astype("<u4") << 16).view("<f4")
            start, body = len(body), body + raw
            header[key(module, factor)] = {
                "dtype": dtype, "shape": list(matrix.shape), "data_offsets": [start, len(body)],
            }  # fmt: skip
            tensors[module, factor] = wide
    head = json.dumps(header).encode()
    (folder / WEIGHTS_FILE).write_bytes(len(head).to_bytes(8, "little") + head + body)
    loaded = load_peft(folder, base)
    for (module, factor), wide in tensors.items():
        np.testing.assert_array_equal(loaded.matrices[module]["AB".index(factor)], wide)


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "only LORA"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "lora_only"}, "trains biases"),
        ({"lora_bias": True}, "bias on B"),
        ({"modules_to_save": ["lm_head"]}, "fully trained modules"),
        ({"fan_in_fan_out": True}, "transposed"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "experts"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "replicated layers"),
        ({"trainable_token_indices": [5]}, "token embeddings"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed the base model"),
    ],
)
def test_a_kind_of_adapter_that_cannot_be_served_is_refused_by_name(folder, base, changes, message):
    change_config(folder, **changes)
    with pytest.raises(UnsupportedAdapter, match=message):
        load_peft(folder, base)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("base_model.model.lm_head.lora_A.weight", "output head cannot be adapted"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embeddings and the output head"),
        ("base_model.model.model.layers.1.self_attn.q_proj.lora_magnitude_vector", "without DoRA"),
        ("base_model.model.model.layers.1.self_attn.q_proj.lora_B.bias", "no bias"),
    ],
)
def test_a_tensor_that_is_not_a_lora_matrix_is_refused_by_name(folder, base, name, message):
    change_tensors(folder, lambda tensors: {**tensors, name: np.zeros((3, 24), np.float32)})
    with pytest.raises(UnsupportedAdapter, match=message):
        load_peft(folder, base)


def test_nan_is_refused(folder, base):
    def poison(tensors):
        tensors[key("model.layers.1.mlp.up_proj", "B")][0, 0] = np.nan
        return tensors

    change_tensors(folder, poison)
    with pytest.raises(NotFiniteAdapter, match=r"model\.layers\.1\.mlp\.up_proj"):
        load_peft(folder, base)


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_refused(folder, base, keep):
    path = folder / WEIGHTS_FILE
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(UnreadableAdapter, match="truncated or not safetensors"):
        load_peft(folder, base)


def test_a_pickle_is_never_opened(folder, base):
    (folder / WEIGHTS_FILE).rename(folder / "adapter_model.bin")
    with pytest.raises(UnreadableAdapter, match="a pickle, which can run code"):
        load_peft(folder, base)


def test_an_adapter_of_another_model_is_refused_with_both_shapes(folder, base):
    with pytest.raises(MismatchedAdapter, match="trained on this base"):
        load_peft(folder, dataclasses.replace(base, n_embd=48))


def test_an_adapter_of_a_deeper_model_is_refused(folder, base):
    with pytest.raises(MismatchedAdapter, match="has 2 layers"):
        load_peft(folder, dataclasses.replace(base, n_layers=2))


def test_a_module_with_one_matrix_only_is_refused(folder, base):
    change_tensors(
        folder, lambda tensors: {k: v for k, v in tensors.items() if k != key("model.layers.2.mlp.up_proj", "B")}
    )
    with pytest.raises(UnreadableAdapter, match="has no lora_B"):
        load_peft(folder, base)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 0}, "r is 0"),
        ({"r": "8"}, "r is '8'"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"lora_alpha": True}, "lora_alpha is True"),
        ({"alpha_pattern": {"q_proj": True}}, "expected a positive number"),
        ({"rank_pattern": {"q_proj": True}}, "expected a positive number"),
        ({"alpha_pattern": {"q_proj": -1}}, "expected a positive number"),
        ({"rank_pattern": {"q_proj(": 4}}, "bad pattern"),
        ({"rank_pattern": ["q_proj"]}, "must be an object"),
    ],
)
def test_a_damaged_config_is_refused(folder, base, changes, message):
    change_config(folder, **changes)
    with pytest.raises(UnreadableAdapter) as caught:
        load_peft(folder, base)
    assert message in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe"])
def test_a_config_that_is_not_a_json_object_is_refused(folder, base, content):
    (folder / CONFIG_FILE).write_bytes(content)
    with pytest.raises(UnreadableAdapter, match=CONFIG_FILE):
        load_peft(folder, base)


def test_a_missing_folder_is_refused(tmp_path, base):
    with pytest.raises(UnreadableAdapter, match="give the path of a PEFT folder"):
        load_peft(tmp_path / "nowhere", base)


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(folder, base, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(UnreadableAdapter, match="ordinary file") as caught:
        load_peft(folder, base)
    assert "JSON" not in str(caught.value)


def test_a_scale_that_float32_cannot_hold_is_unreadable(folder, base):
    change_config(folder, lora_alpha=1e300)
    with pytest.raises(UnreadableAdapter, match="lora_alpha"):
        load_peft(folder, base)


@pytest.mark.parametrize("text", ["[" * 200_000, " " * 2_000_000], ids=["deep", "large"])
def test_a_configuration_that_no_adapter_has_is_unreadable(folder, base, text):
    (folder / CONFIG_FILE).write_text(text)
    with pytest.raises(UnreadableAdapter, match=CONFIG_FILE):
        load_peft(folder, base)
