"""What of the machine is used, and what is written about it: `[placement]`, `[store]`, `[log]`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from edged.settings.keys import Section, key, list_key

_DEVICE = r"^(auto|cpu|cuda(:\d{1,2})?)$"
_DEVICE_EXPECTED = '"auto", "cpu", "cuda" or "cuda:N"'


def _pins(description: str) -> Any:
    return list_key((), description, expected="a list of device numbers, as in [0, 1]")


DeviceNumber = Annotated[int, Field(ge=0, le=63)]


class PlacementSection(Section):
    serve_device: str = key(
        "auto",
        'Device that serves; "auto": the CPU, but for the blocks that serve.gpu_layers puts on the GPU.',
        pattern=_DEVICE,
        expected=_DEVICE_EXPECTED,
    )
    train_device: str = key(
        "auto",
        'Device that trains; "auto": the first NVIDIA GPU if its driver is there, else the CPU.',
        pattern=_DEVICE,
        expected=_DEVICE_EXPECTED,
    )
    serve: tuple[DeviceNumber, ...] = _pins(
        "Device that serves, by the number that `edged doctor` lists; empty: chosen."
    )
    actor: tuple[DeviceNumber, ...] = _pins("Devices that train the actor, by number; empty: chosen.")
    critic: tuple[DeviceNumber, ...] = _pins("Devices that train the critic, by number; empty: chosen.")
    reference: tuple[DeviceNumber, ...] = _pins("Devices of the reference, by number; empty: where the critic is.")
    reward: tuple[DeviceNumber, ...] = _pins("Device of the reward source, by number; empty: where the actor is.")
    cpu_devices: int = key(
        1,
        "Devices that the CPU counts as; above 1 as many processes share an update, and the threads.",
        ge=1,
        le=4,
    )
    keep_warm_s: float = key(
        300.0,
        "Seconds without work after which a worker leaves its GPU; it comes back when needed. On the CPU workers stay.",
        ge=1,
        le=2_592_000,
        live=True,
    )


class StoreSection(Section):
    readers: int = key(2, "Connections, and threads, that read the database.", ge=1, le=32)


class LogSection(Section):
    level: Literal["debug", "info", "warning", "error"] = key(
        "info", "Least level that is logged; a worker takes a change at its next start.", live=True
    )
    format: Literal["text", "json"] = key("text", "One line of text or one JSON object for each entry.")
