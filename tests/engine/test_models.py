"""Loading the base: the unpacked GGUF equals transformers' own reading, the cache repairs itself, bad files are
named."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from engine.families import CONFIG_FILE
from engine.fault import EngineFault
from engine.models import WEIGHTS_FILE, load_base, load_folder
from tests.engine.train.tiny import write_tiny_model

TINY = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


def write_tiny_gguf(path: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """A random llama of two blocks as a GGUF file, Q8_0 where a matrix can be; the Hugging Face tensors it holds."""
    d, heads, kv_heads, ff, vocabulary = 64, 4, 2, 96, 64
    writer = gguf.GGUFWriter(path, changes.get("arch", "llama"))
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(d)
    writer.add_feed_forward_length(ff)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_eos_token_id(2)
    if "scaling" in changes:
        writer.add_rope_scaling_type(changes["scaling"])
    generator = np.random.default_rng(0)
    expected: dict[str, torch.Tensor] = {}

    def add(name: str, hf_name: str, *shape: int, n_heads: int | None = None) -> None:
        values = generator.normal(0, 0.2, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            values = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
        if n_heads is not None:  # the file has pairs of rows interleaved, Hugging Face has halves
            values = values.reshape(n_heads, -1, 2, shape[1]).swapaxes(1, 2).reshape(shape)
        expected[hf_name] = torch.tensor(values)

    add("token_embd.weight", "model.embed_tokens.weight", vocabulary, d)
    add("output_norm.weight", "model.norm.weight", d)
    for n in range(2):
        block = f"model.layers.{n}."
        add(f"blk.{n}.attn_norm.weight", block + "input_layernorm.weight", d)
        add(f"blk.{n}.ffn_norm.weight", block + "post_attention_layernorm.weight", d)
        add(f"blk.{n}.attn_q.weight", block + "self_attn.q_proj.weight", d, d, n_heads=heads)
        add(f"blk.{n}.attn_k.weight", block + "self_attn.k_proj.weight", d // 2, d, n_heads=kv_heads)
        add(f"blk.{n}.attn_v.weight", block + "self_attn.v_proj.weight", d // 2, d)
        add(f"blk.{n}.attn_output.weight", block + "self_attn.o_proj.weight", d, d)
        add(f"blk.{n}.ffn_gate.weight", block + "mlp.gate_proj.weight", ff, d)
        add(f"blk.{n}.ffn_up.weight", block + "mlp.up_proj.weight", ff, d)
        add(f"blk.{n}.ffn_down.weight", block + "mlp.down_proj.weight", d, ff)
    if "extra" in changes:
        writer.add_tensor(changes["extra"], np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load(path: Path, cache: Path, dtype: str = "float32") -> Any:
    return load_base(str(path), sha256(path), str(cache), dtype, "cpu")


def cached_folder(cache: Path) -> Path:
    (folder,) = cache.iterdir()
    return folder


def test_a_gguf_is_unpacked_to_the_weights_it_holds(tmp_path: Path) -> None:
    expected = write_tiny_gguf(tmp_path / "tiny.gguf")
    base = load(tmp_path / "tiny.gguf", tmp_path / "cache")
    found = load_file(cached_folder(tmp_path / "cache") / WEIGHTS_FILE)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert base.config.tied
    assert base.eos_ids == {2}


@pytest.mark.full  # transformers takes half a minute for it; the tiny file above proves the same arithmetic
@pytest.mark.real_model
def test_the_packaged_model_is_read_exactly_as_transformers_reads_it(packaged_model: Path, tmp_path: Path) -> None:
    load(packaged_model, tmp_path / "cache", "bfloat16")
    folder = cached_folder(tmp_path / "cache")
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        packaged_model.parent,
        gguf_file=packaged_model.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    found, expected = load_file(folder / WEIGHTS_FILE), dict(peer.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    reread = transformers.AutoConfig.from_pretrained(folder)
    for key in ("hidden_size", "rms_norm_eps", "rope_parameters", "num_key_value_heads", "tie_word_embeddings"):
        assert getattr(reread, key) == getattr(peer.config, key)


def test_the_second_load_takes_the_cache_and_a_damaged_cache_is_made_again(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    first = load(tmp_path / "tiny.gguf", tmp_path / "cache")
    weights = cached_folder(tmp_path / "cache") / WEIGHTS_FILE
    inode = weights.stat().st_ino
    load(tmp_path / "tiny.gguf", tmp_path / "cache")
    assert weights.stat().st_ino == inode
    expected = first.blocks[1].linears["mlp.up_proj"].weight.clone()
    data = bytearray(weights.read_bytes())
    data[-100] ^= 0xFF
    weights.unlink()  # the first load still has the old file mapped
    weights.write_bytes(data)
    repaired = load(tmp_path / "tiny.gguf", tmp_path / "cache")
    assert torch.equal(repaired.blocks[1].linears["mlp.up_proj"].weight, expected)


def test_what_a_killed_conversion_left_is_swept_away(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    name = f"base-{sha256(tmp_path / 'tiny.gguf')[:16]}-float32"
    (tmp_path / "cache" / (name + ".tmp")).mkdir(parents=True)
    (tmp_path / "cache" / name).mkdir()
    load(tmp_path / "tiny.gguf", tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [name]


def fault(path: Path, tmp_path: Path, expected_sha256: str | None = None) -> EngineFault:
    with pytest.raises(EngineFault) as caught:
        load_base(str(path), expected_sha256 or sha256(path), str(tmp_path / "cache"), "float32", "cpu")
    return caught.value


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.99])
def test_a_truncated_gguf_is_unreadable(kept: float, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    found = fault(path, tmp_path)
    assert found.code == "model_unreadable"
    assert str(path) in found.message
    assert not list((tmp_path / "cache").glob("*")) if (tmp_path / "cache").exists() else True


def test_a_file_that_is_no_gguf_and_no_file_at_all_are_unreadable(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("hello")
    assert fault(tmp_path / "text.gguf", tmp_path).code == "model_unreadable"
    assert fault(tmp_path / "missing.gguf", tmp_path, "0" * 64).code == "model_unreadable"


def test_a_file_that_changed_since_it_was_hashed_is_a_mismatch(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    assert fault(tmp_path / "tiny.gguf", tmp_path, "0" * 64).code == "model_mismatch"


@pytest.mark.parametrize(
    "changes", [{"arch": "gpt2"}, {"extra": "blk.0.ffn_gate_exps.weight"}, {"scaling": gguf.RopeScalingType.YARN}]
)
def test_a_model_that_would_not_be_computed_exactly_is_unsupported(changes: dict[str, Any], tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", **changes)
    assert fault(tmp_path / "tiny.gguf", tmp_path).code == "model_unsupported"


def test_a_folder_with_missing_or_misshapen_weights_is_unreadable(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    for name, change in (("config", {"intermediate_size": 50}), ("layers", {"num_hidden_layers": 6})):
        folder = Path(shutil.copytree(tmp_path / "model", tmp_path / name))
        config = json.loads((folder / CONFIG_FILE).read_text())
        (folder / CONFIG_FILE).write_text(json.dumps({**config, **change}))
        with pytest.raises(EngineFault) as caught:
            load_folder(folder, "float32", "cpu")
        assert caught.value.code == "model_unreadable"
    (tmp_path / "model" / WEIGHTS_FILE).unlink()
    with pytest.raises(EngineFault, match=r"\.safetensors"):
        load_folder(tmp_path / "model", "float32", "cpu")


def test_loading_imports_neither_transformers_nor_torchs_compiler(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    load(tmp_path / "tiny.gguf", tmp_path / "cache")
    code = (
        "import sys, engine.models, engine.train.job\n"
        f"engine.models.load_base({str(tmp_path / 'tiny.gguf')!r}, {sha256(tmp_path / 'tiny.gguf')!r},"
        f" {str(tmp_path / 'cache')!r}, 'float32', 'cpu')\n"
        "print([m for m in ('transformers', 'peft', 'torch._dynamo', 'llama_cpp') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200, cwd=os.getcwd()
    )
    assert run.stdout.strip() == "[]"
