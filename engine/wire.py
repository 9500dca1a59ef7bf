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
import types
import typing
from typing import Any, TypeVar

import msgpack

T = TypeVar("T")

MAX_MESSAGE_BYTES = 16 * 1024 * 1024


class WireError(ValueError):
    """Raised when bytes are not a message of this protocol version."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of everything that crosses the link between the daemon and a worker."""


def encode(message: Message, epoch: int, *, version: int) -> bytes:
    """Bytes of one message, stamped with the protocol version and the worker's epoch.

    Raises:
        WireError: a text is not valid Unicode, a number has more than 64 bits, or the message is too long.
    """
    body = _to_plain(message)
    try:
        packed: bytes = msgpack.packb({"v": version, "epoch": epoch, "type": type(message).__name__, "body": body})
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
    message = _from_plain(cls, envelope["body"], name)
    assert isinstance(message, Message)
    return epoch, message


def to_map(value: Any) -> dict[str, Any]:
    """The plain map of a wire dataclass, for files that hold one (a job folder, a manifest)."""
    plain = _to_plain(value)
    assert isinstance(plain, dict)
    return plain


def from_map(cls: type[T], value: Any) -> T:
    """A wire dataclass from its plain map, checked. Raises WireError."""
    return typing.cast(T, _from_plain(cls, value, cls.__name__))


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [_to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _to_plain(item) for key, item in value.items()}
    return value


def _from_plain(expected: Any, value: Any, path: str) -> Any:
    origin = typing.get_origin(expected)
    arguments = typing.get_args(expected)
    if expected is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        return _from_union(arguments, value, path)
    if origin is typing.Literal:
        if value not in arguments:
            raise WireError(f"{path}: expected one of {arguments}, got {value!r}")
        return value
    if origin is tuple:
        return _from_tuple(arguments, value, path)
    if origin is dict:
        if not isinstance(value, dict):
            raise WireError(f"{path}: expected a map, got {type(value).__name__}")
        return {
            _from_plain(arguments[0], key, f"{path} key"): _from_plain(arguments[1], item, f"{path}[{key!r}]")
            for key, item in value.items()
        }
    if isinstance(expected, type) and dataclasses.is_dataclass(expected):
        return _from_dataclass(expected, value, path)
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, bool) and expected is not bool:
        raise WireError(f"{path}: expected {expected.__name__}, got bool")
    if not isinstance(value, expected):
        raise WireError(f"{path}: expected {expected.__name__}, got {type(value).__name__}")
    return value


def _from_union(options: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in options:
        return None
    errors = []
    for option in options:
        if option is type(None):
            continue
        try:
            return _from_plain(option, value, path)
        except WireError as error:
            errors.append(str(error))
    raise WireError("; or ".join(errors))


def _from_tuple(arguments: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise WireError(f"{path}: expected a list, got {type(value).__name__}")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_from_plain(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if len(arguments) != len(value):
        raise WireError(f"{path}: expected {len(arguments)} items, got {len(value)}")
    return tuple(_from_plain(a, v, f"{path}[{i}]") for i, (a, v) in enumerate(zip(arguments, value, strict=True)))


_FIELD_TYPES: dict[type, dict[str, Any]] = {}


def _from_dataclass(cls: type, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise WireError(f"{path}: expected a map, got {type(value).__name__}")
    hints = _FIELD_TYPES.get(cls)
    if hints is None:
        hints = _FIELD_TYPES[cls] = typing.get_type_hints(cls)
    if unknown := set(value) - set(hints):
        raise WireError(f"{path}: unknown field {sorted(map(str, unknown))[0]!r}")
    required = {
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    if missing := required - set(value):
        raise WireError(f"{path}: field {sorted(missing)[0]!r} is missing")
    return cls(**{name: _from_plain(hints[name], item, f"{path}.{name}") for name, item in value.items()})
