"""Every family that is loaded is computed as transformers computes it, from its folder and from its GGUF file; whatever
would not be is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from adapters.peft import load_peft, save_peft
from engine.families import FAMILIES, FAMILY_OF_ARCH, inverse_frequencies, parse_config, read_config
from engine.fault import EngineFault
from engine.generate.llamacpp import Model
from engine.lora import Lora, new_lora, weights_of_lora
from engine.models import WEIGHTS_FILE, Base, load_base, load_folder
from engine.protocol import LoraSettings
from engine.train import attention, decoder
from tests.engine.families import END_TEXTS, SERVED, VARIANTS, VOCABULARY, write_family, write_family_gguf

# Longer than every window of the tiny models.
SEQUENCES = ([5, 9, 2, 44, 61, 7], [12, 3], list(range(10, 40)))
# float32 on both sides: what is left is the order of sums. Measured: at most 1.2e-5.
ROUNDING = 5e-5


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def logprobs(base: Base, lora: Lora | None = None) -> list[torch.Tensor]:
    """float32[t, V] of every sequence, packed behind one another."""
    lengths = [len(ids) for ids in SEQUENCES]
    stream = decoder.embed(base, [token for ids in SEQUENCES for token in ids])
    stream = decoder.run_blocks(base, stream, decoder.pack(base, lengths), lora, 0, base.config.shape.n_layers)
    logits = decoder.final_norm(base, stream).float() @ base.head.float().T
    return list(logits.log_softmax(-1).split(lengths))


@torch.no_grad()
def peer_logprobs(model: Any) -> list[torch.Tensor]:
    return [model(torch.tensor([ids])).logits[0].log_softmax(-1) for ids in SEQUENCES]


def largest_gap(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))


def load_gguf(path: Path, cache: Path) -> Base:
    return load_base(str(path), hashlib.sha256(path.read_bytes()).hexdigest(), str(cache), "float32", "cpu")


def effective_lora(base: Base) -> Lora:
    """An adapter on every block whose effect is not zero."""
    lora = new_lora(base.config.shape, LoraSettings(rank=3, alpha=6.0, layers=0), 5, base.device)
    generator = torch.Generator().manual_seed(6)
    for _, b in lora.matrices.values():
        b.normal_(0.0, 0.1, generator=generator)
    return lora


@pytest.mark.parametrize("name", [*SERVED, *VARIANTS])
def test_a_folder_of_every_family_is_computed_as_transformers_does(name: str, tmp_path: Path) -> None:
    model = write_family(tmp_path, name)
    assert largest_gap(logprobs(load_folder(tmp_path, "float32", "cpu")), peer_logprobs(model)) < ROUNDING


@pytest.mark.parametrize("name", ["mistral with a window", "gemma3"])
def test_the_fused_attention_of_long_sequences_keeps_to_the_window_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_family(tmp_path, name)
    monkeypatch.setattr(attention, "SHORT_TOKENS", 0)
    assert largest_gap(logprobs(load_folder(tmp_path, "float32", "cpu")), peer_logprobs(model)) < ROUNDING


def test_a_window_left_out_would_be_seen(tmp_path: Path) -> None:
    model = write_family(tmp_path, "mistral with a window")
    base = load_folder(tmp_path, "float32", "cpu")
    blind = dataclasses.replace(base, blocks=tuple(dataclasses.replace(block, window=None) for block in base.blocks))
    assert largest_gap(logprobs(blind), peer_logprobs(model)) > 1000 * ROUNDING


@pytest.mark.parametrize("name", SERVED)
def test_a_gguf_file_of_every_family_gives_the_weights_and_ends_of_its_folder(name: str, tmp_path: Path) -> None:
    model = write_family(tmp_path / "folder", name)
    path = tmp_path / "model.gguf"
    write_family_gguf(path, model)
    base = load_gguf(path, tmp_path / "cache")
    (cached,) = (tmp_path / "cache").iterdir()
    found, expected = load_file(cached / WEIGHTS_FILE), dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for tensor_name, tensor in expected.items():
        # Norms of Gemma are stored with 1 added, which costs their last digits.
        inexact = name.startswith("gemma") and "norm" in tensor_name
        torch.testing.assert_close(found[tensor_name], tensor.detach(), rtol=0.0, atol=1e-6 if inexact else 0.0)
    assert largest_gap(logprobs(base), peer_logprobs(model)) < ROUNDING
    ends = {VOCABULARY - len(END_TEXTS) + i for i in range(len(END_TEXTS))} | {2}
    assert base.eos_ids == Model(str(path), gpu_layers=0).eos_ids == ends


@pytest.mark.parametrize("name", SERVED)
def test_t_lora_7_an_adapter_of_every_family_has_the_effect_that_peft_gives_its_folder(
    name: str, tmp_path: Path
) -> None:
    model = write_family(tmp_path / "model", name)
    base = load_folder(tmp_path / "model", "float32", "cpu")
    lora, bare = effective_lora(base), peer_logprobs(model)
    weights = weights_of_lora(lora)
    (tmp_path / "adapter").mkdir()
    save_peft(tmp_path / "adapter", weights, name)
    adapted = peft.PeftModel.from_pretrained(model, str(tmp_path / "adapter")).eval()
    assert largest_gap(logprobs(base, lora), peer_logprobs(adapted)) < ROUNDING
    assert largest_gap(logprobs(base, lora), bare) > 1000 * ROUNDING
    assert load_peft(tmp_path / "adapter", base.config.shape).sha256() == weights.sha256()


def test_an_adapter_trained_by_peft_on_fused_matrices_is_read_with_its_effect(tmp_path: Path) -> None:
    model = write_family(tmp_path / "model", "phi3")
    base = load_folder(tmp_path / "model", "float32", "cpu")
    targets = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    settings = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False)
    torch.manual_seed(8)
    adapted = peft.get_peft_model(model, settings).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    read = load_peft(tmp_path / "adapter", base.config.shape)
    assert read.rank == 3
    pairs = {module: (torch.tensor(a), torch.tensor(b)) for module, (a, b) in read.matrices.items()}
    lora = Lora(shape=read.base, rank=read.rank, alpha=read.alpha, matrices=pairs)
    assert largest_gap(logprobs(base, lora), peer_logprobs(adapted)) < 10 * ROUNDING  # its effect is ten times as large


@pytest.mark.parametrize("name", ["gemma", "gemma3", "phi3"])
def test_gradients_of_other_gates_norms_and_windows_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = write_family(tmp_path / "model", name)
    base = load_folder(tmp_path / "model", "float32", "cpu")
    lora = effective_lora(base)
    for parameter in lora.parameters():
        parameter.requires_grad_()
    (tmp_path / "adapter").mkdir()
    save_peft(tmp_path / "adapter", weights_of_lora(lora), name)
    adapted = peft.PeftModel.from_pretrained(model, str(tmp_path / "adapter"), is_trainable=True).eval()
    ids = torch.tensor([SEQUENCES[2]])
    expected = adapted(ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None]).sum()
    expected.backward()  # type: ignore[no-untyped-call]
    logprobs(base, lora)[2][:-1].gather(1, ids[0, 1:, None]).sum().backward()  # type: ignore[no-untyped-call]
    prefix = "base_model.model.model.layers.1."
    peers = {n.removeprefix(prefix): p.grad for n, p in adapted.named_parameters() if n.startswith(prefix)}
    for kind in ("self_attn.o_proj", "mlp.down_proj"):
        for letter, tensor in zip("AB", lora.matrices[f"model.layers.1.{kind}"], strict=True):
            torch.testing.assert_close(tensor.grad, peers[f"{kind}.lora_{letter}.default.weight"], rtol=1e-3, atol=1e-5)


def test_a_chat_models_end_of_turn_is_read_from_the_generation_settings(tmp_path: Path) -> None:
    write_family(tmp_path, "llama")
    assert read_config(tmp_path).eos_ids == {2}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 95]}))
    assert read_config(tmp_path).eos_ids == {2, 95}


def test_configurations_as_they_lie_on_the_hub_mean_what_transformers_takes_them_for(tmp_path: Path) -> None:
    """Older spellings: no rope_parameters, gelu for its approximation, tied embeddings left unsaid."""
    gemma = {"model_type": "gemma", "hidden_act": "gelu", "head_dim": 8, "rope_theta": 5000.0}
    gemma3 = {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 8,
        "rope_theta": 1e6,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 4,
        "query_pre_attn_scalar": 16,
        "num_hidden_layers": 7,
    }
    for changes, config_class in ((gemma, "GemmaConfig"), (gemma3, "Gemma3TextConfig")):
        raw = {**SIZES, **changes}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        peer_config = getattr(transformers, config_class).from_pretrained(tmp_path)
        torch.manual_seed(2)
        peer = getattr(transformers, FAMILIES[changes["model_type"]].model_class)(peer_config).eval()
        peer.save_pretrained(tmp_path / "saved")
        (tmp_path / "saved" / "config.json").write_text(json.dumps(raw))
        base = load_folder(tmp_path / "saved", "float32", "cpu")
        assert base.config.tied
        assert largest_gap(logprobs(base), peer_logprobs(peer)) < ROUNDING


SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
}
LONGROPE = {"type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gemma2"}, "capped by a tanh"),
        ({"model_type": "gemma3"}, "gemma3_text"),
        ({"model_type": "granite"}, "multipliers"),
        ({"model_type": "mamba"}, "knows gemma, gemma3_text, llama"),
        ({"model_type": "gemma", "hidden_act": "relu"}, "'relu'"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "'gelu'"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "'yarn'"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "later tokens"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0, "sliding_window": 4}, "capped logits"),
        ({"model_type": "gemma3_text"}, "no sliding window"),
        ({"model_type": "phi3", "rope_scaling": LONGROPE}, "'longrope'"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.75}, "a part of each head"),
        ({"model_type": "llama", "use_sliding_window": True, "sliding_window": 4}, "sliding window"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "layer_types": ["odd"] * 2},
            "window",
        ),
    ],
)
def test_what_would_not_be_computed_exactly_is_refused_with_its_reason(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(EngineFault, match=reason) as caught:
        parse_config({**SIZES, **change})
    assert caught.value.code == "model_unsupported"


@pytest.mark.parametrize(
    ("name", "keys", "extra", "reason"),
    [
        ("llama", {}, "blk.0.attn_qkv.weight", "neither could an adapter be written"),
        ("phi3", {}, "blk.0.attn_q.weight", "neither could an adapter be written"),
        ("phi3", {}, "blk.0.ffn_gate.weight", "neither could an adapter be written"),
        ("qwen2", {}, "blk.0.ffn_gate_exps.weight", "neither could an adapter be written"),
        ("llama", {}, "blk.0.attn_q_norm.weight", "neither could an adapter be written"),
        ("llama", {}, "blk.0.attn_norm.bias", "neither could an adapter be written"),
        ("phi3", {}, "rope_factors_long.weight", "longrope"),
        ("qwen2", {"attention__sliding_window": 8}, None, "sliding window"),
        ("llama", {"rope__scale_linear": 4}, None, "rope.scale_linear"),
    ],
)
def test_a_gguf_layout_that_an_adapter_cannot_be_written_for_is_refused(
    name: str, keys: dict[str, int], extra: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_family(tmp_path / "folder", name)
    if extra is not None:  # written among the others, just before the file is closed
        write_header = gguf.GGUFWriter.write_header_to_file

        def add_first(writer: gguf.GGUFWriter, *args: Any) -> None:
            writer.add_tensor(extra, np.ones((4, 4), np.float32))
            write_header(writer, *args)

        monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", add_first)
    write_family_gguf(tmp_path / "model.gguf", model, **keys)
    with pytest.raises(EngineFault, match=reason) as caught:
        load_gguf(tmp_path / "model.gguf", tmp_path / "cache")
    assert caught.value.code == "model_unsupported"


def test_every_architecture_is_read_as_its_own_family_and_mistral_as_llama() -> None:
    assert FAMILY_OF_ARCH["llama"] == "llama"
    assert {FAMILIES[name].arch for name in FAMILY_OF_ARCH.values()} == {family.arch for family in FAMILIES.values()}


def test_llama_3s_rotary_scaling_leaves_short_waves_alone_and_stretches_long_ones() -> None:
    scaled = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    raw = {**SIZES, "model_type": "llama", "rope_parameters": {**scaled, "original_max_position_embeddings": 64}}
    found = inverse_frequencies(parse_config(raw).rotaries[0], 8)
    # Waves of 6.3, 62.8, 628 and 6283 tokens; 64 tokens hold 10, 1.02, 0.1 and 0.01 of them.
    share = (64 / (2 * torch.pi * 10) - 1.0) / 3.0
    expected = torch.tensor([1.0, 0.1 * (share + (1 - share) / 8), 0.01 / 8, 0.001 / 8])
    torch.testing.assert_close(found, expected)
