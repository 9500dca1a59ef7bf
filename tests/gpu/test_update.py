"""Updates on a card: what the CPU gives, the same bytes again, within the plan's memory, quantised, and stopped."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import load_file

from adapters.peft import WEIGHTS_FILE
from engine.models import Held, load_base
from engine.placement import Device, Model, Request, Serving, Training
from engine.placement.memory import train_shares
from engine.protocol import OUT_FOLDER, RESULT_FILE, LoraSettings
from engine.train.checkpoint import TENSORS_FILE
from engine.train.job import run_job
from engine.train.lanes import Lanes
from engine.train.scorer import Scorer
from tests.engine.families import write_family, write_family_gguf
from tests.engine.train.tiny import BASE_SHA256, LORA, PPO, hash_tree, make_job, silent, write_job
from tests.gpu.conftest import MakeScorer
from tests.gpu.models import ONE_BILLION, random_answers, random_base, sampled_by

CPU = torch.device("cpu")
VOCABULARY = 96  # of the tiny models


def trained(scorer: Scorer, folder: Path, job: object, sha256: str = BASE_SHA256) -> dict[str, str]:
    """The hashes of everything that the update in a fresh folder gives, but for the seconds."""
    run_job(write_job(folder, job), scorer, sha256, silent)  # type: ignore[arg-type]
    hashes = hash_tree(folder / OUT_FOLDER)
    del hashes[RESULT_FILE]
    return hashes


@pytest.mark.parametrize("critic", ["head", "lora"])
def test_an_update_has_the_gradient_that_it_has_on_the_cpu(
    card: torch.device, make_scorer: MakeScorer, tmp_path: Path, critic: str
) -> None:
    on_cpu = make_scorer(CPU)
    answers = sampled_by(on_cpu, random_answers(VOCABULARY, 8, 6, 9))
    # After one step the first moment is the gradient, but for a factor. A step itself has the size of the learning rate
    # however small the gradient is, so the adapter says less.
    one_step = dataclasses.replace(PPO, epochs=1, minibatches=1, critic=critic)
    job = make_job(answers, ppo=one_step, probes=())
    for name, scorer in (("cpu", on_cpu), ("card", make_scorer(card))):
        trained(scorer, tmp_path / name, job)
    ours, theirs = (load_file(tmp_path / name / OUT_FOLDER / "checkpoint" / TENSORS_FILE) for name in ("card", "cpu"))
    means = [name for name in ours if ".mean." in name]
    assert means
    for name in means:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_t_res_1_an_update_on_a_card_gives_the_same_bytes_again(
    card: torch.device, make_scorer: MakeScorer, tmp_path: Path, dtype: str
) -> None:
    job = make_job(sampled_by(make_scorer(CPU), random_answers(VOCABULARY, 8, 6, 9)))
    runs = [trained(make_scorer(card, dtype), tmp_path / str(run), job) for run in range(2)]
    assert runs[0] == runs[1]


def test_how_the_base_is_held_changes_no_byte_on_a_card_either(card: torch.device, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_family_gguf(path, write_family(tmp_path / "folder", "llama"), GGMLQuantizationType.Q4_1)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    job = make_job(random_answers(VOCABULARY, 6, 6, 9), base_sha256=sha256)
    found = []
    ways: tuple[Held, ...] = ("quantised", "dequantised")
    for held in ways:
        base = load_base(str(path), sha256, str(tmp_path / "cache"), "bfloat16", str(card), held)
        lanes = Lanes(2, card)
        found.append(trained(Scorer(base, LORA.layers, lanes), tmp_path / held, job, sha256))
        lanes.close()
    assert found[0] == found[1]


def test_an_update_can_be_stopped_between_micro_steps_and_leaves_its_job(
    card: torch.device, make_scorer: MakeScorer, tmp_path: Path
) -> None:
    class Asked(Exception):
        pass

    stages: list[str] = []

    def tick(stage: str, done: int, total: int) -> None:
        stages.append(stage)
        if stages.count("optimise") == 3:
            raise Asked

    folder = write_job(tmp_path / "job", make_job(random_answers(VOCABULARY, 8, 6, 9)))
    with pytest.raises(Asked):
        run_job(folder, make_scorer(card), BASE_SHA256, tick)
    assert not (folder / OUT_FOLDER).exists()
    trained(make_scorer(card), tmp_path / "again", make_job(random_answers(VOCABULARY, 8, 6, 9)))


def test_a_model_of_a_thousand_million_weights_is_trained_within_the_memory_of_the_plan(
    card: torch.device, tmp_path: Path
) -> None:
    prompt_tokens, completion_tokens, n = 128, 256, 16
    sequence_tokens = prompt_tokens + completion_tokens
    free, total = torch.cuda.mem_get_info(card)
    if free < 8e9:
        pytest.skip(f"needs 8 GB free on the card: there are {free / 1e9:.1f}")
    lora = LoraSettings(rank=8, alpha=16.0, layers=0)
    torch.cuda.reset_peak_memory_stats(card)
    base = random_base(ONE_BILLION, card, torch.bfloat16)
    lanes = Lanes(2, card)
    answers = random_answers(ONE_BILLION.n_vocab, n, prompt_tokens, completion_tokens)
    result = run_job(
        write_job(tmp_path / "job", make_job(answers, lora=lora, probes=())),
        Scorer(base, 0, lanes),
        BASE_SHA256,
        silent,
    )
    lanes.close()
    assert result.metrics["policy/steps"] >= 1
    assert load_file(tmp_path / "job" / OUT_FOLDER / "adapter" / WEIGHTS_FILE)
    request = Request(
        devices=(Device(name=str(card), kind="cuda", total_bytes=total, free_bytes=free),),
        model=Model(shape=ONE_BILLION, tied=True, file_bytes=0),
        serving=Serving(slots=1, context_tokens=256),
        training=Training(
            dtype="bfloat16",
            rank=lora.rank,
            layers=lora.layers,
            critic="head",
            batch_tokens=n * sequence_tokens,
            sequence_tokens=sequence_tokens,
            minibatches=PPO.minibatches,
            trunk_cache_bytes=0,
            cached_adapters=0,
        ),
    )
    shares = train_shares(
        request,
        0,
        ["actor", "critic", "reference"],
        tokens=max(640, sequence_tokens),
        n_shards=1,
    )
    planned = sum(sum(share.held.values()) for share in shares) + max(sum(share.working.values()) for share in shares)
    # The plan counts what a context of the driver takes too, which torch does not see.
    assert torch.cuda.max_memory_reserved(card) <= planned
