"""A train worker's leader on the tiny model, with real processes beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.protocol import StartTrain, TrainPlan, TrainResult
from engine.train.ranks.leader import Leader
from tests.engine.train.tiny import BASE_SHA256, LORA, silent, write_job

THREADS = 2  # of each rank: two lanes of one thread, as in the other tests

SPLIT = TrainPlan(mode="split", devices=("cpu",) * 2, critic=(1,), reference=(1,))
SHARED = TrainPlan(mode="data_parallel", devices=("cpu",) * 2, actor=(0, 1), critic=(0, 1), reference=(0, 1))
CUT = TrainPlan(mode="sharded", devices=("cpu",) * 3, actor=(0, 1, 2), critic=(0, 1, 2), reference=(0, 1, 2))
FOUR_APART = TrainPlan(mode="data_parallel", devices=("cpu",) * 4, actor=(0, 1), critic=(2,), reference=(3,))

MakeLeader = Callable[..., Leader]


def start_message(model: Path, cache: Path) -> StartTrain:
    """For a train worker on the tiny model."""
    return StartTrain(
        model_path=str(model),
        base_sha256=BASE_SHA256,
        cache_folder=str(cache),
        lora=LORA,
        threads=THREADS,
        dtype="float32",
        device="cpu",
        idle_class=False,
    )


@pytest.fixture(scope="module")
def leader(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Leader]:
    """One for the tests of a module, so that ranks of one plan are started once."""
    made = Leader(start_message(tiny_folder, tmp_path_factory.mktemp("cache")))
    yield made
    made.close()


def train(leader: Leader, folder: Path, job: object) -> TrainResult:
    """The result of a job in a fresh folder."""
    return leader.train(write_job(folder, job), silent)  # type: ignore[arg-type]
