"""Small adapters and base shapes for the tests of adapter files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from adapters.shape import BaseShape
from adapters.weights import AdapterWeights

BuildWeights = Callable[..., AdapterWeights]


@pytest.fixture
def base() -> BaseShape:
    """A llama of three layers with grouped-query attention; every width differs, so that a mix-up cannot fit."""
    return BaseShape(arch="llama", n_layers=3, n_embd=24, n_heads=4, n_kv_heads=2, head_dim=8, n_ff=40, n_vocab=64)


@pytest.fixture
def build_weights(base: BaseShape) -> BuildWeights:
    """Builds random weights: seed, rank, alpha and modules as asked for."""

    def build(
        seed: int = 0,
        *,
        rank: int = 3,
        alpha: float = 6.0,
        modules: Sequence[str] | None = None,
        shape: BaseShape = base,
    ) -> AdapterWeights:
        rng = np.random.default_rng(seed)
        matrices = {}
        for module in shape.top_modules(2) if modules is None else modules:
            n_out, n_in = shape.module_shape(module)
            a = rng.standard_normal((rank, n_in), dtype=np.float32)
            b = rng.standard_normal((n_out, rank), dtype=np.float32)
            matrices[module] = (a, b)
        return AdapterWeights(base=shape, rank=rank, alpha=alpha, matrices=matrices)

    return build


@pytest.fixture
def weights(build_weights: BuildWeights) -> AdapterWeights:
    """All seven linear modules of the top two layers."""
    return build_weights()
