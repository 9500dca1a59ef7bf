"""The tiny model, loaded once, and episodes sampled from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.models import Base, load_folder
from engine.protocol import AdapterRef, EpisodeTokens, RatedEpisode
from engine.train.lanes import Lanes
from engine.train.scorer import Scorer
from tests.engine.train.tiny import BASE, LORA, silent, write_tiny_model

MakeEpisodes = Callable[..., list[RatedEpisode]]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny products split over the cores of a busy machine would wait for one another."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_base(tiny_folder: Path) -> Base:
    return load_folder(tiny_folder, "float32", "cpu")


@pytest.fixture(scope="session")
def tiny_peer(tiny_folder: Path) -> Any:
    """The same weights in transformers' own model."""
    return transformers.LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    made = Lanes(2, torch.device("cpu"))
    yield made
    made.close()


@pytest.fixture
def scorer(tiny_base: Base, lanes: Lanes) -> Scorer:
    return Scorer(tiny_base, LORA.layers, lanes)


@pytest.fixture
def sample_episodes(scorer: Scorer) -> MakeEpisodes:
    """Random episodes of various lengths, with the trainer's own log-probabilities as the engine's."""

    def make(n: int, *, seed: int = 0, temperature: float = 0.7, adapter: AdapterRef = BASE) -> list[RatedEpisode]:
        generator = torch.Generator().manual_seed(seed)
        episodes = []
        for i in range(n):
            lengths = torch.randint(2, 9, (2,), generator=generator).tolist()
            prompt, completion = (torch.randint(3, 96, (k,), generator=generator).tolist() for k in lengths)
            episodes.append(
                EpisodeTokens(
                    episode_id=1000 * seed + i + 1,
                    prompt_ids=tuple(prompt),
                    completion_ids=tuple(completion),
                    logprobs=(None,) * len(completion),
                    temperature=temperature,
                    adapter=adapter,
                )
            )
        measured = scorer.measure(episodes, [adapter] * n, silent)
        return [
            RatedEpisode(
                episode=dataclasses.replace(episode, logprobs=tuple(measure.scaled.tolist())),
                reward=1.0 if len(episode.completion_ids) % 2 else -0.5,
                replay=False,
            )
            for episode, measure in zip(episodes, measured, strict=True)
        ]

    return make
