"""What the first rank tells the others, and what they let it know: two pipes a rank.

Orders are messages of `engine.protocol` and `Join`, each behind its length. Signs are single bytes: a beat while a rank
works or waits for others, one when it is about to join the others, and one when it has carried out an order. The end of
the orders ends the process.
"""

from __future__ import annotations

import dataclasses
from typing import BinaryIO

from engine import wire
from engine.protocol import PROTOCOL, Message, Pace, Score, StartTrain, Train, TrainPlan, WireError

ENV_ORDERS_FD = "EDGED_RANK_ORDERS_FD"
ENV_SIGNS_FD = "EDGED_RANK_SIGNS_FD"

SIGN_BEAT = b"."
SIGN_HERE = b"+"
SIGN_DONE = b"!"
BEAT_S = 1.0

_LENGTH_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Join(Message):
    """The first order: what to load and with whom. rendezvous: file by which the ranks find one another."""

    rank: int
    start: StartTrain
    plan: TrainPlan
    rendezvous: str


_REGISTRY: dict[str, type[Message]] = {cls.__name__: cls for cls in (Join, Pace, Score, Train)}


def write_order(pipe: BinaryIO, order: Message) -> None:
    """Raises BrokenPipeError if the rank is gone."""
    data = wire.encode(order, 0, version=PROTOCOL)
    pipe.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    pipe.flush()


def read_order(pipe: BinaryIO) -> Message | None:
    """The next order; None at the end of them. Blocking. Raises WireError."""
    head = _read(pipe, _LENGTH_BYTES)
    if not head:
        return None
    data = _read(pipe, int.from_bytes(head, "little"))
    if len(data) < int.from_bytes(head, "little"):
        raise WireError("an order broke off")
    return wire.decode(data, _REGISTRY, version=PROTOCOL)[1]


def _read(pipe: BinaryIO, n_bytes: int) -> bytes:
    """So many bytes of an unbuffered pipe, fewer at its end."""
    data = b""
    while len(data) < n_bytes and (more := pipe.read(n_bytes - len(data))):
        data += more
    return data
