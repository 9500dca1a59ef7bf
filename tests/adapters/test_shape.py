"""Names and shapes of a base model's modules."""

from __future__ import annotations

import dataclasses

import pytest

from adapters.errors import UnsupportedAdapter
from adapters.shape import module_order


def test_top_modules_are_the_seven_linear_maps_of_the_last_blocks(base):
    names = base.top_modules(1)
    assert len(names) == 7
    assert all(name.startswith("model.layers.2.") for name in names)


@pytest.mark.parametrize("layers", [0, 3, 99])
def test_zero_or_more_layers_than_there_are_means_all(base, layers):
    assert len(base.top_modules(layers)) == 21


def test_modules_sort_by_number_of_the_layer_and_not_by_its_spelling():
    names = ["model.layers.10.mlp.up_proj", "model.layers.9.mlp.up_proj", "model.layers.9.self_attn.q_proj"]
    assert sorted(names, key=module_order) == names[::-1]


def test_an_unknown_architecture_is_refused_with_those_that_work(base):
    with pytest.raises(UnsupportedAdapter, match=r"'mamba' is not supported; use one of .*llama.*qwen2"):
        dataclasses.replace(base, arch="mamba")
