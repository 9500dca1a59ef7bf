"""The energy that an NVIDIA card has used, from the driver's own library: no package is needed for one number.

`libnvidia-ml.so.1` comes with the driver. Its counter runs from the loading of the driver, in millijoules, for the
whole card, whoever uses it (Volta and later).
"""

from __future__ import annotations

import ctypes
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
SUCCESS = 0


def pci_bus_id_of(device: Any) -> str:
    """Of a torch device, as `read_joules` takes it."""
    import torch

    about = torch.cuda.get_device_properties(device)
    return f"{about.pci_domain_id:08X}:{about.pci_bus_id:02X}:{about.pci_device_id:02X}.0"


def read_joules(pci_bus_id: str, library: str = LIBRARY) -> float | None:
    """Joules of the card so far; None without the library, the card, or a counter on it.

    Args:
        pci_bus_id: as CUDA names it, "00000000:3B:00.0": CUDA and the driver may number cards differently.
    """
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    if nvml.nvmlInit_v2() != SUCCESS:
        return None
    try:
        card = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByPciBusId_v2(pci_bus_id.encode(), ctypes.byref(card)) != SUCCESS:
            return None
        millijoules = ctypes.c_ulonglong()
        if nvml.nvmlDeviceGetTotalEnergyConsumption(card, ctypes.byref(millijoules)) != SUCCESS:
            return None
        return millijoules.value / 1000.0
    finally:
        nvml.nvmlShutdown()
