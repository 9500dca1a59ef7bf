"""When a worker that holds a card and has nothing to do ends, and when it starts again. Pure.

A live context on a card draws tens of watts for nothing, and keeps memory from the other role. On a CPU an idle worker
costs memory only, so it stays (`keep_warm_s` None).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Action = Literal["sleep", "wake"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """used_at: when the worker was last in use. asleep: it was ended for want of work."""

    used_at: float
    asleep: bool = False


def step(state: Rest, *, in_use: bool, keep_warm_s: float | None, now: float) -> tuple[Rest, Action | None]:
    """The state at `now`, and what to do with the worker.

    Args:
        in_use: it works, or somebody is about to need it.
        keep_warm_s: how long it stays without use; None: for ever.
    """
    if in_use or keep_warm_s is None:
        return Rest(used_at=now), "wake" if state.asleep else None
    if not state.asleep and now - state.used_at >= keep_warm_s:
        return dataclasses.replace(state, asleep=True), "sleep"
    return state, None
