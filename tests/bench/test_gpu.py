"""The GPU benchmark runs through on the CPU at a tiny shape, and says why it measures nothing where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("gpu.py")
ROOT = Path(__file__).parents[2]


def bench(cache: Path, *arguments: str) -> str:
    """Its output."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_every_figure_is_there_for_a_tiny_model_on_the_cpu(tmp_path):
    out = bench(tmp_path, "--shape", "tiny", "--device", "cpu", "--runs", "1", "--no-trl", "--only", "PPO, quantised")
    for figure in ("update_s", "tokens_per_s", "yield_gap_ms", "peak_mb", "steps"):
        assert f"PPO, quantised.{figure} " in out
    assert "GRPO" in out  # and its ratios, as not measured


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_that_is_no_failure(tmp_path):
    assert bench(tmp_path).startswith("nothing measured: ")
