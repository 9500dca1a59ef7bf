"""Token ids and log-probabilities as compact blobs, and JSON columns.

Ids are int32, log-probabilities float32, both little-endian. An unknown log-probability (None) is written as NaN, so a
missing one can never be taken for 0.0; a NaN that somebody passes in is read back as None too.
"""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

assert [array(code).itemsize for code in "if"] == [4, 4], "this platform's int and float are not 32 bits wide"

_IS_BIG_ENDIAN = sys.byteorder == "big"


def pack_ids(ids: Sequence[int]) -> bytes:
    """Raises OverflowError if an id does not fit int32."""
    return _to_bytes(array("i", ids))


def unpack_ids(blob: bytes) -> tuple[int, ...]:
    """The token ids of `pack_ids`."""
    return tuple(_from_bytes("i", blob))


def pack_logprobs(logprobs: Sequence[float | None]) -> bytes:
    """Rounds each to float32."""
    return _to_bytes(array("f", [math.nan if value is None else value for value in logprobs]))


def unpack_logprobs(blob: bytes) -> tuple[float | None, ...]:
    """The log-probabilities of `pack_logprobs`; NaN comes back as None."""
    return tuple(None if math.isnan(value) else value for value in _from_bytes("f", blob))


def to_json(value: Any) -> str:
    """Compact JSON for a column."""
    # ASCII escapes carry lone surrogates, which a client may send and UTF-8 columns cannot hold.
    return json.dumps(value, separators=(",", ":"))


def from_json(text: str) -> Any:
    """The value of a JSON column."""
    return json.loads(text)


def finite(numbers: Mapping[str, float]) -> dict[str, float]:
    """The finite ones: JSON has no word for the others, and a number that is missing says as much."""
    return {name: float(number) for name, number in numbers.items() if math.isfinite(number)}


def _to_bytes(numbers: array[Any]) -> bytes:
    if _IS_BIG_ENDIAN:
        numbers.byteswap()
    return numbers.tobytes()


def _from_bytes(typecode: Any, blob: bytes) -> array[Any]:
    numbers: array[Any] = array(typecode)
    numbers.frombytes(blob)
    if _IS_BIG_ENDIAN:
        numbers.byteswap()
    return numbers
