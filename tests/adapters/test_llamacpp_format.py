"""llama.cpp LoRA files, and the facts of base model files."""

from __future__ import annotations

import dataclasses
import hashlib

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.errors import BaseModelError, MismatchedAdapter, NotFiniteAdapter, UnreadableAdapter, UnsupportedAdapter
from adapters.gguf_header import load_header
from adapters.llamacpp_format import (
    load_gguf_adapter,
    permute_rows,
    read_base_shape,
    save_gguf_adapter,
    unpermute_rows,
)

BASE_SHA256 = "ab" * 32


@pytest.fixture
def path(tmp_path, weights):
    """A good adapter file of `weights`."""
    file = tmp_path / "adapter.gguf"
    save_gguf_adapter(file, weights, version=7, parent=5, base_sha256=BASE_SHA256)
    return file


def write_base(path, **changes):
    """A model file that holds metadata and one tensor, as small as a base model can be."""
    arch = changes.pop("arch", "llama")
    values = {
        "block_count": 3, "embedding_length": 24, "feed_forward_length": 40, "attention.head_count": 4,
        "attention.head_count_kv": 2, "attention.key_length": 8, "vocab_size": 64,
    }  # fmt: skip
    values.update(changes)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type("model")
    for name, value in values.items():
        if value is not None:
            writer.add_uint32(f"{arch}.{name}", value)
    writer.add_array("tokenizer.ggml.tokens", [f"token {n}" for n in range(2000)])
    writer.add_tensor("token_embd.weight", np.zeros((64, 24), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ------------------------------------------------------------------------------------------------------- adapters


@given(heads=st.integers(1, 6), half=st.integers(1, 9), rank=st.integers(1, 5))
def test_unpermute_undoes_permute(heads, half, rank):
    b = np.arange(heads * half * 2 * rank, dtype=np.float32).reshape(-1, rank)
    assert np.array_equal(unpermute_rows(permute_rows(b, heads), heads), b)
    assert np.array_equal(permute_rows(unpermute_rows(b, heads), heads), b)


def test_permute_interleaves_the_two_halves_of_each_head():
    # Two heads of width 4: rows 0 1 | 2 3 of a head become 0 2 1 3.
    b = np.arange(8, dtype=np.float32).reshape(8, 1)
    assert permute_rows(b, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_what_was_saved_is_loaded_bit_for_bit_with_its_lineage(path, weights, base):
    loaded, lineage = load_gguf_adapter(path, base)
    assert loaded.sha256() == weights.sha256()
    assert (lineage.version, lineage.parent, lineage.base_sha256) == (7, 5, BASE_SHA256)


def test_an_adapter_without_parent_says_so(tmp_path, weights, base):
    save_gguf_adapter(tmp_path / "a", weights, version=1, parent=None, base_sha256=BASE_SHA256)
    assert load_gguf_adapter(tmp_path / "a", base)[1].parent is None


def test_only_b_of_q_and_k_is_permuted(path, weights):
    reader = gguf.GGUFReader(path)
    stored = {tensor.name: tensor.data for tensor in reader.tensors}
    heads = {"attn_q": ("self_attn.q_proj", 4), "attn_k": ("self_attn.k_proj", 2)}
    for tensor, (kind, n) in heads.items():
        a, b = weights.matrices[f"model.layers.1.{kind}"]
        assert np.array_equal(stored[f"blk.1.{tensor}.weight.lora_a"], a)
        assert not np.array_equal(stored[f"blk.1.{tensor}.weight.lora_b"], b)
        assert np.array_equal(stored[f"blk.1.{tensor}.weight.lora_b"], permute_rows(b, n))
    for tensor, kind in {"attn_v": "self_attn.v_proj", "ffn_down": "mlp.down_proj"}.items():
        assert np.array_equal(stored[f"blk.1.{tensor}.weight.lora_b"], weights.matrices[f"model.layers.1.{kind}"][1])


def test_an_architecture_with_split_rotary_keeps_its_rows(tmp_path, build_weights, base):
    qwen = dataclasses.replace(base, arch="qwen2")
    weights = build_weights(shape=qwen)
    save_gguf_adapter(tmp_path / "a", weights, version=1, parent=None, base_sha256=BASE_SHA256)
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "a").tensors}
    assert np.array_equal(stored["blk.1.attn_q.weight.lora_b"], weights.matrices["model.layers.1.self_attn.q_proj"][1])
    assert load_gguf_adapter(tmp_path / "a", qwen)[0].sha256() == weights.sha256()


def test_the_keys_that_llama_cpp_needs_are_there(path, weights):
    metadata = load_header(path).metadata
    assert metadata["general.type"] == "adapter"
    assert metadata["general.architecture"] == "llama"
    assert metadata["adapter.type"] == "lora"
    assert metadata["adapter.lora.alpha"] == weights.alpha
    assert metadata["edged.policy_version"] == "7"
    assert metadata["edged.parent"] == "5"
    assert metadata["edged.base_sha256"] == BASE_SHA256


def test_the_bytes_of_the_file_are_golden(tmp_path, base, build_weights):
    """A change of the format must be meant: it changes what older versions can load."""
    counting = build_weights(rank=1, alpha=2.0, modules=["model.layers.0.self_attn.k_proj"])
    a = np.arange(24, dtype=np.float32).reshape(1, 24)
    b = np.arange(16, dtype=np.float32).reshape(16, 1)
    fixed = dataclasses.replace(counting, matrices={"model.layers.0.self_attn.k_proj": (a, b)})
    save_gguf_adapter(tmp_path / "a", fixed, version=1, parent=0, base_sha256=BASE_SHA256)
    data = (tmp_path / "a").read_bytes()
    assert data[:8] == b"GGUF\x03\x00\x00\x00"
    assert data.endswith(permute_rows(b, 2).tobytes() + bytes(-len(b.tobytes()) % 32))
    assert hashlib.sha256(data).hexdigest() == "73540a713be41cd9b2dfedee2c126ab36b30a0f3ecf3b2b8cfee93faed02b266"


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_a_truncated_adapter_is_refused(path, base, keep):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(UnreadableAdapter, match="not a whole GGUF file"):
        load_gguf_adapter(path, base)


def test_a_missing_adapter_is_refused(tmp_path, base):
    with pytest.raises(UnreadableAdapter, match="cannot be read"):
        load_gguf_adapter(tmp_path / "nothing.gguf", base)


def test_a_model_is_not_an_adapter(tmp_path, base):
    write_base(tmp_path / "model.gguf")
    with pytest.raises(UnreadableAdapter, match="not a LoRA adapter"):
        load_gguf_adapter(tmp_path / "model.gguf", base)


def test_an_adapter_of_another_architecture_is_refused(path, base):
    with pytest.raises(MismatchedAdapter, match="'llama', the base model is 'qwen2'"):
        load_gguf_adapter(path, dataclasses.replace(base, arch="qwen2"))


def test_an_adapter_of_another_width_is_refused(path, base):
    with pytest.raises(MismatchedAdapter, match="trained on this base"):
        load_gguf_adapter(path, dataclasses.replace(base, n_embd=48))


def test_nan_in_an_adapter_is_refused(tmp_path, weights, base):
    module, (a, b) = next(iter(weights.matrices.items()))
    poisoned = dataclasses.replace(weights, matrices={**weights.matrices, module: (a, b * np.float32(np.nan))})
    save_gguf_adapter(tmp_path / "a", poisoned, version=1, parent=None, base_sha256=BASE_SHA256)
    with pytest.raises(NotFiniteAdapter):
        load_gguf_adapter(tmp_path / "a", base)


@pytest.mark.parametrize("name", ["output.weight.lora_a", "token_embd.weight.lora_a", "blk.0.attn_norm.weight"])
def test_a_tensor_that_cannot_be_served_is_refused_by_name(tmp_path, base, name):
    writer = gguf.GGUFWriter(tmp_path / "a", "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0)
    writer.add_tensor(name, np.zeros((2, 24), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedAdapter, match=name):
        load_gguf_adapter(tmp_path / "a", base)


# ---------------------------------------------------------------------------------------------------- base models


def test_the_shape_of_a_base_model_is_read(tmp_path, base):
    write_base(tmp_path / "model.gguf")
    assert read_base_shape(tmp_path / "model.gguf") == base


def test_head_width_kv_heads_and_vocabulary_have_the_formats_defaults(tmp_path):
    changes = {"attention.key_length": None, "attention.head_count_kv": None, "vocab_size": None}
    write_base(tmp_path / "model.gguf", **changes)
    shape = read_base_shape(tmp_path / "model.gguf")
    assert (shape.head_dim, shape.n_kv_heads, shape.n_vocab) == (6, 4, 2000)


def test_the_packaged_model_is_read(packaged_model):
    shape = read_base_shape(packaged_model)
    assert dataclasses.astuple(shape) == ("llama", 30, 576, 9, 3, 64, 1536, 49152)


def test_a_base_without_a_needed_field_is_refused_and_the_field_named(tmp_path):
    write_base(tmp_path / "model.gguf", feed_forward_length=None)
    with pytest.raises(BaseModelError, match=r"llama\.feed_forward_length is None"):
        read_base_shape(tmp_path / "model.gguf")


def test_a_base_of_an_unknown_architecture_is_refused(tmp_path):
    write_base(tmp_path / "model.gguf", arch="mamba")
    with pytest.raises(BaseModelError, match="'mamba' is not supported"):
        read_base_shape(tmp_path / "model.gguf")


def test_an_adapter_is_not_a_base(path):
    with pytest.raises(BaseModelError, match="of type 'adapter', not a model"):
        read_base_shape(path)


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_base_is_refused(tmp_path, keep):
    path = tmp_path / "model.gguf"
    write_base(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(BaseModelError, match="not a whole GGUF model"):
        read_base_shape(path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 a zip archive")
    with pytest.raises(BaseModelError, match="does not begin with GGUF"):
        read_base_shape(path)


def test_a_missing_base_is_refused(tmp_path):
    with pytest.raises(BaseModelError, match="check the path"):
        read_base_shape(tmp_path / "nothing.gguf")
