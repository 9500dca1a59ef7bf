"""The first layout that fits, with the largest micro-batch that its devices have room for. Pure.

Serving goes on during training wherever that fits, even with small micro-batches; only if no layout has room for both
does the serve worker sleep while an update runs. A layout fits if no device needs more than its free bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from engine.placement.layout import Layout, Mode, check_pins, layouts
from engine.placement.memory import (
    Share,
    remote_serve_share,
    reward_share,
    round_up_rows,
    serve_share,
    torch_serve_share,
    train_shares,
)
from engine.placement.request import ROLES, Request, Role


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Who is where, in bytes.

    Attributes:
        request: what was planned for.
        idle: made for the time in which nobody asks.
        needs: bytes of each device at the busiest moment, in the order of the request's devices.
        serve_sleeps: the serve worker gives its memory back while an update runs.
        micro_batch_tokens: most tokens that go through the network together, on one device.
    """

    request: Request
    idle: bool
    layout: Layout
    shares: tuple[Share, ...]
    needs: tuple[int, ...]
    serve_sleeps: bool
    micro_batch_tokens: int

    @property
    def mode(self) -> Mode:
        return self.layout.mode


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """Nothing fits; this is how the layout that lacks least would.

    Attributes:
        missing: device -> bytes. With so much more on each of them there would be a plan.
        role: whose bytes no longer fit, on the device that lacks most.
    """

    layout: Layout
    missing: dict[int, int]
    role: Role

    @property
    def device(self) -> int:
        """The device that lacks most."""
        return max(self.missing, key=lambda number: self.missing[number])


@dataclasses.dataclass(frozen=True, slots=True)
class _Candidate:
    layout: Layout
    tokens: int
    shares: tuple[Share, ...]


def search(request: Request, *, idle: bool) -> Plan | Shortfall:
    """The best plan, or what is missing. Raises BadPin."""
    check_pins(request)
    candidates = [
        _Candidate(layout, tokens, shares_of(request, layout, tokens))
        for layout in layouts(request, idle=idle)
        for tokens in micro_batch_sizes(request)
    ]
    for serve_sleeps in (False, True):
        for candidate in candidates:
            needs = needs_of(request, candidate.shares, serve_sleeps)
            if all(need <= device.free_bytes for need, device in zip(needs, request.devices, strict=True)):
                return Plan(
                    request=request,
                    idle=idle,
                    layout=candidate.layout,
                    shares=candidate.shares,
                    needs=needs,
                    serve_sleeps=serve_sleeps,
                    micro_batch_tokens=candidate.tokens,
                )
    shortfalls = (_shortfall(request, candidate) for candidate in candidates)
    return min(shortfalls, key=lambda one: sum(one.missing.values()))


def micro_batch_sizes(request: Request) -> tuple[int, ...]:
    """From the wanted size down to the longest answer, by the steps that rows are rounded to."""
    least = request.training.sequence_tokens
    most = max(request.training.micro_batch_tokens, least)
    steps = {rows for rows in range(-(-least // 32) * 32, most, 32) if round_up_rows(rows) == rows}
    return tuple(sorted({least, most} | steps, reverse=True))


def _serve_share(request: Request, number: int) -> Share:
    device = request.devices[number]
    if request.serving.engine == "torch":
        return torch_serve_share(request.model, request.serving, device, number, request.training.dtype)
    if request.serving.engine == "none":
        return remote_serve_share(device, number)
    return serve_share(request.model, request.serving, device, number)


def shares_of(request: Request, layout: Layout, tokens: int) -> tuple[Share, ...]:
    """Every role's bytes on each of its devices, by role and then by device."""
    shares = [_serve_share(request, number) for number in layout.serve]
    for number in range(len(request.devices)):
        here: list[Role] = [role for role in ("actor", "critic", "reference") if number in layout.of(role)]
        shares += train_shares(
            request,
            number,
            here,
            tokens=tokens,
            n_shards=len(layout.actor) if layout.sharded and number in layout.actor else 1,
        )
    if request.reward is not None:
        shares += [reward_share(request, request.reward, n) for n in layout.reward]
    return tuple(sorted(shares, key=lambda share: (ROLES.index(share.role), share.device)))


def needs_of(request: Request, shares: Sequence[Share], serve_sleeps: bool) -> tuple[int, ...]:
    """Bytes of each device at its busiest moment: training roles take turns, and so may serving and training."""
    needs = []
    for number in range(len(request.devices)):
        here = [share for share in shares if share.device == number]
        serve = sum(share.n_bytes for share in here if share.role == "serve")
        rest = [share for share in here if share.role != "serve"]
        busy = sum(sum(share.held.values()) for share in rest)
        busy += max((sum(share.working.values()) for share in rest), default=0)
        needs.append(max(serve, busy) if serve_sleeps else serve + busy)
    return tuple(needs)


def _shortfall(request: Request, candidate: _Candidate) -> Shortfall:
    shares, devices = candidate.shares, request.devices
    needs = needs_of(request, shares, True)
    missing = {
        number: need - device.free_bytes
        for number, (need, device) in enumerate(zip(needs, devices, strict=True))
        if need > device.free_bytes
    }
    worst = max(missing, key=lambda number: missing[number])
    for count in range(1, len(shares) + 1):
        if needs_of(request, shares[:count], True)[worst] > devices[worst].free_bytes:
            break
    return Shortfall(layout=candidate.layout, missing=missing, role=shares[count - 1].role)
