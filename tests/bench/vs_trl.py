"""This engine against TRL: `python tests/bench/vs_trl.py [train|cycle|gradients ...] [--runs 3]`.

    gradients  speed without equality does not count: the gradients of GRPO (first step, and second with the clip at
               work) and of DPO, in float32, from the same adapter on the same tokens; cosine, and ratio of the norms
    train      16 given episodes to a trained adapter: bfloat16, GRPO, no critic, no reference, two optimizer steps over
               the whole batch on both sides, LoRA of rank 8 on the top third of the blocks and on all of them
    cycle      sampling included. TRL: 16 answers by transformers' generate and two steps of GRPO. Here: a real daemon,
               16 answers over its socket, 16 ratings, PPO with critic and reference, gate and swap, up to the first
               answer of the new adapter (two epochs of one minibatch, no replay: as many tokens trained on)

TRL comes from its own virtual environment, which the first run makes. Sides run in turns and warm up before they are
timed; the daemon stays up between its turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
from contest import Ratio, Side, alternate, describe_machine, process_side, table
from daemon_cycle import running_cycles
from episodes import MAX_TOKENS, QUESTIONS, TEMPERATURE
from places import BENCH, ROOT, cache_folder, ensure_bench_episodes, ensure_peer_model, ensure_trl, model_file
from safetensors.numpy import load_file
from side_engine import Spec, write_parent

from adapters.llamacpp_format import read_base_shape

ITERATIONS = 2
TOP_THIRD = 10
COSINE_AT_LEAST = 0.999
LAYERS = {"top third": TOP_THIRD, "all blocks": 0}
TRAIN_AT_MOST = {"top third": 0.6, "all blocks": 0.8}
CYCLE_AT_MOST = 0.5
# Objective, steps, learning rate: at the second the first step moves the policy beyond the clip.
GRADIENTS = (("grpo", 1, 1e-4), ("grpo", 2, 1e-3), ("dpo", 1, 1e-4))
RSS_AT_MOST_MB = 1600.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What every part needs. work: a folder of this run."""

    work: Path
    cache: Path
    episodes: Path
    peer_model: Path
    trl: Path
    threads: int

    def engine(self, action: str, name: str, **changes: object) -> Side:
        """This engine's side."""
        path = self.work / f"engine-{name.replace(' ', '-')}.json"
        path.write_text(json.dumps(dataclasses.asdict(self.spec(**changes))))
        command = [sys.executable, str(BENCH / "side_engine.py"), action, str(path)]
        return process_side(name, command, {"PYTHONPATH": str(ROOT)})

    def spec(self, **changes: object) -> Spec:
        """The engine's settings of a run."""
        return dataclasses.replace(
            Spec(
                model=str(model_file()),
                cache=str(self.cache),
                episodes=str(self.episodes),
                objective="grpo",
                layers=TOP_THIRD,
                dtype="bfloat16",
                epochs=ITERATIONS,
                minibatches=1,
                threads=self.threads,
            ),
            **changes,  # type: ignore[arg-type]
        )

    def peer(self, action: str, name: str, **changes: object) -> Side:
        """TRL's side."""
        spec = {
            "model_folder": str(self.peer_model),
            "episodes": str(self.episodes),
            "questions": QUESTIONS,
            "objective": "grpo",
            "layers": TOP_THIRD,
            "n_layers": read_base_shape(model_file()).n_layers,
            "dtype": "bfloat16",
            "iterations": ITERATIONS,
            "learning_rate": 1e-4,
            "max_tokens": MAX_TOKENS,
            "temperature": TEMPERATURE,
            "threads": self.threads,
            **changes,
        }
        path = self.work / f"trl-{name.replace(' ', '-')}.json"
        path.write_text(json.dumps(spec))
        command = [str(self.trl), str(BENCH / "peer_trl.py"), action, str(path)]
        return process_side(name, command, {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"})


def compare_gradients(bench: Bench) -> bool:
    """Print cosine and norm ratio of the objectives; whether they agree."""
    parent = bench.work / "parent"
    write_parent(bench.spec(dtype="float32"), parent)
    agree = True
    for objective, steps, learning_rate in GRADIENTS:
        name = f"{objective}, step {steps}"
        files = [bench.work / f"{objective}-{steps}-{side}.safetensors" for side in ("ours", "trl")]
        common = {"objective": objective, "dtype": "float32", "parent": str(parent), "learning_rate": learning_rate}
        mine = bench.engine("gradients", f"engine {name}", **common, epochs=steps, gradients=str(files[0])).run()
        bench.peer("gradients", f"trl {name}", **common, iterations=steps, gradients=str(files[1])).run()
        ours, theirs = (load_file(file) for file in files)
        if set(ours) != set(theirs):
            raise SystemExit(f"{name}: the sides adapt different modules: {sorted(set(ours) ^ set(theirs))[:4]}")
        a, b = (
            np.concatenate([one[module].ravel().astype(np.float64) for module in sorted(ours)])
            for one in (ours, theirs)
        )
        cosine, ratio = a @ b / np.linalg.norm(a) / np.linalg.norm(b), np.linalg.norm(a) / np.linalg.norm(b)
        agree &= bool(cosine > COSINE_AT_LEAST)
        verdict = "met" if cosine > COSINE_AT_LEAST else "MISSED"
        print(
            f"gradient of {name}: cosine {cosine:.6f} (> {COSINE_AT_LEAST}: {verdict}), norms ours / TRL {ratio:.4f}, "
            f"clipped tokens {mine.get('clip_frac', 0.0):.1%}"
        )
    return agree


def compare_training(bench: Bench, runs: int) -> None:
    """Print both sides' seconds and memory of the training part."""
    sides, ratios = [], []
    for name, layers in LAYERS.items():
        ours, theirs = f"engine, {name}", f"TRL, {name}"
        sides += [bench.engine("train", ours, layers=layers), bench.peer("train", theirs, layers=layers)]
        at_most = TRAIN_AT_MOST[name]
        ratios += [
            Ratio(name=f"time, {name}", ours=f"{ours}.cold_train_s", theirs=f"{theirs}.train_s", at_most=at_most),
            Ratio(name=f"CPU time, {name}", ours=f"{ours}.cold_job_cpu_s", theirs=f"{theirs}.train_cpu_s"),
            Ratio(name=f"time, {name}, scored ahead", ours=f"{ours}.ahead_train_s", theirs=f"{theirs}.train_s"),
            Ratio(name=f"peak memory, {name}", ours=f"{ours}.peak_rss_mb", theirs=f"{theirs}.peak_rss_mb"),
        ]
    print(table(alternate(sides, runs), ratios))


def compare_cycles(bench: Bench, runs: int) -> None:
    """Print both sides' seconds from the first sampled token to a trained (here: a served) adapter."""
    theirs = bench.peer("cycle", "TRL", layers=0)
    with running_cycles(bench.work, layers=TOP_THIRD, epochs=ITERATIONS, minibatches=1) as ours:
        found = alternate([ours, theirs], runs)
    print(
        table(
            found,
            [
                Ratio(name="whole cycle", ours=f"{ours.name}.cycle_s", theirs="TRL.train_s", at_most=CYCLE_AT_MOST),
                Ratio(name="peak memory", ours=f"{ours.name}.peak_rss_mb", theirs="TRL.peak_rss_mb"),
            ],
        )
    )


PARTS = ("gradients", "train", "cycle")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="|".join(PARTS), help="default: all")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    wanted = arguments.parts or PARTS
    with tempfile.TemporaryDirectory(prefix="vs-trl-") as name:
        cache = cache_folder()
        bench = Bench(
            work=Path(name),
            cache=cache,
            episodes=ensure_bench_episodes(cache),
            peer_model=ensure_peer_model(cache),
            trl=ensure_trl(cache),
            threads=len(os.sched_getaffinity(0)),
        )
        print(describe_machine())
        if "train" in wanted:
            compare_training(bench, arguments.runs)
        if "cycle" in wanted:
            compare_cycles(bench, arguments.runs)
        if "gradients" in wanted and not compare_gradients(bench):
            sys.exit(1)
