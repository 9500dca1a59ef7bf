"""Opening the device: what is refused, what is set for a card, and how the base is held there."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from engine.fault import EngineFault
from engine.train import device
from engine.train.device import choose_held, open_device

CARD, CPU = torch.device("cuda:0"), torch.device("cpu")

# Whether there is a GPU is all that is pretended.
ON_A_BOX_WITH_A_GPU = """
import torch
torch.cuda.is_available, torch.cuda.device_count, torch.cuda.set_device = lambda: True, lambda: 1, lambda device: None
"""


def test_the_cpu_is_always_there_and_needs_nothing():
    assert open_device("cpu") == CPU
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused_with_what_to_do():
    with pytest.raises(EngineFault) as caught:
        open_device("cuda:0")
    assert caught.value.code == "device_missing"
    assert caught.value.message.startswith("no GPU for cuda:0: ")
    assert caught.value.message.endswith("; set [placement] train_device to cpu")


def run_program(program: str) -> str:
    """Its output. What is set for a card is set for a whole process."""
    environment = {key: value for key, value in os.environ.items() if key != "CUBLAS_WORKSPACE_CONFIG"}
    command = [sys.executable, "-c", ON_A_BOX_WITH_A_GPU + program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True).stdout


def test_on_a_card_every_operation_is_deterministic_before_its_first_kernel():
    found = run_program(
        "import os\n"
        "from engine.train.device import open_device\n"
        "import torch\n"
        "print(open_device('cuda'), os.environ['CUBLAS_WORKSPACE_CONFIG'])\n"
        "print(torch.are_deterministic_algorithms_enabled())"
    )
    assert found.split() == ["cuda:0", ":4096:8", "True"]


def test_a_number_beyond_the_cards_is_refused():
    found = run_program(
        "from engine.fault import EngineFault\n"
        "from engine.train.device import open_device\n"
        "try: open_device('cuda:3')\n"
        "except EngineFault as fault: print(fault.message)"
    )
    assert found.strip() == "there is no cuda:3, only 1 of them; correct [placement]"


@pytest.mark.parametrize(("total", "held"), [(80 * 10**9, "dequantised"), (24 * 10**9, "quantised")])
def test_how_the_base_is_held_follows_from_the_cards_memory_unless_it_is_said(total, held, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=total))
    monkeypatch.setattr(device, "dequantised_bytes", lambda path, dtype: 16 * 10**9)
    assert choose_held("auto", CARD, "model.gguf", "bfloat16") == held
    assert choose_held("auto", CPU, "model.gguf", "bfloat16") == "dequantised"
    assert choose_held("quantised", CPU, "model.gguf", "bfloat16") == "quantised"
    assert choose_held("dequantised", CARD, "model.gguf", "bfloat16") == "dequantised"
