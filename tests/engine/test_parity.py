"""Do the two engines compute the same thing? llama.cpp on the quantised file against torch on the unpacked weights.

For fixed tokens both give log-probabilities, with and without a deterministic adapter. What is allowed between them is
their rounding, and the bound is calibrated: the same comparison with the adapter written wrongly (rows of Q and K not
permuted; alpha off by a factor) must be out of bounds, or the bound would prove nothing.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from adapters import llamacpp_format
from adapters.weights import AdapterWeights
from engine.generate.llamacpp import Context, Model
from engine.generate.scheduler import Entry
from engine.lora import lora_from_weights, new_lora, weights_of_lora
from engine.models import Base, load_base
from engine.protocol import LoraSettings, ProbeTokens
from engine.train.lanes import Lanes
from engine.train.scorer import Scorer

pytestmark = pytest.mark.real_model

TEXTS = (
    "To boil an egg, put it into boiling water for seven minutes, then cool it under the tap.",
    "def area(width, height):\n    return width * height\n",
    "1, 2, 3, 5, 8, 13, 21: every number is the sum of the two before it.",
    "Das Café in Zürich öffnet um 8 Uhr; müde Gäste trinken dort süßen Tee.",
    "東京は日本の首都です。",
    "Great work! 🎉 See you at the game tonight.",
)
PROMPT_TOKENS = 3

# 64 fixed continuations, four out of each text: short, so that they stay cheap.
MORE_TEXTS = (
    *TEXTS,
    "Dear neighbour, thank you for watering my plants while I was away.",
    "SELECT name, price FROM items WHERE price < 10 ORDER BY name;",
    "The train from platform 4 leaves at 18:32 and arrives at 21:05.",
    "¿Dónde está la biblioteca? Está a la vuelta de la esquina.",
    "Les élèves ont déjà mangé; où êtes-vous allés hier soir ?",
    "Привет! Как дела? Сегодня очень холодно, возьми шапку.",
    "- milk\n- bread\n- two eggs\n- a pound of butter\n- some apples",
    "It was a dark night, and nobody saw the cat climb over the wall.",
    "Water boils at 100 °C (212 °F); at 3,000 m it boils at about 90 °C.",
    "안녕하세요, 만나서 반갑습니다. 오늘 날씨가 좋네요.",
)
WINDOW_TOKENS, WINDOW_PROMPT = 7, 3

# Mean |difference| in nats a token. Measured: 0.075 to 0.09 by rounding alone (llama.cpp rounds activations to 8 bits
# before each product of a quantised matrix); written wrongly, 0.3 and more.
BOUND = 0.12


@dataclasses.dataclass(frozen=True)
class Engines:
    """Both engines on one model. `sha256`, `cache`: to load the trainer's base again in another number format."""

    path: Path
    sha256: str
    cache: Path
    model: Model
    context: Context
    base: Base
    probes: tuple[ProbeTokens, ...]
    lanes: Lanes

    def served(self, adapter_file: Path | None) -> list[np.ndarray]:
        """Log-probabilities of the probes' completions by llama.cpp.

        In a thread of its own: llama.cpp sets the processor's matrix tiles up once a thread, and torch, where it has
        multiplied in bfloat16 on that thread since, leaves them otherwise; the next product ends the process. The
        daemon's workers never have both.
        """
        with concurrent.futures.ThreadPoolExecutor(1) as alone:
            return alone.submit(self._served, adapter_file).result()

    def _served(self, adapter_file: Path | None) -> list[np.ndarray]:
        adapter = None if adapter_file is None else self.model.load_adapter(str(adapter_file))
        self.context.set_adapter(adapter)
        try:
            return [self._score(probe) for probe in self.probes]
        finally:
            self.context.set_adapter(None)
            if adapter is not None:
                adapter.free()

    def _score(self, probe: ProbeTokens) -> np.ndarray:
        self.context.clear()
        ids = probe.prompt_ids + probe.completion_ids
        rows = self.context.decode([Entry(0, i, token, i >= PROMPT_TOKENS - 1) for i, token in enumerate(ids)])
        logits = torch.tensor(np.array(rows[:-1]))
        return torch.log_softmax(logits, 1).gather(1, torch.tensor(probe.completion_ids)[:, None])[:, 0].numpy()

    def trained(self, weights: AdapterWeights | None, base: Base | None = None) -> list[np.ndarray]:
        """The same by the trainer."""
        scorer = Scorer(base or self.base, 10, self.lanes)
        lora = None if weights is None else lora_from_weights(weights, torch.device("cpu"))
        return [np.array(one) for one in scorer.measure_probes(self.probes, lora, lambda: None)]


