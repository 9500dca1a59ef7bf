"""How many requests may be under way, and what a client is told when there are too many. Pure.

Slots and queue are shared by all users. So that nobody fills the queue alone, whoever has something under way may take
more only while the room left is an eighth of it at least: dynamic thresholds (Choudhury and Hahne, IEEE/ACM
Transactions on Networking 6(2), 1998). One user who asks without end gets eight ninths of the queue, several get equal
parts of almost all of it, and there is room for whoever comes next. What would start at once is never refused, nor is a
user with nothing under way while there is room at all.

In which order what waits gets its slots is the serve worker's business (`engine.generate.fairness`).
"""

from __future__ import annotations

import dataclasses

OWN_FOR_EACH_FREE = 8  # sequences that a user may have under way for each place that is left


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """slots: sequences that decode at once. max_queue: further sequences that may wait."""

    slots: int
    max_queue: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """The request is turned away; a slot is expected to be free after `retry_after_s`. own: because of what its own
    user has under way."""

    retry_after_s: float
    own: bool = False


def admit(limits: Limits, *, under_way: int, own: int, asked: int, sequence_s: float) -> Full | None:
    """Whether `asked` more sequences may join `under_way`; None means yes.

    Args:
        under_way: sequences that run or wait, of all users.
        own: of those, the ones of the user who asks.
        asked: sequences of the new request (its `n`), at least 1.
        sequence_s: how long a sequence took lately, from its slot on.
    """
    room = limits.slots + limits.max_queue - under_way
    if asked > room:
        return Full(retry_after_s=until_free_s(limits, places=asked - room, sequence_s=sequence_s))
    starts_at_once = under_way + asked <= limits.slots
    surplus = (own + asked) // OWN_FOR_EACH_FREE - (room - asked)
    if starts_at_once or own == 0 or surplus <= 0:
        return None
    return Full(retry_after_s=until_free_s(limits, places=surplus, sequence_s=sequence_s), own=True)


def until_free_s(limits: Limits, *, places: int, sequence_s: float) -> float:
    """When so many of those under way are expected to be over, in seconds; a second at least.

    Args:
        sequence_s: how long a sequence took lately, from its slot on.
    """
    return max(1.0, places / limits.slots * sequence_s)
