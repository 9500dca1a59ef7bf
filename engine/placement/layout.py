"""Which roles might go to which devices, best first. Pure; whether a layout fits is asked in `engine.placement.search`.

The order of preference:

1. One device: everything there; actor, critic and reference take turns on one base (time-slicing).
2. Two: the critic and the reference on the second, beside serving, while the actor trains on the first (split).
3. Three: the actor on two (data-parallel), critic, reference and serving on the third.
4. Four and more: serving has a card of its own while people ask; while it is idle that card trains too.

Rewards are judged beside the critic. Then come layouts that ask for less: fewer devices, one device, and last the base
cut over all devices (sharded), which is for a base that no single device holds. Cards come before CPUs, this machine
before others: actors exchange gradients at every step, a critic hears from them once a step. Serving stays on this
machine. A pin is followed whatever comes of it: a base is cut only where no pin has critic or reference elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

from engine.placement.request import ROLES, Request, Role

Mode = Literal["timeslice", "split", "data_parallel", "sharded"]
Numbers = tuple[int, ...]


class BadPin(ValueError):
    """Raised when a pin names a device that is not there, or gives a role more devices than it can use."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Devices of each role. serve and reward: empty if there is no such worker."""

    serve: Numbers
    actor: Numbers
    critic: Numbers
    reference: Numbers
    reward: Numbers
    sharded: bool

    @property
    def mode(self) -> Mode:
        if self.sharded:
            return "sharded"
        if len(self.actor) > 1:
            return "data_parallel"
        return "split" if {*self.critic, *self.reference} - {*self.actor} else "timeslice"

    def of(self, role: Role) -> Numbers:
        """Devices of `role`."""
        numbers: Numbers = getattr(self, role)
        return numbers


def check_pins(request: Request) -> None:
    """Raises BadPin."""
    listed = ", ".join(f"{number} ({device.label})" for number, device in enumerate(request.devices))
    for role in ROLES:
        pinned = request.pins.of(role)
        for number in pinned:
            if not 0 <= number < len(request.devices):
                raise BadPin(f"placement.{role}: there is no device {number}; there are {listed}")
        if len(set(pinned)) != len(pinned):
            raise BadPin(f"placement.{role}: {list(pinned)} names a device twice; name each once")
        if role in ("serve", "reward") and len(pinned) > 1:
            raise BadPin(f"placement.{role}: {list(pinned)} are {len(pinned)} devices, it runs on one; name one")


def layouts(request: Request, *, idle: bool) -> list[Layout]:
    """Every layout worth trying, best first, none twice.

    Args:
        idle: nobody asks, so the serve worker has left its card; on a CPU it stays.
    """
    found = []
    for actor, critic, sharded in _teams(request, idle):
        reference = request.pins.reference or critic
        for serve in _serve_options(request, actor, critic, idle):
            found.append(
                Layout(
                    serve=serve,
                    actor=actor,
                    critic=critic,
                    reference=reference,
                    reward=_reward(request, critic),
                    sharded=sharded,
                )
            )
    return list(dict.fromkeys(found))


def trainable(request: Request) -> Numbers:
    """Devices that may train: the cards, or the CPUs if there is none; this machine's first."""
    devices = request.devices
    cards = [number for number, device in enumerate(devices) if device.kind == "cuda"]
    chosen = cards or range(len(devices))
    return tuple(sorted(chosen, key=lambda number: (devices[number].host != "", number)))


def _teams(request: Request, idle: bool) -> Iterator[tuple[Numbers, Numbers, bool]]:
    """Actor's devices, critic's devices, sharded."""
    pins, every = request.pins, trainable(request)
    team = every
    if len(every) >= 4 and not idle and not pins.serve:
        local = [number for number in every if not request.devices[number].host]
        team = tuple(number for number in every if number not in local[-1:])
    for actor in [pins.actor] if pins.actor else _actor_options(request, team, every):
        for critic in [pins.critic] if pins.critic else _critic_options(request, actor, team):
            yield actor, critic, False
    group = pins.actor or every
    # Who holds a part of the base takes part in all that is computed with it: the three roles are where its parts are.
    elsewhere = any(pinned and {*pinned} != {*group} for pinned in (pins.critic, pins.reference))
    if len(group) > 1 and not elsewhere:
        yield group, group, True


def _actor_options(request: Request, team: Numbers, every: Numbers) -> list[Numbers]:
    taken = {*request.pins.critic, *request.pins.reference}
    free = tuple(number for number in team if number not in taken) or team
    most = free if taken or len(free) == 1 else free[:-1]
    return [most, free[:1], *((number,) for number in _by_room(request, every))]


def _critic_options(request: Request, actor: Numbers, team: Numbers) -> list[Numbers]:
    kind = request.devices[actor[0]].kind  # who is not pinned beside an actor on the CPU trains there too
    others = [number for number in team if number not in actor and request.devices[number].kind == kind]
    return [(others[-1],), actor] if others else [actor]


def _serve_options(request: Request, actor: Numbers, critic: Numbers, idle: bool) -> list[Numbers]:
    devices = request.devices
    options = [request.pins.serve] if request.pins.serve else []
    if not options:
        home = [number for number in trainable(request) if not devices[number].host]
        unused = [number for number in reversed(home) if number not in (*actor, *critic)]
        options = [(number,) for number in (*unused, *reversed(critic), *_by_room(request, home)) if number in home]
    if idle:
        options = [option if devices[option[0]].kind == "cpu" else () for option in options]
    return options or [()]


def _reward(request: Request, critic: Numbers) -> Numbers:
    return () if request.reward is None else request.pins.reward or critic[-1:]


def _by_room(request: Request, numbers: Sequence[int]) -> list[int]:
    return sorted(numbers, key=lambda number: (-request.devices[number].free_bytes, number))
