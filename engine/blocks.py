"""Quantised weights in the blocks that GGUF files store them in, on any device, unpacked anew wherever they are used.

A base held so takes as much memory as its file. What a use costs is bandwidth: a matrix is unpacked in slices of
rows, so of plain numbers there is one matrix at a time, and the float32 of one slice. Unpacking is llama.cpp's
arithmetic in the order of the `gguf` package, so the numbers are bit by bit those of a base that was unpacked once
(`engine.dequantize`), and so is an update: how the base is held changes memory and time, no result. Compiled
(`engine.fusion`), it is one kernel from bytes to numbers, which may round a product and a sum together.

Not here: quantising; types that only lookup tables of ggml can unpack (IQ1 to IQ3), which are held as plain numbers.

Dimension letters: O output and I input width of a map, N blocks, B numbers and S bytes of one block.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.fusion import fusible

# Numbers that are unpacked at once. On a card a slice is a handful of kernels, so fewer and larger ones.
SLICE_NUMBERS = {"cpu": 1 << 20, "cuda": 1 << 24}
_IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

Unpacker = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix [O, I] in blocks.

    Attributes:
        data: uint8[O, bytes of a row]; rows are whole blocks.
        type: ggml's, one of UNPACKERS. dtype: of the numbers that it is unpacked to.
    """

    data: torch.Tensor
    type: GGMLQuantizationType
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """[O, I]."""
        n_numbers, n_bytes = GGML_QUANT_SIZES[self.type]
        return self.data.shape[0], self.data.shape[1] // n_bytes * n_numbers

    @property
    def n_bytes(self) -> int:
        return self.data.numel()

    def split(self, heights: Sequence[int]) -> tuple[Blocks, ...]:
        """The rows in parts, which share this one's memory."""
        return tuple(dataclasses.replace(self, data=part) for part in self.data.split(list(heights)))

    def unpack(self) -> torch.Tensor:
        """[O, I] of `dtype`, new at every call."""
        n_rows, n_columns = self.shape
        numbers = self.data.new_empty(n_rows, n_columns, dtype=self.dtype)
        step = max(1, SLICE_NUMBERS[self.data.device.type] // n_columns)
        for start in range(0, n_rows, step):
            rows = slice(start, start + step)
            numbers[rows].copy_(unpack_rows(self.data[rows], self.type))
        return numbers


def unpack_rows(data: torch.Tensor, kind: GGMLQuantizationType) -> torch.Tensor:
    """float32[O, I] of uint8[O, bytes of a row]."""
    _, n_bytes = GGML_QUANT_SIZES[kind]
    return UNPACKERS[kind](data.reshape(-1, n_bytes)).view(data.shape[0], -1)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """float32[N, 1]: the float16 at byte `at` of each block."""
    return blocks[:, at : at + 2].view(torch.float16).float()


def _fields(values: torch.Tensor, n_bits: int) -> torch.Tensor:
    """uint8[..., 8 / n_bits, C] of bytes [..., C]: their fields of `n_bits`, lowest first."""
    mask = (1 << n_bits) - 1
    return torch.stack([(values >> shift) & mask for shift in range(0, 8, n_bits)], dim=-2)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """uint8[N, 8 C] of bytes [N, C]: their bits, lowest first, byte by byte."""
    return torch.stack([(values >> shift) & 1 for shift in range(8)], dim=-1).flatten(1)


@fusible
def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_fields(blocks[:, 2:], 4).flatten(1).float() - 8.0)


@fusible
def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _fields(blocks[:, 4:], 4).flatten(1).float() + _half(blocks, 2)


@fusible
def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    low, high = _fields(blocks[:, 6:], 4).flatten(1), _bits(blocks[:, 2:6])
    return _half(blocks, 0) * ((low | (high << 4)).float() - 16.0)


@fusible
def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    low, high = _fields(blocks[:, 8:], 4).flatten(1), _bits(blocks[:, 4:8])
    return _half(blocks, 0) * (low | (high << 4)).float() + _half(blocks, 2)


@fusible
def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _half(blocks, 0)


@fusible
def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = blocks[:, :16]
    factor = (_half(blocks, 80) * (scales & 15).float())[:, :, None]  # [N, 16, 1]
    offset = (_half(blocks, 82) * (scales >> 4).float())[:, :, None]
    levels = _fields(blocks[:, 16:80].unflatten(1, (2, 32)), 2)  # [N, 2, 4, 32]
    return (factor * levels.reshape(-1, 16, 16).float() - offset).flatten(1)


