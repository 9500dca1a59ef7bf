"""Marked functions compute the same whether they are compiled or not."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from engine.fusion import fusible

# In a process of its own: compiling is switched on for good. Another number of rows is another call of the same graph.
PROGRAM = """
import torch
from gguf.constants import GGMLQuantizationType
from engine.blocks import UNPACKERS
from engine.fusion import compile_fusibles

unpack = UNPACKERS[GGMLQuantizationType.Q4_K]
blocks = torch.randint(0, 60, (12, 144), dtype=torch.uint8)
plain = unpack(blocks)
compile_fusibles()
for n_blocks in (12, 7):
    torch.testing.assert_close(unpack(blocks[:n_blocks]), plain[:n_blocks], rtol=1e-6, atol=1e-6)
print("torch._inductor" in __import__("sys").modules)
"""


@pytest.mark.full
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch's compiler needs one of C++")
def test_unpacking_gives_the_same_numbers_compiled():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["True"]


def test_nothing_is_compiled_unless_it_is_asked_for():
    calls = []
    marked = fusible(lambda *arguments, **named: calls.append((arguments, named)))
    marked(1, name=2)
    assert calls == [((1,), {"name": 2})]
    program = "import sys, engine.fusion, engine.blocks; print('torch._inductor' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.split() == ["False"]
