"""How the base is held changes no update: quantised or unpacked, the result has the same bytes."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

from gguf.constants import GGMLQuantizationType

from engine.models import load_base
from engine.protocol import OUT_FOLDER, RESULT_FILE
from engine.train.job import run_job
from engine.train.lanes import Lanes
from engine.train.scorer import Scorer
from tests.engine.families import write_family, write_family_gguf
from tests.engine.train.conftest import MakeEpisodes
from tests.engine.train.pretend_card import CARD, PretendLanes, pretended
from tests.engine.train.tiny import LORA, PPO, hash_tree, make_job, silent, write_job


def write_gguf(folder: Path) -> tuple[Path, str]:
    """A tiny file of quantised maps, and its hash."""
    path = folder / "model.gguf"
    write_family_gguf(path, write_family(folder / "folder", "llama"), GGMLQuantizationType.Q4_1)
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


def test_an_update_on_quantised_weights_gives_the_bytes_of_one_on_plain_weights(
    tmp_path: Path, sample_episodes: MakeEpisodes, lanes: Lanes
) -> None:
    path, sha256 = write_gguf(tmp_path)
    job = make_job(sample_episodes(6), base_sha256=sha256)
    trees = []
    for held in ("quantised", "dequantised"):
        base = load_base(str(path), sha256, str(tmp_path / "cache"), "bfloat16", "cpu", held)
        folder = write_job(tmp_path / held, job)
        run_job(folder, Scorer(base, LORA.layers, lanes), sha256, silent)
        trees.append(hash_tree(folder / OUT_FOLDER))
        del trees[-1][RESULT_FILE]  # says the seconds that it took
    assert trees[0] == trees[1]


def test_quantised_weights_stay_on_their_device(tmp_path: Path, sample_episodes: MakeEpisodes) -> None:
    path, sha256 = write_gguf(tmp_path)
    job = make_job(sample_episodes(2), base_sha256=sha256, ppo=dataclasses.replace(PPO, epochs=1))
    lanes = PretendLanes()
    with pretended():
        base = load_base(str(path), sha256, str(tmp_path / "cache"), "float32", "cuda:0", "quantised")
        run_job(write_job(tmp_path / "job", job), Scorer(base, LORA.layers, lanes), sha256, silent)
        assert base.blocks[0].linears["mlp.up_proj"].weight.device == CARD
    lanes.close()
