"""The encoding of messages: what is refused at the border, and how the refusal names the place."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any, Literal

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import wire


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    kind: Literal["a", "b"]
    weights: tuple[float | None, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample(wire.Message):
    name: str
    count: int
    ratio: float
    flag: bool
    pair: tuple[int, str]
    inner: Inner
    maybe: Inner | None = None
    by_name: dict[str, int] = dataclasses.field(default_factory=dict)
    details: dict[str, Any] = dataclasses.field(default_factory=dict)


REGISTRY: dict[str, type[wire.Message]] = {"Sample": Sample}
SAMPLE = Sample(name="x", count=3, ratio=0.5, flag=True, pair=(1, "one"), inner=Inner(kind="a"))


def body_with(**changes: Any) -> dict[str, Any]:
    return {**wire.to_map(SAMPLE), **changes}


def frame_with(body: Any = None, **changes: Any) -> bytes:
    envelope = {"v": 1, "epoch": 4, "type": "Sample", "body": body_with() if body is None else body, **changes}
    packed: bytes = msgpack.packb(envelope)
    return packed


def decode(data: bytes) -> tuple[int, wire.Message]:
    return wire.decode(data, REGISTRY, version=1)


def test_a_message_comes_back_with_its_epoch() -> None:
    assert decode(wire.encode(SAMPLE, 4, version=1)) == (4, SAMPLE)


def test_fields_with_a_default_may_be_missing() -> None:
    body = body_with()
    del body["maybe"], body["by_name"], body["details"]
    assert decode(frame_with(body)) == (4, SAMPLE)


def test_a_whole_number_is_taken_for_a_float() -> None:
    _, message = decode(frame_with(body_with(ratio=2)))
    assert isinstance(message, Sample)
    assert isinstance(message.ratio, float)


def test_an_unknown_log_probability_stays_none() -> None:
    sample = dataclasses.replace(SAMPLE, inner=Inner(kind="b", weights=(-0.5, None)))
    assert decode(wire.encode(sample, 1, version=1)) == (1, sample)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"v": 2}, "protocol version 2, this side speaks 1"),
        ({"v": True}, "protocol version True"),
        ({"v": None}, "protocol version None"),
        ({"epoch": "4"}, "epoch: expected int"),
        ({"epoch": True}, "epoch: expected int"),
        ({"epoch": 4.0}, "epoch: expected int"),
        ({"type": "Other"}, "unknown message type 'Other'"),
        ({"type": ["Sample"]}, "unknown message type"),
        ({"extra": 1}, "expected exactly the keys"),
        ({"body": []}, "Sample: expected a map, got list"),
        ({"body": 3}, "Sample: expected a map, got int"),
    ],
)
def test_a_malformed_envelope_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(wire.WireError, match=complaint):
        decode(frame_with(**changes))


@pytest.mark.parametrize("key", ["v", "epoch", "type", "body"])
def test_an_envelope_without_one_of_its_keys_is_refused(key: str) -> None:
    envelope = msgpack.unpackb(frame_with())
    del envelope[key]
    with pytest.raises(wire.WireError, match="expected exactly the keys"):
        decode(msgpack.packb(envelope))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"name": 3}, "Sample.name: expected str, got int"),
        ({"name": b"x"}, "Sample.name: expected str, got bytes"),
        ({"count": 1.5}, "Sample.count: expected int, got float"),
        ({"count": True}, "Sample.count: expected int, got bool"),
        ({"count": None}, "Sample.count: expected int, got NoneType"),
        ({"ratio": "0.5"}, "Sample.ratio: expected float, got str"),
        ({"ratio": False}, "Sample.ratio: expected float, got bool"),
        ({"flag": 1}, "Sample.flag: expected bool, got int"),
        ({"pair": [1]}, "Sample.pair: expected 2 items, got 1"),
        ({"pair": {"a": 1}}, "Sample.pair: expected a list, got dict"),
        ({"pair": [1, 2]}, r"Sample.pair\[1\]: expected str, got int"),
        ({"inner": {"kind": "c"}}, "Sample.inner.kind: expected one of .*, got 'c'"),
        ({"inner": {"kind": ["a"]}}, "Sample.inner.kind: expected one of"),
        ({"inner": {}}, "Sample.inner: field 'kind' is missing"),
        ({"inner": None}, "Sample.inner: expected a map, got NoneType"),
        ({"inner": {"kind": "a", "weights": [0.1, "x"]}}, r"Sample.inner.weights\[1\]"),
        ({"maybe": 5}, "Sample.maybe: expected a map, got int"),
        ({"by_name": {"a": "b"}}, r"Sample.by_name\['a'\]: expected int, got str"),
        ({"by_name": {b"a": 1}}, "Sample.by_name key: expected str, got bytes"),
        ({"by_name": [1]}, "Sample.by_name: expected a map, got list"),
        ({"stranger": 1}, "Sample: unknown field 'stranger'"),
        ({b"name": 1}, "Sample: unknown field"),
    ],
)
def test_a_field_that_does_not_fit_is_named(changes: dict[Any, Any], complaint: str) -> None:
    with pytest.raises(wire.WireError, match=complaint):
        decode(frame_with({**body_with(), **changes}))


def test_a_missing_field_is_named() -> None:
    body = body_with()
    del body["count"]
    with pytest.raises(wire.WireError, match="Sample: field 'count' is missing"):
        decode(frame_with(body))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        frame_with()[:-1],
        frame_with() + b"\x00",
        msgpack.packb([1, 2]),
        msgpack.packb(None),
        msgpack.packb({1: 2}),
        b"\x91" * 2000,  # nested deeper than any message
        b"\xa4\xff\xfe\xfd\xfc",  # not UTF-8
    ],
)
def test_bytes_that_are_no_envelope_are_refused(data: bytes) -> None:
    with pytest.raises(wire.WireError):
        decode(data)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_and_nothing_worse(data: bytes) -> None:
    with pytest.raises(wire.WireError):
        decode(data)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_damaged_message_is_refused_or_still_a_message(data: st.DataObject) -> None:
    frame = bytearray(wire.encode(SAMPLE, 4, version=1))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        _, message = decode(bytes(frame))
    except wire.WireError:
        return
    assert isinstance(message, Sample)


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(wire.WireError, match=r"Sample: \d+ bytes, the limit is 16777216"):
        wire.encode(dataclasses.replace(SAMPLE, name="x" * wire.MAX_MESSAGE_BYTES), 1, version=1)


def test_a_message_over_the_limit_is_not_read() -> None:
    with pytest.raises(wire.WireError, match="the limit is 16777216"):
        decode(b"\x00" * (wire.MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize("value", ["\ud800", 2**64])
def test_a_value_that_the_wire_cannot_carry_is_refused_at_the_sender(value: Any) -> None:
    with pytest.raises(wire.WireError, match="Sample: a value cannot be sent"):
        wire.encode(dataclasses.replace(SAMPLE, details={"x": value}), 1, version=1)


def test_a_map_of_a_file_is_checked_like_a_message() -> None:
    inner = Inner(kind="a", weights=(1.0,))
    assert wire.from_map(Inner, msgpack.unpackb(msgpack.packb(wire.to_map(inner)))) == inner
    with pytest.raises(wire.WireError, match="Inner: unknown field 'odd'"):
        wire.from_map(Inner, {"kind": "a", "odd": 1})


def test_the_wire_loads_only_the_standard_library_and_msgpack() -> None:
    program = (
        "import sys\n"
        "import msgpack\n"
        "before = set(sys.modules)\n"
        "import engine.wire, engine.protocol\n"
        "tops = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(tops - set(sys.stdlib_module_names)))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.strip() == "['engine']"
