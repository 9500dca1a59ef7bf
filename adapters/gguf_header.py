"""Parse the header of a GGUF file: metadata and the table of tensors, without reading any tensor.

The `gguf` package's reader decodes every tokenizer string, which takes seconds on a real model; this one skips over
long arrays and takes milliseconds. The format is specified in ggml's docs/gguf.md (version 3, little endian; version
2 differs in nothing that is read here).

Everything in the file is untrusted: each length is checked against the bytes that are there before it is used.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32

# Value types: id -> struct format of the fixed-size ones.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# An array longer than this is not read: its length stands in its place (vocabularies and merge lists).
_LONG_ARRAY = 1024
_MAX_DIMENSIONS = 4

Scalar = str | int | float | bool


class GgufError(ValueError):
    """Raised when bytes are not a whole GGUF file; the message says what is wrong and where."""


@dataclasses.dataclass(frozen=True, slots=True)
class SkippedArray:
    """A long array that was not read."""

    length: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One row of the table of tensors.

    Attributes:
        shape: row-major, as numpy has it (a GGUF file states the dimensions the other way round).
        type: ggml's type of the elements.
        offset_bytes, n_bytes: where the data lies in the file.
    """

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset_bytes: int
    n_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """Metadata and tensor table of one GGUF file."""

    metadata: dict[str, Scalar | list[Scalar] | SkippedArray]
    tensors: dict[str, TensorEntry]


# Types whose blocks the trainer can keep and unpack where they are used (`engine.blocks`).
PACKED_TYPES = frozenset(
    GGMLQuantizationType[name]
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
)


def load_header(path: Path) -> GgufHeader:
    """Read the header of the file at `path`, and check that all tensor data that it promises is there.

    Raises:
        GgufError: not a GGUF file, malformed or truncated.
        OSError: the file cannot be opened.
    """
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            raise GgufError("the file is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return parse_header(data)


def packed_block_bytes(header: GgufHeader, element_bytes: int) -> int:
    """What the maps of one decoder block take, on average, where their quantised blocks are kept; 0 if none is
    quantised.

    Args:
        element_bytes: of a number of the maps whose type is not kept.
    """
    maps = [
        (name, tensor) for name, tensor in header.tensors.items() if name.startswith("blk.") and len(tensor.shape) > 1
    ]
    if not any(tensor.type in PACKED_TYPES for _, tensor in maps):
        return 0
    n_blocks = len({name.split(".")[1] for name, _ in maps})
    kept = sum(
        tensor.n_bytes if tensor.type in PACKED_TYPES else math.prod(tensor.shape) * element_bytes for _, tensor in maps
    )
    return -(-kept // n_blocks)


def parse_header(data: mmap.mmap | bytes) -> GgufHeader:
    """The header of the GGUF file whose whole content is `data`. Raises GgufError."""
    cursor = _Cursor(data)
    if cursor.take(4) != MAGIC:
        raise GgufError("it does not begin with GGUF")
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise GgufError(f"GGUF version {version} is not supported (2 and 3 are)")
    n_tensors, n_pairs = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Scalar | list[Scalar] | SkippedArray] = {}
    for _ in range(n_pairs):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    rows = [_parse_row(cursor) for _ in range(n_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise GgufError(f"general.alignment is {alignment!r}")
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in rows:
        entry = _locate(name, shape, kind, data_start + offset)
        if entry.offset_bytes + entry.n_bytes > len(data):
            raise GgufError(
                f"truncated: tensor {name} ends at byte {entry.offset_bytes + entry.n_bytes}, the file has {len(data)}"
            )
        tensors[name] = entry
    return GgufHeader(metadata=metadata, tensors=tensors)


def _parse_row(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    n_dimensions = cursor.scalar("I")
    if n_dimensions > _MAX_DIMENSIONS:
        raise GgufError(f"tensor {name} has {n_dimensions} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(n_dimensions))
    return name, shape[::-1], cursor.scalar("I"), cursor.scalar("Q")


def _locate(name: str, shape: tuple[int, ...], kind: int, offset_bytes: int) -> TensorEntry:
    try:
        ggml_type = GGMLQuantizationType(kind)
    except ValueError:
        raise GgufError(f"tensor {name} has the unknown type {kind}") from None
    block, block_bytes = GGML_QUANT_SIZES[ggml_type]
    n_elements = math.prod(shape)
    if n_elements % block:
        raise GgufError(f"tensor {name}: {n_elements} elements do not fill blocks of {block}")
    return TensorEntry(
        shape=shape, type=ggml_type, offset_bytes=offset_bytes, n_bytes=n_elements // block * block_bytes
    )


class _Cursor:
    """Reads values one after another; a read beyond the end raises GgufError."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data
        self._size = len(data)
        self.position = 0

    def take(self, n_bytes: int) -> bytes:
        self.skip(n_bytes)
        return self._data[self.position - n_bytes : self.position]

    def skip(self, n_bytes: int) -> None:
        if n_bytes > self._size - self.position:
            raise self._truncated()
        self.position += n_bytes

    def _truncated(self) -> GgufError:
        return GgufError(f"truncated: it ends at byte {self._size}, inside its header")

    def scalar(self, fmt: str) -> int:
        value = struct.unpack("<" + fmt, self.take(struct.calcsize("<" + fmt)))[0]
        return value  # type: ignore[no-any-return]  # struct cannot tell its types; callers pass integer formats

    def string(self) -> str:
        raw = self.take(self.scalar("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise GgufError(f"a string before byte {self.position} is not UTF-8") from None

    def value(self, kind: int) -> Scalar | list[Scalar] | SkippedArray:
        if kind != _ARRAY:
            return self._single(kind)
        item_kind, length = self.scalar("I"), self.scalar("Q")
        if length > _LONG_ARRAY:
            self._skip_items(item_kind, length)
            return SkippedArray(length)
        return [self._single(item_kind) for _ in range(length)]

    def _single(self, kind: int) -> Scalar:
        if kind == _STRING:
            return self.string()
        if kind not in _SCALARS:
            raise GgufError(f"value type {kind} before byte {self.position} is unknown")
        return self.scalar(_SCALARS[kind])

    def _skip_items(self, kind: int, length: int) -> None:
        if kind in _SCALARS:
            self.skip(struct.calcsize("<" + _SCALARS[kind]) * length)
        elif kind == _STRING:
            unpack, data, last = struct.Struct("<Q").unpack_from, self._data, self._size - 8
            position = self.position
            for _ in range(length):  # the one hot loop: two hundred thousand strings in a large vocabulary
                if position > last:
                    break
                position += 8 + unpack(data, position)[0]
            else:
                self.skip(position - self.position)
                return
            raise self._truncated()
        else:
            raise GgufError(f"an array before byte {self.position} has the unsupported item type {kind}")
