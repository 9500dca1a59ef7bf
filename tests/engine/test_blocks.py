"""Unpacking on tensors against the `gguf` package's, bit by bit, for every type that is held quantised."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from adapters.gguf_header import PACKED_TYPES
from engine import blocks
from engine.blocks import UNPACKERS, Blocks, unpack_rows

N_ROWS, N_BLOCKS = 5, 3


def random_rows(kind: GGMLQuantizationType, seed: int = 0) -> np.ndarray:
    """uint8[N_ROWS, N_BLOCKS blocks]: any bytes, but scales that are numbers."""
    n_bytes = GGML_QUANT_SIZES[kind][1]
    chance = np.random.default_rng(seed)
    rows = chance.integers(0, 256, (N_ROWS * N_BLOCKS, n_bytes), dtype=np.uint8)
    while True:  # any two bytes may be a scale: none of them may be infinite or NaN
        odd = rows[:, 1::2] & 0x7C == 0x7C
        even = rows[:, 0::2] & 0x7C == 0x7C
        if not (odd.any() or even.any()):
            return rows.reshape(N_ROWS, -1)
        rows[:, 1::2][odd] = chance.integers(0, 256, odd.sum(), dtype=np.uint8)
        rows[:, 0::2][even] = chance.integers(0, 256, even.sum(), dtype=np.uint8)


def test_the_types_that_are_planned_for_are_those_that_can_be_unpacked():
    assert set(UNPACKERS) == PACKED_TYPES


@pytest.mark.parametrize("kind", UNPACKERS, ids=lambda kind: kind.name)
def test_every_type_is_unpacked_to_the_numbers_of_the_gguf_package(kind):
    rows = random_rows(kind)
    expected = gguf.dequantize(rows, kind)
    assert np.isfinite(expected).all()
    assert torch.equal(unpack_rows(torch.from_numpy(rows), kind), torch.from_numpy(expected))


def test_a_matrix_is_unpacked_in_slices_to_its_dtype(monkeypatch):
    kind = GGMLQuantizationType.Q4_K
    rows = random_rows(kind)
    monkeypatch.setitem(blocks.SLICE_NUMBERS, "cpu", 2 * N_BLOCKS * 256)  # two rows
    packed = Blocks(torch.from_numpy(rows), kind, torch.bfloat16)
    assert packed.shape == (N_ROWS, N_BLOCKS * 256)
    assert packed.n_bytes == rows.size
    assert torch.equal(packed.unpack(), torch.from_numpy(gguf.dequantize(rows, kind)).bfloat16())


def test_parts_of_a_fused_matrix_share_its_memory():
    rows = random_rows(GGMLQuantizationType.Q8_0)
    packed = Blocks(torch.from_numpy(rows), GGMLQuantizationType.Q8_0, torch.float32)
    upper, lower = packed.split([2, 3])
    assert torch.equal(torch.cat((upper.unpack(), lower.unpack())), packed.unpack())
    assert lower.data.untyped_storage().data_ptr() == packed.data.untyped_storage().data_ptr()
