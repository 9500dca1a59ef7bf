"""A plan in words and bytes, for people. Pure."""

from __future__ import annotations

from engine.placement.memory import Share
from engine.placement.search import Plan

_MODES = {
    "timeslice": "timeslice (the roles take turns on one base)",
    "split": "split (critic and reference beside the actor)",
    "data_parallel": "data_parallel (the actor on several devices)",
    "sharded": "sharded (the base cut over the devices)",
}


def summary(plan: Plan) -> str:
    """One line: the mode, the devices that train, whether serving sleeps, and the micro-batch."""
    devices = plan.request.devices
    actor = ", ".join(devices[number].label for number in plan.layout.actor)
    serving = "serving sleeps during updates" if plan.serve_sleeps else "serving goes on during updates"
    if not plan.layout.serve:
        serving = "serving is idle"
    return f"{_MODES[plan.mode]}, actor on {actor}; {serving}; micro-batches of {plan.micro_batch_tokens:,} tokens"


def device_line(plan: Plan, number: int) -> str:
    """What one device needs and has."""
    device = plan.request.devices[number]
    free = f"of {device.free_bytes:,} free"
    return f"{plan.needs[number]:,} bytes at the busiest moment, {free}"


def share_line(share: Share) -> str:
    """A role's bytes by part, largest first."""
    parts = sorted(share.parts.items(), key=lambda part: -part[1])
    return f"{share.n_bytes:,} bytes: " + ", ".join(f"{name} {n_bytes:,}" for name, n_bytes in parts)


def hindrance(plan: Plan) -> str:
    """Why the workers cannot carry the plan out; "" if they can."""
    if plan.serve_sleeps:
        return "serving is not put to sleep during updates"
    training = {*plan.layout.actor, *plan.layout.critic, *plan.layout.reference}
    if any(plan.request.devices[number].host for number in training):
        return "the ranks of an update are on one machine"
    if len({plan.request.devices[number].kind for number in training}) > 1:
        return "the ranks of an update are all on cards or all on the CPU"
    if plan.idle and not plan.layout.serve:
        return "the serve worker does not leave its card"
    return ""
