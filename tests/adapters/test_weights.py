"""Norms, hashes and comparisons of adapters in memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from adapters.errors import MismatchedAdapter, NotFiniteAdapter
from adapters.weights import AdapterWeights, compare, inner_product


def effect(weights: AdapterWeights) -> np.ndarray:
    """The whole effect as one vector, formed the slow way; modules that are not adapted count as zeros."""
    parts = []
    for module in weights.base.top_modules(0):
        if module in weights.matrices:
            a, b = weights.matrices[module]
            parts.append((weights.alpha / weights.rank * b.astype(np.float64) @ a.astype(np.float64)).ravel())
        else:
            parts.append(np.zeros(weights.base.module_shape(module)).ravel())
    return np.concatenate(parts)


def test_norm_equals_that_of_the_formed_product(weights):
    assert weights.norm() == pytest.approx(np.linalg.norm(effect(weights)), rel=1e-9)


def test_inner_product_equals_that_of_the_formed_products(build_weights, base):
    x = build_weights(1)
    y = build_weights(2, rank=5, alpha=2.0, modules=base.top_modules(1))
    assert inner_product(x, y) == pytest.approx(effect(x) @ effect(y), rel=1e-9)


def test_comparison_counts_modules_that_only_one_adapter_has(build_weights, base):
    x = build_weights(1)
    y = build_weights(2, rank=5, alpha=2.0, modules=base.top_modules(1))
    result = compare(x, y)
    assert result.distance == pytest.approx(np.linalg.norm(effect(x) - effect(y)), rel=1e-9)
    assert result.cosine == pytest.approx(effect(x) @ effect(y) / x.norm() / y.norm(), rel=1e-9)
    assert list(result.distance_by_module) == list(base.top_modules(2))
    squares = sum(part**2 for part in result.distance_by_module.values())
    assert squares == pytest.approx(result.distance**2, rel=1e-9)


def test_an_adapter_is_at_distance_zero_from_the_same_effect_at_another_rank_split(weights):
    halves = {m: (a * np.float32(2), b * np.float32(0.5)) for m, (a, b) in weights.matrices.items()}
    result = compare(weights, dataclasses.replace(weights, matrices=halves))
    assert result.distance == pytest.approx(0.0, abs=1e-5 * weights.norm())
    assert result.cosine == pytest.approx(1.0, abs=1e-12)


def test_cosine_with_an_adapter_without_effect_is_none(weights):
    nothing = {m: (a, np.zeros_like(b)) for m, (a, b) in weights.matrices.items()}
    assert compare(weights, dataclasses.replace(weights, matrices=nothing)).cosine is None


def test_comparing_adapters_of_different_bases_is_an_error(build_weights, base):
    other = dataclasses.replace(base, n_ff=48)
    with pytest.raises(MismatchedAdapter, match="different bases"):
        compare(build_weights(), build_weights(shape=other))


def test_hash_ignores_the_order_in_which_modules_were_given(weights):
    turned = dict(reversed(weights.matrices.items()))
    assert dataclasses.replace(weights, matrices=turned).sha256() == weights.sha256()


def test_hash_changes_with_a_single_bit(weights):
    module = next(iter(weights.matrices))
    a, b = weights.matrices[module]
    bent = a.copy()
    bent[0, 0] = np.nextafter(bent[0, 0], np.float32(np.inf))
    changed = {**weights.matrices, module: (bent, b)}
    assert dataclasses.replace(weights, matrices=changed).sha256() != weights.sha256()


def test_hash_changes_with_alpha(weights):
    assert dataclasses.replace(weights, alpha=weights.alpha * 2).sha256() != weights.sha256()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_found_and_its_module_named(weights, bad):
    module = list(weights.matrices)[5]
    a, b = weights.matrices[module]
    b = b.copy()
    b[2, 1] = bad
    broken = dataclasses.replace(weights, matrices={**weights.matrices, module: (a, b)})
    with pytest.raises(NotFiniteAdapter, match=rf"{module}: 1 of \d+ values of matrix B"):
        broken.check_finite()


def test_finite_weights_pass(weights):
    weights.check_finite()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("model.layers.3.self_attn.q_proj", "has 3 layers"),
        ("model.embed_tokens", "not a module that can be adapted"),
        ("lm_head", "not a module that can be adapted"),
        ("model.layers.1.mlp.norm", "not a module that can be adapted"),
        ("model.layers.01.self_attn.q_proj", "not a module that can be adapted"),
    ],
)
def test_a_module_that_the_base_does_not_have_is_refused(weights, module, message):
    pair = weights.matrices["model.layers.2.self_attn.q_proj"]
    with pytest.raises(MismatchedAdapter, match=message):
        dataclasses.replace(weights, matrices={module: pair})


def test_a_wrong_shape_is_refused_with_both_shapes(weights):
    module = "model.layers.2.self_attn.k_proj"
    pair = weights.matrices["model.layers.2.self_attn.q_proj"]
    with pytest.raises(MismatchedAdapter, match=r"matrix B is float32\[32, 3\].*needs float32\[16, 3\]"):
        dataclasses.replace(weights, matrices={module: pair})


def test_double_precision_is_refused(weights):
    module, (a, b) = next(iter(weights.matrices.items()))
    with pytest.raises(MismatchedAdapter, match="float64"):
        dataclasses.replace(weights, matrices={module: (a.astype(np.float64), b)})


@pytest.mark.parametrize("change", [{"rank": 0}, {"alpha": 0.0}, {"alpha": float("nan")}, {"alpha": -1.0}])
def test_a_rank_or_alpha_that_is_not_positive_is_refused(weights, change):
    with pytest.raises(MismatchedAdapter, match="must be positive"):
        dataclasses.replace(weights, **change)


def test_an_adapter_without_matrices_is_refused(weights):
    with pytest.raises(MismatchedAdapter, match="no LoRA matrices"):
        dataclasses.replace(weights, matrices={})
