"""This engine against the textbook PPO pipeline: `python tests/bench/vs_plain_ppo.py [--peer-layers 0] [--runs 3]`.

Both sides: PPO with critic and reference on SmolLM2-135M, 16 episodes of about 37 + 48 tokens, two epochs of two
minibatches, LoRA of rank 8 on all linear layers, bfloat16. Here the LoRA sits on the top third of the blocks, as edged
has it by default; in the textbook on all of them, as most people have it, or with --peer-layers 10 where edged has it.

    train    the same given episodes to a trained adapter, nothing scored ahead
    cycle    16 answers sampled, trained on, and served: by the textbook in one process (`peer_textbook`), here by a
             real daemon over its socket, gate included
    switch   bytes that the server has to load to serve what was trained
    memory   peak resident: of the one process there; here of the trainer alone, and of the daemon with all its workers

Sides run in turns, in fresh processes but for the daemon, and warm up before they are timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path

from contest import Ratio, Side, alternate, describe_machine, process_side, table
from daemon_cycle import NAME as DAEMON
from daemon_cycle import running_cycles
from episodes import ANSWERS, MAX_TOKENS, QUESTIONS, TEMPERATURE
from places import BENCH, ROOT, cache_folder, ensure_bench_episodes, ensure_peer_model, model_file
from side_engine import Spec

from adapters.llamacpp_format import read_base_shape

EPOCHS, MINIBATCHES = 2, 2
LAYERS = 10
TRAINER, TEXTBOOK = "engine", "textbook"

RATIOS = (
    Ratio(name="time, training part", ours=f"{TRAINER}.cold_train_s", theirs=f"{TEXTBOOK}.train_s", at_most=1 / 4),
    Ratio(name="CPU time, training part", ours=f"{TRAINER}.cold_job_cpu_s", theirs=f"{TEXTBOOK}.train_cpu_s"),
    Ratio(name="time, whole cycle", ours=f"{DAEMON}.cycle_s", theirs=f"{TEXTBOOK}.cycle_s", at_most=1 / 4),
    Ratio(name="peak memory, trainer", ours=f"{TRAINER}.peak_rss_mb", theirs=f"{TEXTBOOK}.peak_rss_mb", at_most=1 / 3),
    Ratio(name="peak memory, everything", ours=f"{DAEMON}.peak_rss_mb", theirs=f"{TEXTBOOK}.peak_rss_mb"),
    Ratio(
        name="bytes a switch",
        ours=f"{TRAINER}.adapter_gguf_bytes",
        theirs=f"{TEXTBOOK}.switch_bytes",
        at_most=1 / 100,
    ),
    Ratio(name="joules a cycle", ours=f"{DAEMON}.cycle_j", theirs=f"{TEXTBOOK}.cycle_j"),
)


def trainer_side(work: Path, cache: Path, episodes: Path, layers: int, threads: int) -> Side:
    """One update by this engine."""
    spec = Spec(
        model=str(model_file()),
        cache=str(cache),
        episodes=str(episodes),
        objective="ppo",
        layers=layers,
        dtype="bfloat16",
        epochs=EPOCHS,
        minibatches=MINIBATCHES,
        threads=threads,
        kl_coef=0.03,
    )
    path = work / "engine.json"
    path.write_text(json.dumps(dataclasses.asdict(spec)))
    command = [sys.executable, str(BENCH / "side_engine.py"), "train", str(path)]
    return process_side(TRAINER, command, {"PYTHONPATH": str(ROOT)})


def textbook_side(work: Path, peer_model: Path, episodes: Path, layers: int, threads: int) -> Side:
    """One cycle of the textbook."""
    spec = {
        "model_folder": str(peer_model),
        "episodes": str(episodes),
        "questions": QUESTIONS,
        "answers": ANSWERS,
        "layers": layers,
        "n_layers": read_base_shape(model_file()).n_layers,
        "epochs": EPOCHS,
        "minibatches": MINIBATCHES,
        "max_tokens": MAX_TOKENS,
        "temperature": TEMPERATURE,
        "threads": threads,
    }
    path = work / "textbook.json"
    path.write_text(json.dumps(spec))
    command = [sys.executable, str(BENCH / "peer_textbook.py"), str(path)]
    return process_side(TEXTBOOK, command, {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer-layers", type=int, default=0, help="topmost blocks with LoRA in the textbook; 0: all")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vs-plain-ppo-") as name:
        work, cache, threads = Path(name), cache_folder(), len(os.sched_getaffinity(0))
        episodes = ensure_bench_episodes(cache)
        textbook = textbook_side(work, ensure_peer_model(cache), episodes, arguments.peer_layers, threads)
        trainer = trainer_side(work, cache, episodes, LAYERS, threads)
        print(describe_machine())
        with running_cycles(work, epochs=EPOCHS, minibatches=MINIBATCHES, layers=LAYERS) as daemon:
            print(table(alternate([trainer, textbook, daemon], arguments.runs), RATIOS))
