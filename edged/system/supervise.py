"""When a worker is started, killed, and started again: a pure state machine.

States of a worker:

    stopped --want--> starting --ready--> ready --unwant--> stopping --exit--> stopped
                         |                  |
                         +-----exit---------+--exit/hang--> waiting --retry time--> starting

`epoch` counts the incarnations of the process; an event of another epoch than the current one changes nothing.
`edged.system.workers` executes the actions and reports back as events. No clock and no I/O here.

Invariants: at most one process is alive in any state; `Spawn` is only emitted when none is; every process that was
spawned is ended by its own exit, by `AskToStop`, or by `Kill`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Phase = Literal["stopped", "starting", "ready", "stopping", "waiting"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Times in seconds. backoff_*: the wait before a restart doubles with every failure in a row up to the maximum.
    stable_s: a worker that was ready this long has no failures behind it."""

    start_timeout_s: float
    hang_timeout_s: float
    stop_timeout_s: float = 8.0
    backoff_first_s: float = 0.5
    backoff_max_s: float = 60.0
    stable_s: float = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """since: when the phase began. heard_at: last message of the current process. failures: exits in a row."""

    phase: Phase = "stopped"
    wanted: bool = False
    epoch: int = 0
    since: float = 0.0
    heard_at: float = 0.0
    failures: int = 0
    retry_at: float = 0.0
    why: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Want:
    """The worker should run."""


@dataclasses.dataclass(frozen=True, slots=True)
class Unwant:
    """The worker should not run."""


@dataclasses.dataclass(frozen=True, slots=True)
class Heard:
    """Any message of the process, which shows that its loop turns. `ready`: it was Ready."""

    epoch: int
    ready: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Exited:
    """The process is gone; `why` for people."""

    epoch: int
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Want | Unwant | Heard | Exited | Tick


@dataclasses.dataclass(frozen=True, slots=True)
class Spawn:
    epoch: int


@dataclasses.dataclass(frozen=True, slots=True)
class AskToStop:
    epoch: int
    within_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Kill:
    epoch: int
    why: str


Action = Spawn | AskToStop | Kill


def step(state: State, event: Event, now: float, limits: Limits) -> tuple[State, tuple[Action, ...]]:
    """The state after `event`, and what to do."""
    match event:
        case Want():
            return _begin(dataclasses.replace(state, wanted=True), now)
        case Unwant():
            return _end(dataclasses.replace(state, wanted=False), now, limits)
        case Heard():
            return _heard(state, event, now), ()
        case Exited():
            return _exited(state, event, now, limits)
        case Tick():
            return _tick(state, now, limits)


def next_tick_at(state: State, limits: Limits) -> float | None:
    """When the next `Tick` can change something; None while only other events can."""
    match state.phase:
        case "starting":
            return state.since + limits.start_timeout_s
        case "ready":
            return state.heard_at + limits.hang_timeout_s
        case "stopping":
            return state.since + limits.stop_timeout_s
        case "waiting":
            return state.retry_at
        case "stopped":
            return None


def _begin(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    if state.phase != "stopped":
        return state, ()
    return _spawn(state, now)


def _spawn(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    epoch = state.epoch + 1
    return dataclasses.replace(state, phase="starting", epoch=epoch, since=now, heard_at=now), (Spawn(epoch),)


def _end(state: State, now: float, limits: Limits) -> tuple[State, tuple[Action, ...]]:
    match state.phase:
        case "starting" | "ready":
            stopping = dataclasses.replace(state, phase="stopping", since=now)
            return stopping, (AskToStop(state.epoch, limits.stop_timeout_s),)
        case "waiting":
            return dataclasses.replace(state, phase="stopped", since=now, failures=0), ()
        case "stopping" | "stopped":
            return state, ()


def _heard(state: State, event: Heard, now: float) -> State:
    if event.epoch != state.epoch or state.phase not in ("starting", "ready"):
        return state
    if event.ready and state.phase == "starting":
        return dataclasses.replace(state, phase="ready", since=now, heard_at=now, why="")
    return dataclasses.replace(state, heard_at=now)


def _exited(state: State, event: Exited, now: float, limits: Limits) -> tuple[State, tuple[Action, ...]]:
    if event.epoch != state.epoch or state.phase in ("stopped", "waiting"):
        return state, ()
    if not state.wanted:
        return dataclasses.replace(state, phase="stopped", since=now, failures=0, why=event.why), ()
    if state.phase == "stopping":  # wanted again while it was on its way out: that is no failure
        return _spawn(state, now)
    stable = state.phase == "ready" and now - state.since >= limits.stable_s
    failures = 1 if stable else state.failures + 1
    wait_s = min(limits.backoff_max_s, limits.backoff_first_s * 2.0 ** min(failures - 1, 30))
    waiting = dataclasses.replace(
        state, phase="waiting", since=now, failures=failures, retry_at=now + wait_s, why=event.why
    )
    return waiting, ()


def _tick(state: State, now: float, limits: Limits) -> tuple[State, tuple[Action, ...]]:
    match state.phase:
        case "starting" if now - state.since >= limits.start_timeout_s:
            why = f"not ready within {limits.start_timeout_s:g} s"
        case "ready" if now - state.heard_at >= limits.hang_timeout_s:
            why = f"silent for {limits.hang_timeout_s:g} s"
        case "stopping" if now - state.since >= limits.stop_timeout_s:
            why = f"did not stop within {limits.stop_timeout_s:g} s"
        case "waiting" if now >= state.retry_at:
            return _spawn(state, now)
        case _:
            return state, ()
    return dataclasses.replace(state, since=now, heard_at=now), (Kill(state.epoch, why),)
