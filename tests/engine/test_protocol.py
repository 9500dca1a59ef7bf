"""The messages of the protocol: each survives the wire, and their bytes do not change by accident."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import types
import typing
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import protocol

MESSAGES = [
    value
    for value in vars(protocol).values()
    if isinstance(value, type) and issubclass(value, protocol.Message) and value is not protocol.Message
]
FILE_RECORDS = [protocol.TrainJob, protocol.TrainResult]

# Chunk(request_id="chatcmpl-1", choice=0, text="Hé", tokens=one token with one alternative) of epoch 7, version 1.
GOLDEN_CHUNK = (
    "84a17601a565706f636807a474797065a54368756e6ba4626f647984aa726571756573745f6964aa63686174636d706c2d31a663686f69636500"
    "a474657874a348c3a9a6746f6b656e739185a2696401a474657874a348c3a9a562797465739348ccc3cca9a76c6f6770726f62cbbfe000000000"
    "0000a3746f709184a2696402a474657874a14fa56279746573914fa76c6f6770726f62cbc000000000000000"
)


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Every value that an annotation of the protocol allows."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return st.one_of([values_of(argument) for argument in arguments])
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*[values_of(argument) for argument in arguments])
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=3)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        hints = typing.get_type_hints(annotation)
        return st.builds(annotation, **{name: values_of(hint) for name, hint in hints.items()})
    return {
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=8),
        bool: st.booleans(),
        type(None): st.none(),
        Any: st.none() | st.integers(0, 9) | st.text(max_size=3) | st.lists(st.booleans(), max_size=2),
    }[annotation]


@pytest.mark.parametrize("message_type", MESSAGES, ids=lambda cls: cls.__name__)
def test_every_message_survives_the_wire(message_type: type[protocol.Message]) -> None:
    @settings(deadline=None, max_examples=15)
    @given(message=values_of(message_type), epoch=st.integers(0, 2**31))
    def comes_back(message: protocol.Message, epoch: int) -> None:
        assert protocol.decode(protocol.encode(message, epoch)) == (epoch, message)

    comes_back()


@pytest.mark.parametrize("record", FILE_RECORDS, ids=lambda cls: cls.__name__)
def test_every_record_of_a_job_folder_survives_its_file(record: type[Any]) -> None:
    @settings(deadline=None, max_examples=15)
    @given(values_of(record))
    def comes_back(value: Any) -> None:
        data = msgpack.packb(protocol.to_map(value))
        assert protocol.from_map(record, msgpack.unpackb(data)) == value

    comes_back()


def test_every_message_of_the_module_is_one_that_can_be_received() -> None:
    roles = [
        importlib.import_module(f"engine.protocol.{found.name}") for found in pkgutil.iter_modules(protocol.__path__)
    ]
    written = {value for role in roles for value in vars(role).values() if isinstance(value, type)}
    assert set(MESSAGES) == {one for one in written if issubclass(one, protocol.Message)} - {protocol.Message}
    for message_type in MESSAGES:
        frame = msgpack.packb({"v": protocol.PROTOCOL, "epoch": 1, "type": message_type.__name__, "body": None})
        with pytest.raises(protocol.WireError, match=f"{message_type.__name__}: expected a map"):
            protocol.decode(frame)


def test_the_bytes_of_version_1_do_not_change() -> None:
    chunk = protocol.Chunk(
        request_id="chatcmpl-1",
        choice=0,
        text="Hé",
        tokens=(
            protocol.TokenLogprob(
                id=1,
                text="Hé",
                bytes=(72, 195, 169),
                logprob=-0.5,
                top=(protocol.TopLogprob(id=2, text="O", bytes=(79,), logprob=-2.0),),
            ),
        ),
    )
    assert protocol.PROTOCOL == 1
    assert protocol.encode(chunk, 7).hex() == GOLDEN_CHUNK
    assert protocol.decode(bytes.fromhex(GOLDEN_CHUNK)) == (7, chunk)


def test_a_worker_of_another_protocol_version_is_told_so() -> None:
    frame = msgpack.packb({"v": 2, "epoch": 1, "type": "Hello", "body": {"role": "serve", "name": "serve", "pid": 1}})
    with pytest.raises(protocol.WireError, match="protocol version 2, this side speaks 1; upgrade the older side"):
        protocol.decode(frame)


def test_messages_cannot_be_changed_after_they_are_made() -> None:
    for message_type in MESSAGES:
        parameters = inspect.signature(message_type).parameters.values()
        assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters)
    with pytest.raises(dataclasses.FrozenInstanceError):
        protocol.Stop(within_s=1.0).within_s = 2.0  # type: ignore[misc]
