"""A base held in its file's own blocks is the base that is unpacked once: same numbers, less memory."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType

from engine.blocks import Blocks
from engine.fault import EngineFault
from engine.models import Base, Held, load_base
from tests.engine.families import write_family, write_family_gguf


def write_gguf(folder: Path, name: str) -> Path:
    path = folder / "model.gguf"
    write_family_gguf(path, write_family(folder / "folder", name), GGMLQuantizationType.Q8_0)
    return path


def load(path: Path, held: Held, dtype: str = "float32", device: str = "cpu") -> Base:
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return load_base(str(path), sha256, str(path.parent / "cache"), dtype, device, held)


# Rows in another order, fused matrices, norms with an offset, heads with norms.
@pytest.mark.parametrize("name", ["llama", "phi3", "gemma", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_weight_is_that_of_the_base_that_is_unpacked_once(name: str, dtype: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path, name)
    packed, plain = load(path, "quantised", dtype), load(path, "dequantised", dtype)
    assert (packed.config, packed.name, packed.dtype) == (plain.config, plain.name, plain.dtype)
    for ours, theirs in zip(packed.blocks, plain.blocks, strict=True):
        assert torch.equal(ours.attention_norm, theirs.attention_norm)
        for kind, linear in ours.linears.items():
            # Tiny maps of 48 inputs are no whole blocks, and so are not quantised in the file either.
            assert isinstance(linear.stored, Blocks) == (linear.stored.shape[1] == 32)
            assert torch.equal(linear.weight, theirs.linears[kind].weight)
    assert torch.equal(packed.embedding, plain.embedding)
    assert torch.equal(packed.head, plain.head)


def test_on_a_cpu_the_blocks_are_the_mapped_file(tmp_path: Path) -> None:
    base = load(write_gguf(tmp_path, "qwen3"), "quantised")
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path / "model.gguf") in line]
    start, end = (int(address, 16) for address in mapped[0].partition(" ")[0].split("-"))
    up = base.blocks[0].linears["mlp.up_proj"].stored
    assert isinstance(up, Blocks)
    assert start <= up.data.data_ptr() < end
    assert not (tmp_path / "cache").exists()


def test_a_file_that_changed_or_a_folder_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path, "llama")
    with pytest.raises(EngineFault) as caught:
        load_base(str(path), "0" * 64, str(tmp_path), "float32", "cpu", "quantised")
    assert caught.value.code == "model_mismatch"
    with pytest.raises(EngineFault, match="set learn.base_weights to dequantised"):
        load_base(str(tmp_path / "folder"), "", str(tmp_path), "float32", "cpu", "quantised")
