"""How many requests may be under way, and what a client is told when there are too many. Pure."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """slots: sequences that decode at once. max_queue: further sequences that may wait."""

    slots: int
    max_queue: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """The request is turned away; a slot is expected to be free after `retry_after_s`."""

    retry_after_s: float


def admit(limits: Limits, *, under_way: int, asked: int, sequence_s: float) -> Full | None:
    """Whether `asked` more sequences may join `under_way`; None means yes.

    Args:
        under_way: sequences that run or wait.
        asked: sequences of the new request (its `n`), at least 1.
        sequence_s: how long a sequence took lately.
    """
    room = limits.slots + limits.max_queue - under_way
    if asked <= room:
        return None
    waves = (asked - room) / limits.slots
    return Full(retry_after_s=max(1.0, waves * sequence_s))
