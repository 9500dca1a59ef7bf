"""Encoding of the messages of `engine.protocol`: msgpack maps, checked field by field.

A message is a frozen dataclass. On the wire it is one msgpack map `{"v", "epoch", "type", "body"}`. Decoding checks
every field against the dataclass's annotation, so a malformed message is an error at the border and never an
AttributeError deep inside. Tensors do not travel here: they pass as files in the state folder.

This module does not know any particular message, any socket or any clock. It imports the standard library and msgpack.

Invariants: `decode(encode(m, epoch)) == (epoch, m)` for every message; an unknown type, a missing or an unknown field,
or a value of the wrong type raises `WireError` naming the path of the field.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import msgpack

_NAMES: dict[type, tuple[str, ...]] = {}  # dataclass -> its fields

T = TypeVar("T")
Reader = Callable[[Any], Any]  # a plain value to what a field expects; raises _Misfit

MAX_MESSAGE_BYTES = 16 * 1024 * 1024


class WireError(ValueError):
    """Raised when bytes are not a message of this protocol version."""


class _Misfit(Exception):
    """A value that is not what is expected, at `path` below the reader that says it."""

    def __init__(self, complaint: str, path: str = "") -> None:
        super().__init__(complaint)
        self.complaint = complaint
        self.path = path

    def below(self, step: str) -> _Misfit:
        return _Misfit(self.complaint, step + self.path)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of everything that crosses the link between the daemon and a worker."""


def encode(message: Message, epoch: int, *, version: int) -> bytes:
    """Bytes of one message, stamped with the protocol version and the worker's epoch.

    Raises:
        WireError: a text is not valid Unicode, a number has more than 64 bits, or the message is too long.
    """
    envelope = {"v": version, "epoch": epoch, "type": type(message).__name__, "body": message}
    try:
        packed: bytes = msgpack.packb(envelope, default=_fields)
    except (ValueError, OverflowError) as error:
        raise WireError(f"{type(message).__name__}: a value cannot be sent: {error}") from error
    if len(packed) > MAX_MESSAGE_BYTES:
        raise WireError(f"{type(message).__name__}: {len(packed)} bytes, the limit is {MAX_MESSAGE_BYTES}")
    return packed


