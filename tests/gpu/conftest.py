"""A card for the tests of this folder; where there is none, every one of them is skipped and says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.models import load_folder
from engine.train.device import open_device
from engine.train.lanes import Lanes
from engine.train.scorer import Scorer
from tests.engine.train.tiny import LORA, write_tiny_model

MakeScorer = Callable[..., Scorer]


@pytest.fixture(scope="session")
def card() -> torch.device:
    """The first card, opened as the train worker opens it."""
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no GPU"
        pytest.skip(f"needs a CUDA device: {why}")
    return open_device("cuda:0")


@pytest.fixture(scope="session")
def second_card(card: torch.device) -> torch.device:
    """Another one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices: there is one")
    return torch.device("cuda:1")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return folder


@pytest.fixture
def make_scorer(tiny_folder: Path) -> Iterator[MakeScorer]:
    """The tiny model in a trainer on a device."""
    opened: list[Lanes] = []

    def make(device: torch.device, dtype: str = "float32") -> Scorer:
        opened.append(Lanes(2, device))
        return Scorer(load_folder(tiny_folder, dtype, str(device)), LORA.layers, opened[-1])

    yield make
    for lanes in opened:
        lanes.close()