@fusible
def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    packed = blocks[:, 96:108]
    low, high = _fields(packed[:, :8], 4).flatten(1), _fields(packed[:, 8:], 2).flatten(1)
    factor = (_half(blocks, 108) * ((low | (high << 4)).float() - 32.0))[:, :, None]  # [N, 16, 1]
    levels = _fields(blocks[:, 32:96].unflatten(1, (2, 32)), 2).reshape(-1, 16, 16).float()
    # A bit of the mask that is not set lowers the level by 4.
    lowered = (_fields(blocks[:, None, :32], 1).reshape(-1, 16, 16) ^ 1).float()
    return (factor * (levels - 4.0 * lowered)).flatten(1)


def _scales_of_8(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32[N, 8] twice: the factors and offsets of 6 bits that Q4_K and Q5_K pack into 12 bytes."""
    factors, offsets, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    factor = torch.cat((factors & 63, (rest & 15) | ((factors >> 2) & 48)), dim=1)
    offset = torch.cat((offsets & 63, (rest >> 4) | ((offsets >> 2) & 48)), dim=1)
    return factor.float(), offset.float()


@fusible
def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    factor, offset = _scales_of_8(blocks[:, 4:16])
    levels = _fields(blocks[:, 16:].unflatten(1, (4, 32)), 4).reshape(-1, 8, 32).float()
    return ((_half(blocks, 0) * factor)[:, :, None] * levels - (_half(blocks, 2) * offset)[:, :, None]).flatten(1)


@fusible
def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    factor, offset = _scales_of_8(blocks[:, 4:16])
    low = _fields(blocks[:, 48:].unflatten(1, (4, 32)), 4).reshape(-1, 8, 32)
    high = _fields(blocks[:, None, 16:48], 1).reshape(-1, 8, 32)
    levels = (low | (high << 4)).float()
    return ((_half(blocks, 0) * factor)[:, :, None] * levels - (_half(blocks, 2) * offset)[:, :, None]).flatten(1)


@fusible
def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    factor = (_half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float())[:, :, None]  # [N, 16, 1]
    low = _fields(blocks[:, :128].unflatten(1, (2, 64)), 4).reshape(-1, 16, 16)
    high = _fields(blocks[:, 128:192].unflatten(1, (2, 32)), 2).reshape(-1, 16, 16)
    return (factor * ((low | (high << 4)).float() - 32.0)).flatten(1)


@functools.lru_cache
def _iq4_levels(device: torch.device) -> torch.Tensor:
    return torch.tensor(_IQ4_LEVELS, dtype=torch.float32, device=device)


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _iq4_nl_by(blocks, _iq4_levels(blocks.device))


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    return _iq4_xs_by(blocks, _iq4_levels(blocks.device))


@fusible
def _iq4_nl_by(blocks: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * levels[_fields(blocks[:, 2:], 4).flatten(1).int()]


@fusible
def _iq4_xs_by(blocks: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    low = _fields(blocks[:, 4:8, None], 4).flatten(1)  # [N, 8]
    high = torch.stack([(blocks[:, 2:4] >> shift) & 3 for shift in range(0, 8, 2)], dim=-1).flatten(1)
    factor = (_half(blocks, 0) * ((low | (high << 4)).float() - 32.0))[:, :, None]
    numbers = _fields(blocks[:, 8:].unflatten(1, (8, 16)), 4).reshape(-1, 8, 32)
    return (factor * levels[numbers.int()]).flatten(1)


_T = GGMLQuantizationType
# float32[N, B] of uint8[N, S]; of `adapters.gguf_header.PACKED_TYPES`.
UNPACKERS: Mapping[GGMLQuantizationType, Unpacker] = {
    _T.Q4_0: _q4_0,
    _T.Q4_1: _q4_1,
    _T.Q5_0: _q5_0,
    _T.Q5_1: _q5_1,
    _T.Q8_0: _q8_0,
    _T.Q2_K: _q2_k,
    _T.Q3_K: _q3_k,
    _T.Q4_K: _q4_k,
    _T.Q5_K: _q5_k,
    _T.Q6_K: _q6_k,
    _T.IQ4_NL: _iq4_nl,
    _T.IQ4_XS: _iq4_xs,
}
