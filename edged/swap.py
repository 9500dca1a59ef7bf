"""What becomes of an adapter version, and which version is to be served. Pure.

A version's stages, and what leads from one to the next:

    staged --proved--> probed --published--> live --routed--> watched --held--> kept
    live | watched | kept --rolled_back--> rolled_back
    rolled_back | kept --made_live--> live      by an operator, or because a rollback leads there

    staged       loaded beside what is live; no request runs on it
    probed       the gate has accepted it
    live         the database says so; new requests may still run on the version before
    watched      new requests run on it, and what people say of its answers is compared with those before it
    kept         it has stood the watch, or another one was trained on top of it or took its place
    rolled_back  it was live, and something spoke against it; the reason is stored

The worker's half, which context holds which adapter, is `engine.generate.swap`. Staged and probed are known to a
process only: after a crash the candidate is proved again. Live and what follows is in the database, so a crash takes
nothing back but the routing, and that is done again at each start. What is to be served is read from the live history
alone.

Invariants: one version is live; a version that the box rolled back by itself is not gone back to until somebody makes
it live again; what the daemon put in place of a version that it could not serve is nobody's wish.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from edged.records import Caller, Live, WatchVerdict

Stage = Literal["staged", "probed", "live", "watched", "kept", "rolled_back"]
Event = Literal["proved", "published", "routed", "held", "rolled_back", "made_live"]

STOPGAP = "daemon"  # who puts another version in place of one that cannot be served
HISTORY_ROWS = 1000  # of the live history that a decision looks at

# Who rolls a version back without being asked: the watch over ratings, and the deep gate.
WATCH = Caller(name="watch", scopes=frozenset())
DEEP_GATE = Caller(name="deep gate", scopes=frozenset())
JUDGES = frozenset({WATCH.name, DEEP_GATE.name})

_NEXT: dict[tuple[Stage, Event], Stage] = {
    ("staged", "proved"): "probed",
    ("probed", "published"): "live",
    ("live", "routed"): "watched",
    ("live", "held"): "kept",  # another one took its place before a request came
    ("watched", "held"): "kept",
    ("live", "rolled_back"): "rolled_back",
    ("watched", "rolled_back"): "rolled_back",
    ("kept", "rolled_back"): "rolled_back",
    ("kept", "made_live"): "live",
    ("rolled_back", "made_live"): "live",
}
_AFTER_CRASH: dict[Stage, Stage | None] = {
    "staged": None,
    "probed": None,
    "live": "live",
    "watched": "live",
    "kept": "kept",
    "rolled_back": "rolled_back",
}


class SwapError(ValueError):
    """Raised for an event that does not fit the stage: a bug of the caller."""


def after(stage: Stage, event: Event) -> Stage:
    """The stage that `event` leads to. Raises SwapError."""
    following = _NEXT.get((stage, event))
    if following is None:
        raise SwapError(f"a version that is {stage} cannot be {event}")
    return following


def after_crash(stage: Stage) -> Stage | None:
    """What a start finds of a version that was in `stage`; None: a candidate, to be staged again."""
    return _AFTER_CRASH[stage]


def stage_of(verdict: WatchVerdict | None, *, serving: bool) -> Stage:
    """The stage of the live version. verdict: what became of its watch. serving: new requests run on it,
    and it is one of those that are watched."""
    if verdict is not None:
        return verdict
    return after("live", "routed") if serving else "live"


def versions_before(history: Sequence[Live]) -> list[int]:
    """The versions that a rollback may go to, the nearest first, from the live history (newest first).

    A rollback takes back what it left: after going from 2 back to 1, the next one goes further back and not to 2.
    """
    return [version for version in wanted_versions(history)[1:] if version != history[0].version]


def wanted_versions(history: Sequence[Live]) -> list[int]:
    """What is to be served, the best first: what people and updates made live, and what was live before that.

    What the daemon put in place of a version that it could not serve does not count, nor does what the box rolled back
    by itself and nobody has made live since.
    """
    stack: list[int] = []
    condemned = rolled_back_by_itself(history)
    for live in reversed(history):
        if live.caller == STOPGAP:
            continue
        if live.why == "rolled_back" and live.version in stack:
            while stack[-1] != live.version:
                stack.pop()
        elif not stack or stack[-1] != live.version:
            stack.append(live.version)
    return list(dict.fromkeys(version for version in reversed(stack) if version not in condemned))


def rolled_back_by_itself(history: Sequence[Live]) -> frozenset[int]:
    """The versions that a judge rolled back and nobody has made live since, from the live history (newest first)."""
    found: set[int] = set()
    before: int | None = None
    for live in reversed(history):
        if live.why == "rolled_back" and live.caller in JUDGES:
            found |= {before} if before is not None else set()
        elif live.caller != STOPGAP:
            found.discard(live.version)
        before = live.version
    return frozenset(found)
