"""Plans for the two states of a box: people ask, or nobody does. And what changes between them.

Pure: the same request gives the same plans. A plan that cannot be made is an error that says which role lacks how many
bytes and what would fit.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from engine.placement.advice import Remedy, remedies
from engine.placement.request import ROLES, Request, Role
from engine.placement.search import Plan, Shortfall, search


class DoesNotFit(Exception):
    """Raised when no layout fits. `shortfall` has the figures, `remedies` what would fit instead."""

    def __init__(self, request: Request, shortfall: Shortfall, remedies: tuple[Remedy, ...]) -> None:
        self.request = request
        self.shortfall = shortfall
        self.remedies = remedies
        device = request.devices[shortfall.device]
        super().__init__(
            f"{shortfall.role}: {device.label} has {device.free_bytes:,} bytes free, "
            f"{shortfall.missing[shortfall.device]:,} too few; {self.advice}"
        )

    @property
    def advice(self) -> str:
        """What would fit, in one line."""
        if self.remedies:
            return "this would fit: " + "; or ".join(remedy.change for remedy in self.remedies)
        return "no setting makes it fit: free that memory, add a device, or take a smaller model"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """busy: while people ask. idle: while nobody does; the serve worker has left its card, if it was on one."""

    busy: Plan
    idle: Plan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A role that a device takes up or gives up."""

    action: Literal["stop", "start"]
    role: Role
    device: int


def plan(request: Request, *, idle: bool = False) -> Plan:
    """The plan for one of the two states.

    Raises:
        BadPin: a pin cannot be followed on any such machine.
        DoesNotFit: a byte more would be needed than there is.
    """
    found = search(request, idle=idle)
    if isinstance(found, Shortfall):
        raise DoesNotFit(request, found, remedies(request, idle=idle))
    return found


def plan_both(request: Request) -> Plans:
    """Both plans. Raises as `plan` does."""
    return Plans(busy=plan(request), idle=plan(request, idle=True))


def moves(old: Plan, new: Plan) -> tuple[Move, ...]:
    """What turns one plan into another: everything that stops, then everything that starts."""
    before = {(role, number) for role in ROLES for number in old.layout.of(role)}
    after = {(role, number) for role in ROLES for number in new.layout.of(role)}

    def ordered(pairs: set[tuple[Role, int]]) -> list[tuple[Role, int]]:
        return sorted(pairs, key=lambda pair: (ROLES.index(pair[0]), pair[1]))

    stops = [Move(action="stop", role=role, device=number) for role, number in ordered(before - after)]
    starts = [Move(action="start", role=role, device=number) for role, number in ordered(after - before)]
    return (*stops, *starts)
