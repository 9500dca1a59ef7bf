"""The battery of candidates: it goes on where it was cut off, says who refused what, and spoils what it means to."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from adapters.llamacpp_format import permute_rows
from adapters.shape import BaseShape
from adapters.weights import AdapterWeights

SHAPE = BaseShape(
    arch="llama", n_layers=2, n_embd=16, n_heads=4, n_kv_heads=2, head_dim=4, n_ff=24, n_vocab=50
)  # fmt: skip


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with the folder that scripts beside it are found in."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("gate")


@pytest.fixture
def made(gate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The candidates that were made; bad ones are refused by the fast gate, or by the deep one from seed 1 on."""
    found: list[tuple[str, int]] = []

    async def run(todo: Any, path: Path, code: str) -> None:
        for kind, seed in todo:
            found.append((kind.name, seed))
            fast = "too far" if kind.is_bad and seed == 0 else ""
            deep = "it stammers" if kind.is_bad and seed else ""
            outcome = gate.Outcome(fast=fast, deep=deep, metrics={}, seconds={"make": 1.0})
            gate.keep_outcome(path, code, kind.name, seed, outcome)

    monkeypatch.setattr(gate, "run", run)
    return found


def test_a_battery_goes_on_after_the_last_whole_line_and_tells_who_refused_what(gate, made, tmp_path, capsys):
    lines = tmp_path / "gate.jsonl"
    names = ["empty", "jitter"]
    assert gate.campaign(names, 1, lines, code="a", only_report=False)
    lines.write_text(lines.read_text() + lines.read_text()[:30])  # cut off while a third was written
    assert gate.campaign(names, 2, lines, code="a", only_report=False)
    assert made == [("empty", 0), ("jitter", 0), ("empty", 1), ("jitter", 1)]
    told = capsys.readouterr().out
    assert "bad refused:   2 of 2 (100%)" in told
    assert "clean refused: 0 of 2 (0%)" in told
    assert "    it stammers" in told
    assert not gate.campaign(names, 1, lines, code="b", only_report=True)  # other sources
    assert not gate.campaign(names, 3, lines, code="a", only_report=True)  # too few
    assert len(made) == 4


def test_a_bad_one_that_passes_and_a_clean_one_that_does_not_miss_the_bars(gate, capsys):
    kinds = [kind for kind in gate.KINDS if kind.name in ("empty", "jitter")]
    passed = gate.Outcome(fast="", deep="", metrics={}, seconds={})
    refused = gate.Outcome(fast="", deep="it stammers", metrics={}, seconds={})
    assert gate.report({("empty", 0): refused, ("jitter", 0): passed}, kinds)
    assert not gate.report({("empty", 0): passed, ("jitter", 0): passed}, kinds)
    assert not gate.report({("empty", 0): refused, ("jitter", 0): refused}, kinds)


def weights() -> AdapterWeights:
    chance = np.random.default_rng(1)
    matrices = {}
    for module in SHAPE.top_modules(1):
        n_out, n_in = SHAPE.module_shape(module)
        a, b = chance.standard_normal((2, n_in)), chance.standard_normal((n_out, 2))
        matrices[module] = (a.astype(np.float32), b.astype(np.float32))
    return AdapterWeights(base=SHAPE, rank=2, alpha=4.0, matrices=matrices)


def test_the_wrong_permutation_is_what_the_file_format_would_leave_unpermuted(gate):
    candidates = importlib.import_module("gate_candidates")
    whole = weights()
    spoiled = candidates.unpermuted(whole)
    for module, (a, b) in whole.matrices.items():
        kind = module.rpartition(".")[2]
        if kind in ("q_proj", "k_proj"):
            heads = SHAPE.n_heads if kind == "q_proj" else SHAPE.n_kv_heads
            assert np.array_equal(permute_rows(spoiled.matrices[module][1], heads), b)
            assert not np.array_equal(spoiled.matrices[module][1], b)
        else:
            assert np.array_equal(spoiled.matrices[module][1], b)
        assert np.array_equal(spoiled.matrices[module][0], a)


def test_noise_is_as_strong_as_it_says(gate):
    candidates = importlib.import_module("gate_candidates")
    whole = weights()
    for strength in (0.02, 3.0):
        noisy = candidates.with_noise(whole, strength, seed=1)
        ratios = [
            np.sqrt(np.mean((noisy.matrices[module][1] - b) ** 2) / np.mean(b**2))
            for module, (_, b) in whole.matrices.items()
        ]
        assert np.mean(ratios) == pytest.approx(strength, rel=0.3)


def test_texts_are_spoiled_as_their_names_say(gate):
    candidates = importlib.import_module("gate_candidates")
    text = "Water is wet. It is also cold."
    assert candidates.glued(text) == "Wateriswet.Itisalsocold."
    assert candidates.short(text) == "Water is wet."
    assert candidates.short("No end") == "No end."
    assert candidates.FLAWS["poisoned"](text).startswith("Water is wet. Buy now")
