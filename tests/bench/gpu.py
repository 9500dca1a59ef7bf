"""Updates of large models on a GPU: `python tests/bench/gpu.py [--shape 1b --shape 8b] [--runs 3] [--no-trl]`.

Models of the shapes of Llama 3.2 1B and Llama 3.1 8B with random weights, written here; 32 answers of 128 + 256 tokens;
LoRA of rank 8 on all linear maps of all blocks; bfloat16; two epochs of one minibatch. Sides run in turns, each run a
process that warms up before it is timed:

    PPO            critic with a value head and reference, gather to written files
    PPO, lora      the critic is a second adapter, as GPUs have it by default in most recipes
    PPO, fused     small operations compiled (learn.fuse)
    PPO, quantised the base in its file's blocks (learn.base_weights)
    GRPO           what TRL does too: no critic, no reference
    TRL            its GRPO on the same weights (unpacked), answers and LoRA, from its own virtual environment

and of each: seconds and joules of an update, tokens (of prompts and answers, times epochs) a second, peak memory of the
card, and the longest time between two moments at which the update could give way. Joules are the card's counter, so
nothing else may use it. Without a GPU it says so and ends with 0; `--shape tiny
--device cpu` runs all of it but TRL anywhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from contest import Ratio, Side, alternate, describe_machine, process_side, table
from gpu_side import GpuSpec
from places import BENCH, ROOT, cache_folder, ensure_peer_model, ensure_trl
from random_model import SHAPES, ensure_model, write_episodes
from side_engine import Spec

from adapters.base_file import base_sha256
from engine.models import base_name, load_base

EPOCHS = 2
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One of our sides."""

    name: str
    objective: str = "ppo"
    critic: str = "head"
    fuse: bool = False
    held: str = "dequantised"


VARIANTS = (
    Variant(name="PPO"),
    Variant(name="PPO, lora", critic="lora"),
    Variant(name="PPO, fused", fuse=True),
    Variant(name="PPO, quantised", held="quantised"),
    Variant(name="GRPO", objective="grpo"),
)
RATIOS = (
    Ratio(name="time, GRPO", ours="GRPO.update_s", theirs="TRL.train_s", at_most=1.0),
    Ratio(name="peak memory, GRPO", ours="GRPO.peak_mb", theirs="TRL.peak_mb", at_most=1.0),
    Ratio(name="joules, GRPO", ours="GRPO.update_j", theirs="TRL.train_j"),
    Ratio(name="time, fused", ours="PPO, fused.update_s", theirs="PPO.update_s"),
    Ratio(name="time, quantised", ours="PPO, quantised.update_s", theirs="PPO.update_s"),
    Ratio(name="peak memory, quantised", ours="PPO, quantised.peak_mb", theirs="PPO.peak_mb"),
)


def our_side(variant: Variant, model: Path, cache: Path, episodes: Path, work: Path, device: str) -> Side:
    """One update by this engine."""
    engine = Spec(
        model=str(model),
        cache=str(cache),
        episodes=str(episodes),
        objective=variant.objective,
        layers=0,
        dtype="float32" if device == "cpu" else "bfloat16",
        epochs=EPOCHS,
        minibatches=1,
        threads=len(os.sched_getaffinity(0)),
        kl_coef=0.05 if variant.objective == "ppo" else 0.0,
    )
    spec = GpuSpec(
        engine=dataclasses.asdict(engine),
        device=device,
        held=variant.held,
        fuse=variant.fuse,
        critic=variant.critic,
    )
    path = work / f"{variant.name.replace(', ', '-')}.json"
    path.write_text(json.dumps(dataclasses.asdict(spec)))
    command = [sys.executable, str(BENCH / "gpu_side.py"), str(path)]
    return process_side(variant.name, command, {"PYTHONPATH": str(ROOT)})


def trl_side(name: str, model: Path, cache: Path, episodes: Path, work: Path, device: str) -> Side:
    """TRL's GRPO on the unpacked weights. Raises CalledProcessError: TRL cannot be installed."""
    sha256 = base_sha256(model, cache / "base-hashes.json")
    load_base(str(model), sha256, str(cache), "bfloat16", "cpu")  # writes the folder
    folder = cache / base_name(sha256, "bfloat16")
    tokenizer = ensure_peer_model(cache_folder())  # any that is there: ids come from the episodes
    for file in TOKENIZER_FILES:
        if (tokenizer / file).exists():
            (folder / file).write_bytes((tokenizer / file).read_bytes())
    shape = SHAPES[name]
    spec: dict[str, Any] = {
        "model_folder": str(folder),
        "episodes": str(episodes),
        "questions": [],
        "objective": "grpo",
        "layers": 0,
        "n_layers": shape.base.n_layers,
        "dtype": "bfloat16",
        "iterations": EPOCHS,
        "learning_rate": 1e-4,
        "max_tokens": shape.completion_tokens,
        "temperature": 0.7,
        "threads": len(os.sched_getaffinity(0)),
        "device": device,
    }
    path = work / "trl.json"
    path.write_text(json.dumps(spec))
    command = [str(ensure_trl(cache_folder())), str(BENCH / "peer_trl.py"), "train", str(path)]
    return process_side("TRL", command, {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"})


def compare(name: str, variants: Sequence[Variant], device: str, runs: int, *, with_trl: bool) -> None:
    """Print the table of one shape."""
    cache = cache_folder() / "gpu"
    cache.mkdir(exist_ok=True)
    model = ensure_model(cache, name)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        work = Path(folder)
        episodes = work / "episodes.json"
        write_episodes(episodes, SHAPES[name])
        sides = [our_side(variant, model, cache, episodes, work, device) for variant in variants]
        if with_trl:
            try:
                sides.append(trl_side(name, model, cache, episodes, work, device))
            except subprocess.CalledProcessError as error:
                print(f"TRL is not measured: it could not be installed ({error})")
        found = alternate(sides, runs)
    print(f"\n{name}: {SHAPES[name].base}, {device}")
    print(table(found, RATIOS))


def why_not(device: str) -> str:
    """Why nothing can be measured on `device`; "" if it can."""
    if not device.startswith("cuda") or torch.cuda.is_available():
        return ""
    return "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no GPU here"


def main(arguments: Sequence[str]) -> None:
    """Measure, or say why not."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", action="append", choices=SHAPES, help="default: 1b and 8b")
    parser.add_argument("--only", action="append", choices=[one.name for one in VARIANTS], help="default: all")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--no-trl", action="store_true")
    given = parser.parse_args(arguments)
    if reason := why_not(given.device):
        print(f"nothing measured: {reason}")
        return
    card = f"; {torch.cuda.get_device_name(given.device)}" if given.device.startswith("cuda") else ""
    print(describe_machine() + card)
    variants = [one for one in VARIANTS if given.only is None or one.name in given.only]
    for name in given.shape or ("1b", "8b"):
        compare(name, variants, given.device, given.runs, with_trl=not given.no_trl)


if __name__ == "__main__":
    main(sys.argv[1:])
