"""Which role goes on which device, in bytes: serve, actor, critic, reference and reward on the devices of a box.

    request   what a plan is made from          layout   who might be where, best first
    memory    bytes of each role, part by part  search   the first layout that fits
    planner   plans for busy and idle, the error  advice   what would fit instead
    describe  a plan in words

Pure: the standard library and `adapters.shape`, so the daemon may import it. Nothing here looks at a machine or starts
anything."""

from engine.placement.advice import Remedy
from engine.placement.describe import device_line, hindrance, share_line, summary
from engine.placement.layout import BadPin, Layout, Mode
from engine.placement.memory import PARTS, Share, base_weight_bytes, prefers_quantised
from engine.placement.planner import DoesNotFit, Move, Plans, moves, plan, plan_both
from engine.placement.request import ROLES, Device, Dtype, Held, Model, Pins, Request, Reward, Role, Serving, Training
from engine.placement.search import Plan, Shortfall

__all__ = [
    "PARTS",
    "ROLES",
    "BadPin",
    "Device",
    "DoesNotFit",
    "Dtype",
    "Held",
    "Layout",
    "Mode",
    "Model",
    "Move",
    "Pins",
    "Plan",
    "Plans",
    "Remedy",
    "Request",
    "Reward",
    "Role",
    "Serving",
    "Share",
    "Shortfall",
    "Training",
    "base_weight_bytes",
    "device_line",
    "hindrance",
    "moves",
    "plan",
    "plan_both",
    "prefers_quantised",
    "share_line",
    "summary",
]
