"""What updates train: what `[lora]` says on the base, what the live version is made of after that."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from adapters.peft import save_peft
from adapters.shape import BaseShape
from adapters.weights import AdapterWeights
from edged.learn import profile
from engine.protocol import LoraSettings

SHAPE = BaseShape(arch="llama", n_layers=3, n_embd=24, n_heads=4, n_kv_heads=2, head_dim=8, n_ff=40, n_vocab=64)
LORA = LoraSettings(rank=4, alpha=8.0, layers=2)


def test_on_the_base_the_settings_are_in_force() -> None:
    found = profile.in_force(None, LORA, SHAPE)
    assert (found.rank, found.alpha, found.modules) == (4, 8.0, frozenset(SHAPE.top_modules(2)))
    assert str(found) == "rank 4 and alpha 8 on 14 modules"


def test_a_live_version_keeps_its_own(tmp_path: Path) -> None:
    modules = SHAPE.top_modules(1)
    matrices = {
        module: (
            np.ones((2, SHAPE.module_shape(module)[1]), np.float32),
            np.ones((SHAPE.module_shape(module)[0], 2), np.float32),
        )
        for module in modules
    }
    save_peft(tmp_path, AdapterWeights(base=SHAPE, rank=2, alpha=16.0, matrices=matrices), "small")
    found = profile.in_force(tmp_path, LORA, SHAPE)
    assert found == profile.Profile(rank=2, alpha=16.0, modules=frozenset(modules))
