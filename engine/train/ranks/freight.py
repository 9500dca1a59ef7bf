"""What crosses between ranks, as one tensor of bytes: msgpack for what is plain, raw bytes for tensors, never a pickle.

What may cross is listed: numbers, texts, lists, tuples, maps, tensors, and the records in RECORDS. Floats and tensors
keep every bit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import torch

from engine.fault import EngineFault
from engine.train.critic import CriticState, CriticStep
from engine.train.learner import NotFinite, NothingToLearn
from engine.train.logprobs import TokenMeasure
from engine.train.optimise import Part
from engine.train.shortage import OutOfMemory, is_out_of_memory

ALIGN_BYTES = 64
_TENSOR, _TUPLE, _RECORD = range(3)
_LENGTH_BYTES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Setback:
    """How work ended without a result, in one of the ways that every rank must learn of. counts: of NothingToLearn."""

    kind: str
    message: str
    code: str = ""
    counts: dict[str, int] = dataclasses.field(default_factory=dict)

    def exception(self) -> Exception:
        """The exception that it was."""
        match self.kind:
            case "not_finite":
                return NotFinite(self.message)
            case "nothing_to_learn":
                return NothingToLearn(self.message, self.counts)
            case "out_of_memory":
                return OutOfMemory(self.message)
            case _:
                return EngineFault(self.code, self.message)


RECORDS = {cls.__name__: cls for cls in (TokenMeasure, Part, CriticStep, CriticState, Setback)}


def setback_of(error: Exception) -> Setback | None:
    """`error` as it crosses to other ranks; None if it is a bug, which ends its process."""
    if is_out_of_memory(error):
        return Setback("out_of_memory", str(error))
    match error:
        case NotFinite():
            return Setback("not_finite", str(error))
        case NothingToLearn():
            return Setback("nothing_to_learn", str(error), counts=error.skipped)
        case EngineFault():
            return Setback("fault", error.message, error.code)
        case _:
            return None


def pack(value: Any) -> torch.Tensor:
    """uint8[bytes] on the CPU."""
    tensors: list[torch.Tensor] = []

    def extend(part: Any) -> msgpack.ExtType:
        if isinstance(part, torch.Tensor):
            tensors.append(part.detach().cpu().contiguous())
            return msgpack.ExtType(_TENSOR, str(len(tensors) - 1).encode())
        if isinstance(part, tuple):
            return msgpack.ExtType(_TUPLE, plain(list(part)))
        if type(part).__name__ in RECORDS:
            fields = [getattr(part, field.name) for field in dataclasses.fields(part)]
            return msgpack.ExtType(_RECORD, plain([type(part).__name__, fields]))
        raise TypeError(f"a {type(part).__name__} does not cross between ranks; list it in RECORDS")

    def plain(part: Any) -> bytes:
        packed: bytes = msgpack.packb(part, default=extend, strict_types=True)
        return packed

    body = plain(value)
    shapes = [(str(one.dtype).removeprefix("torch."), list(one.shape)) for one in tensors]
    header = msgpack.packb([body, shapes])
    pieces = [_bytes_of(len(header).to_bytes(_LENGTH_BYTES, "little") + header)]
    for one in tensors:
        pieces.append(torch.zeros(-sum(map(len, pieces)) % ALIGN_BYTES, dtype=torch.uint8))
        pieces.append(one.reshape(-1).view(torch.uint8))
    return torch.cat(pieces)


def unpack(data: torch.Tensor, device: torch.device) -> Any:
    """What was packed, with its tensors on `device`, each in memory of its own."""
    start = _LENGTH_BYTES + int.from_bytes(bytes(data[:_LENGTH_BYTES].tolist()), "little")
    body, shapes = msgpack.unpackb(data[_LENGTH_BYTES:start].numpy().tobytes())
    tensors = []
    for name, shape in shapes:
        start += -start % ALIGN_BYTES
        dtype: torch.dtype = getattr(torch, name)
        n_bytes = dtype.itemsize * torch.Size(shape).numel()
        tensors.append(data[start : start + n_bytes].clone().view(dtype).reshape(shape).to(device))
        start += n_bytes

    def restore(kind: int, packed: bytes) -> Any:
        if kind == _TENSOR:
            return tensors[int(packed)]
        value = msgpack.unpackb(packed, ext_hook=restore, strict_map_key=False)
        return tuple(value) if kind == _TUPLE else RECORDS[value[0]](*value[1])

    return msgpack.unpackb(body, ext_hook=restore, strict_map_key=False)


def _bytes_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
