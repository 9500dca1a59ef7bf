"""Marked functions compute the same whether they are compiled or not."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
import typing

import pytest
import torch

from engine import blocks
from engine.fusion import fusible
from engine.train import decoder

# In a process of its own: compiling is switched on for good. Another number of rows is another call of the same graph.
PROGRAM = """
import sys
import torch
from gguf.constants import GGMLQuantizationType
from engine.blocks import UNPACKERS
from engine.fusion import compile_fusibles
from engine.train import decoder

def results(n):
    torch.manual_seed(0)
    blocks = torch.randint(0, 60, (n, 144), dtype=torch.uint8)
    x, y, weight = torch.randn(n, 48), torch.randn(n, 48), torch.randn(48)
    normed, unit, inverse_rms = decoder._norm_forward(x, weight, 1e-5, torch.float32)
    return (
        UNPACKERS[GGMLQuantizationType.Q4_K](blocks),
        normed,
        decoder._norm_backward(y, unit, weight, inverse_rms),
        decoder._silu_forward(x, y),
        *decoder._silu_backward(x, y, x + y),
    )

plain = [results(n) for n in (12, 7)]
compile_fusibles()
for n, expected in zip((12, 7), plain):
    for one, other in zip(results(n), expected):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
print("torch._inductor" in sys.modules)
"""


@pytest.mark.full
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch's compiler needs one of C++")
def test_compiled_functions_give_the_same_numbers():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["True"]


def test_t_lora_9_what_is_compiled_takes_tensors_alone_and_holds_nothing():
    # So an adapter's matrices, or anything else that changes, cannot be frozen into a graph.
    functions = [one for module in (blocks, decoder) for one in vars(module).values() if inspect.isfunction(one)]
    plain = [inspect.unwrap(one) for one in functions if one.__code__.co_qualname.startswith("fusible.")]
    assert len(plain) >= 18
    for function in plain:
        kinds = typing.get_type_hints(function)
        assert set(kinds.values()) - {kinds["return"]} <= {torch.Tensor, float, torch.dtype}
        assert function.__closure__ is None


def test_nothing_is_compiled_unless_it_is_asked_for():
    calls = []
    marked = fusible(lambda *arguments, **named: calls.append((arguments, named)))
    marked(1, name=2)
    assert calls == [((1,), {"name": 2})]
    program = "import sys, engine.fusion, engine.blocks; print('torch._inductor' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.split() == ["False"]