@pytest.fixture(scope="module")
def engines(packaged_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    torch.set_num_threads(1)
    sha256 = hashlib.sha256(packaged_model.read_bytes()).hexdigest()
    cache = tmp_path_factory.mktemp("cache")
    base = load_base(str(packaged_model), sha256, str(cache), "float32", "cpu")
    model = Model(str(packaged_model), gpu_layers=0)
    context = Context(model, context_tokens=512, n_sequences=1, max_rows=64, threads=1)
    lanes = Lanes(1, torch.device("cpu"))
    ids = [model.tokenise(text, add_special=False, parse_special=False) for text in TEXTS]
    probes = tuple(ProbeTokens(prompt_ids=i[:PROMPT_TOKENS], completion_ids=i[PROMPT_TOKENS:]) for i in ids)
    yield Engines(packaged_model, sha256, cache, model, context, base, probes, lanes)
    lanes.close()


@pytest.fixture(scope="module")
def served_base(engines: Engines) -> list[np.ndarray]:
    return engines.served(None)


@pytest.fixture(scope="module")
def served_adapter(
    engines: Engines, adapter: AdapterWeights, tmp_path_factory: pytest.TempPathFactory
) -> list[np.ndarray]:
    return engines.served(write_gguf(tmp_path_factory.mktemp("adapter"), adapter))


@pytest.fixture(scope="module")
def trained_adapter(engines: Engines, adapter: AdapterWeights) -> list[np.ndarray]:
    return engines.trained(adapter)


@pytest.fixture(scope="module")
def adapter(engines: Engines) -> AdapterWeights:
    """A deterministic adapter on the top third whose effect is several times the rounding."""
    shape = engines.base.config.shape
    lora = new_lora(shape, LoraSettings(rank=8, alpha=16.0, layers=10), 5, torch.device("cpu"))
    generator = torch.Generator().manual_seed(6)
    for module, (_, b) in lora.matrices.items():
        # Q and K stronger than the rest: attention forgives much, and the permutation concerns only them.
        b.normal_(0.0, 0.5 if module.endswith(("q_proj", "k_proj")) else 0.05, generator=generator)
    return weights_of_lora(lora)


def write_gguf(folder: Path, weights: AdapterWeights) -> Path:
    path = folder / "adapter.gguf"
    llamacpp_format.save_gguf_adapter(path, weights, version=1, parent=0, base_sha256="0" * 64)
    return path


def mean_gap(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    return float(np.abs(np.concatenate(one) - np.concatenate(other)).mean())


def test_t_sync_1_without_an_adapter_both_engines_agree(engines: Engines, served_base: list[np.ndarray]) -> None:
    assert mean_gap(served_base, engines.trained(None)) < BOUND


def test_t_sync_1_with_an_adapter_both_engines_agree(
    served_adapter: list[np.ndarray], trained_adapter: list[np.ndarray]
) -> None:
    assert mean_gap(served_adapter, trained_adapter) < BOUND


def test_t_sync_1_on_sixty_four_continuations_an_adapter_adds_next_to_nothing_to_the_gap_of_the_base(
    engines: Engines, adapter: AdapterWeights, tmp_path: Path
) -> None:
    ids = [engines.model.tokenise(text, add_special=False, parse_special=False) for text in MORE_TEXTS]
    windows = [
        of_text[start : start + WINDOW_TOKENS]
        for of_text in ids
        for start in (round(i * (len(of_text) - WINDOW_TOKENS) / 3) for i in range(4))
    ]
    probes = tuple(ProbeTokens(prompt_ids=w[:WINDOW_PROMPT], completion_ids=w[WINDOW_PROMPT:]) for w in windows)
    assert len(set(probes)) >= 64
    many = dataclasses.replace(engines, probes=probes)
    of_base = mean_gap(many.served(None), many.trained(None))
    of_adapter = mean_gap(many.served(write_gguf(tmp_path, adapter)), many.trained(adapter))
    assert of_base < BOUND
    assert of_adapter < 1.5 * of_base


def test_t_sync_2_the_adapter_changes_both_engines_by_far_more_than_their_gap(
    engines: Engines,
    served_base: list[np.ndarray],
    served_adapter: list[np.ndarray],
    trained_adapter: list[np.ndarray],
) -> None:
    assert mean_gap(served_adapter, served_base) > 3 * BOUND
    assert mean_gap(trained_adapter, engines.trained(None)) > 3 * BOUND


def test_the_trainer_in_bfloat16_agrees_too(
    engines: Engines, adapter: AdapterWeights, served_base: list[np.ndarray], served_adapter: list[np.ndarray]
) -> None:
    base = load_base(str(engines.path), engines.sha256, str(engines.cache), "bfloat16", "cpu")
    assert mean_gap(served_base, engines.trained(None, base)) < BOUND
    assert mean_gap(served_adapter, engines.trained(adapter, base)) < BOUND


def test_rows_of_q_and_k_left_unpermuted_are_out_of_bounds(
    engines: Engines, adapter: AdapterWeights, trained_adapter: list[np.ndarray], tmp_path: Path
) -> None:
    matrices = dict(adapter.matrices)
    heads = {"q_proj": adapter.base.n_heads, "k_proj": adapter.base.n_kv_heads}
    for module, (a, b) in adapter.matrices.items():
        n_heads = heads.get(module.rpartition(".")[2])
        if n_heads is not None:  # undone here, so that writing restores the original order
            matrices[module] = (a, llamacpp_format.unpermute_rows(b, n_heads))
    served = engines.served(write_gguf(tmp_path, dataclasses.replace(adapter, matrices=matrices)))
    assert mean_gap(served, trained_adapter) > 2 * BOUND


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_t_lora_7_a_wrong_alpha_is_out_of_bounds(
    engines: Engines, adapter: AdapterWeights, trained_adapter: list[np.ndarray], tmp_path: Path, factor: float
) -> None:
    served = engines.served(write_gguf(tmp_path, dataclasses.replace(adapter, alpha=adapter.alpha * factor)))
    assert mean_gap(served, trained_adapter) > 2 * BOUND
