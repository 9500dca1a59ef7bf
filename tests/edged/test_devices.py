"""What the machine says of its devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from edged import devices
from edged.devices import DevicesUnknown

MIB = 2**20


def test_cards_are_read_as_nvidia_smi_lists_them() -> None:
    found = devices.parse_cards("0, 81559, 80994\n1, 24576, 1024\n")
    assert [(device.name, device.kind) for device in found] == [("cuda:0", "cuda"), ("cuda:1", "cuda")]
    assert [device.total_bytes for device in found] == [81559 * MIB, 24576 * MIB]
    assert [device.free_bytes for device in found] == [80994 * MIB, 1024 * MIB]


def test_a_card_that_does_not_tell_its_memory_is_no_guess() -> None:
    with pytest.raises(DevicesUnknown, match=r"'0, \[N/A\], \[N/A\]', expected index, total and free MiB"):
        devices.parse_cards("0, [N/A], [N/A]\n")


def test_the_cpu_has_the_memory_that_is_available() -> None:
    cpu = devices.parse_meminfo("MemTotal:       16000 kB\nMemFree:  1 kB\nMemAvailable:    9000 kB\n")
    assert (cpu.name, cpu.kind, cpu.total_bytes, cpu.free_bytes) == ("cpu", "cpu", 16_384_000, 9_216_000)
    with pytest.raises(DevicesUnknown, match="MemAvailable"):
        devices.parse_meminfo("MemTotal:       16000 kB\n")


def test_this_machine_ends_with_its_cpu() -> None:
    *cards, cpu = devices.find_devices()
    assert cpu.kind == "cpu"
    assert 0 < cpu.free_bytes <= cpu.total_bytes
    assert all(card.kind == "cuda" for card in cards)


def test_without_a_driver_there_are_no_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices.find_cards() == ()


def test_a_driver_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(DevicesUnknown, match="check the NVIDIA driver"):
        devices.find_cards()
    tool.write_text("#!/bin/sh\necho '0, 24576, 24000'\n")
    assert [card.name for card in devices.find_cards()] == ["cuda:0"]
