"""The device that a worker computes on: whether it is there, and what is set before its first kernel.

On a card every operation has to be deterministic, so that a replayed update gives the same bytes: cuBLAS is so only
with a workspace of fixed size, which it reads from the environment when it starts. On a CPU every operation that is
used here is deterministic as it is; torch's switch would import its compiler (70 MB, a second of start) for nothing.

Memory of a card goes back to it after each piece of work: the server may live on the same card.
"""

from __future__ import annotations

import ctypes
import os

import torch

from engine.fault import EngineFault
from engine.models import Held, dequantised_bytes
from engine.placement.memory import prefers_quantised
from engine.protocol import BaseWeights

# Read when cuBLAS and torch's allocator start; what an operator has set stands. Expandable segments: micro-batches have
# ever other sizes, and pieces of fixed segments would lie about unused.
_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def open_device(name: str) -> torch.device:
    """The device `name` ("cpu", "cuda", "cuda:1"), ready to compute.

    Raises:
        EngineFault: device_missing.
    """
    device = torch.device(name)
    if device.type != "cuda":
        return device
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no GPU"
        raise EngineFault("device_missing", f"no GPU for {name}: {why}; set [placement] train_device to cpu")
    device = torch.device("cuda", device.index or 0)
    there = torch.cuda.device_count()
    if device.index >= there:
        raise EngineFault("device_missing", f"there is no {name}, only {there} of them; correct [placement]")
    torch.use_deterministic_algorithms(True)
    # Nothing here reads what it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.cuda.set_device(device)
    return device


def choose_held(wanted: BaseWeights, device: torch.device, model_path: str, dtype: str) -> Held:
    """How the base is held: as `wanted`, and for "auto" by the card's memory. Raises EngineFault (model_unreadable)."""
    if wanted != "auto":
        return wanted
    if device.type != "cuda":
        return "dequantised"
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    return "quantised" if prefers_quantised(dequantised_bytes(model_path, dtype), total_bytes) else "dequantised"


def return_free_memory(device: torch.device) -> None:
    """Give memory that allocators keep back to the card and to the system: 400 MB of the latter after an update of a
    small model, for which an idle box has other uses."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has such a call
    if trim is not None:
        trim(0)