def decode(data: bytes, registry: dict[str, type[Message]], *, version: int) -> tuple[int, Message]:
    """The epoch and the message in `data`.

    Raises:
        WireError: not msgpack, another protocol version, an unknown type, or a field that does not fit.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(data)} bytes, the limit is {MAX_MESSAGE_BYTES}")
    try:
        envelope = msgpack.unpackb(data, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"not a msgpack message: {error}") from error
    if not isinstance(envelope, dict) or set(envelope) != {"v", "epoch", "type", "body"}:
        raise WireError("envelope: expected exactly the keys v, epoch, type, body")
    if envelope["v"] != version or isinstance(envelope["v"], bool):
        raise WireError(f"protocol version {envelope['v']!r}, this side speaks {version}; upgrade the older side")
    epoch, name = envelope["epoch"], envelope["type"]
    if not isinstance(epoch, int) or isinstance(epoch, bool):
        raise WireError(f"epoch: expected int, got {epoch!r}")
    cls = registry.get(name) if isinstance(name, str) else None
    if cls is None:
        raise WireError(f"unknown message type {name!r}")
    return epoch, from_map(cls, envelope["body"])


def to_map(value: Any) -> dict[str, Any]:
    """The plain map of a wire dataclass, for files that hold one (a job folder, a manifest)."""
    plain = _to_plain(value)
    assert isinstance(plain, dict)
    return plain


def from_map(cls: type[T], value: Any) -> T:
    """A wire dataclass from its plain map, checked. Raises WireError."""
    try:
        return typing.cast(T, _reader(typing.cast(Any, cls))(value))
    except _Misfit as misfit:
        raise WireError(f"{cls.__name__}{misfit.path}: {misfit.complaint}") from None


def _fields(value: Any) -> dict[str, Any]:
    """What msgpack packs in the place of a dataclass; it asks for everything that it does not know."""
    names = _NAMES.get(type(value))
    if names is None:
        if not dataclasses.is_dataclass(value):
            raise ValueError(f"{value!r} is nothing that msgpack knows")
        names = _NAMES[type(value)] = tuple(field.name for field in dataclasses.fields(value))
    return {name: getattr(value, name) for name in names}


def _to_plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _to_plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _to_plain(item) for name, item in _fields(value).items()}
    return value


# Thousands of messages a second are read, so what a type expects is worked out once, into a function.


@functools.cache
def _reader(expected: Any) -> Reader:
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if expected is Any:
        return lambda value: value
    if origin in (types.UnionType, typing.Union):
        return _union_reader(arguments)
    if origin is typing.Literal:
        return _literal_reader(arguments)
    if origin is tuple:
        return _list_reader(arguments[0]) if arguments[1:] == (Ellipsis,) else _tuple_reader(arguments)
    if origin is dict:
        return _map_reader(*arguments)
    if isinstance(expected, type) and dataclasses.is_dataclass(expected):
        return _dataclass_reader(expected)
    return _float_reader if expected is float else _scalar_reader(expected)


def _scalar_reader(expected: type) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not expected:  # True is no int here
            raise _Misfit(f"expected {expected.__name__}, got {type(value).__name__}")
        return value

    return read


def _float_reader(value: Any) -> Any:
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value)
    raise _Misfit(f"expected float, got {type(value).__name__}")


def _literal_reader(allowed: tuple[Any, ...]) -> Reader:
    def read(value: Any) -> Any:
        if value not in allowed:
            raise _Misfit(f"expected one of {allowed}, got {value!r}")
        return value

    return read


def _union_reader(options: tuple[Any, ...]) -> Reader:
    readers = [_reader(option) for option in options if option is not type(None)]
    takes_none = len(readers) < len(options)

    def read(value: Any) -> Any:
        if value is None and takes_none:
            return None
        misfits = []
        for reader in readers:
            try:
                return reader(value)
            except _Misfit as misfit:
                misfits.append(misfit)
        if len(misfits) == 1:
            raise misfits[0]
        raise _Misfit("; or ".join(f"{misfit.path}: {misfit.complaint}".lstrip(": ") for misfit in misfits))

    return read


def _list_reader(item: Any) -> Reader:
    reader = _reader(item)
    scalar = item if item in (int, float, str) else None

    def read(value: Any) -> Any:
        _check_list(value)
        if scalar is not None and set(map(type, value)) <= {scalar}:
            return tuple(value)
        found = []
        for i, one in enumerate(value):
            try:
                found.append(reader(one))
            except _Misfit as misfit:
                raise misfit.below(f"[{i}]") from None
        return tuple(found)

    return read


def _tuple_reader(items: tuple[Any, ...]) -> Reader:
    readers = [_reader(item) for item in items]

    def read(value: Any) -> Any:
        _check_list(value)
        if len(value) != len(readers):
            raise _Misfit(f"expected {len(readers)} items, got {len(value)}")
        found = []
        for i, (reader, one) in enumerate(zip(readers, value, strict=True)):
            try:
                found.append(reader(one))
            except _Misfit as misfit:
                raise misfit.below(f"[{i}]") from None
        return tuple(found)

    return read


def _check_list(value: Any) -> None:
    if not isinstance(value, list):
        raise _Misfit(f"expected a list, got {type(value).__name__}")


def _map_reader(key: Any, item: Any) -> Reader:
    key_reader, item_reader = _reader(key), _reader(item)

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _Misfit(f"expected a map, got {type(value).__name__}")
        found = {}
        for name, one in value.items():
            try:
                read_name = key_reader(name)
            except _Misfit as misfit:
                raise misfit.below(" key") from None
            try:
                found[read_name] = item_reader(one)
            except _Misfit as misfit:
                raise misfit.below(f"[{name!r}]") from None
        return found

    return read


def _dataclass_reader(cls: type) -> Reader:
    readers: dict[str, Reader] = {}
    required: set[str] = set()

    def prepare() -> None:  # not at once: a class may hold others of its own kind
        readers.update({name: _reader(hint) for name, hint in typing.get_type_hints(cls).items()})
        for field in dataclasses.fields(cls):
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                required.add(field.name)

    def read(value: Any) -> Any:
        if not readers:
            prepare()
        if not isinstance(value, dict):
            raise _Misfit(f"expected a map, got {type(value).__name__}")
        if unknown := value.keys() - readers.keys():
            raise _Misfit(f"unknown field {sorted(map(str, unknown))[0]!r}")
        if missing := required - value.keys():
            raise _Misfit(f"field {sorted(missing)[0]!r} is missing")
        found = {}
        for name, one in value.items():
            try:
                found[name] = readers[name](one)
            except _Misfit as misfit:
                raise misfit.below(f".{name}") from None
        return cls(**found)

    return read
