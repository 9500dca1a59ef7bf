"""This engine's side of `gpu.py`, one run: `python gpu_side.py SPEC.json`.

The train worker's own path on one device: the file loaded as the worker loads it, a job that warms the kernels up, then
the job that is timed, of whose answers nothing was known before.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from contest import finish, peak_rss_bytes, read_joules
from episodes import load_episodes, rated_episodes
from nvml import pci_bus_id_of
from nvml import read_joules as read_card_joules
from side_engine import Spec, make_job, write_job

from adapters.base_file import base_sha256
from engine.fusion import compile_fusibles
from engine.models import load_base
from engine.train.device import open_device
from engine.train.job import run_job
from engine.train.lanes import Lanes
from engine.train.scorer import Scorer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """engine: as `side_engine` takes it. device, held, fuse: as the train worker is started with. critic: of PPO."""

    engine: dict[str, Any]
    device: str
    held: str
    fuse: bool
    critic: str


def run(spec: GpuSpec) -> dict[str, float]:
    """Seconds, tokens a second, joules and peak memory of one update."""
    device = open_device(spec.device)
    if spec.fuse:
        compile_fusibles()
    engine = Spec(**spec.engine)
    sha256 = base_sha256(Path(engine.model), Path(engine.cache) / "base-hashes.json")
    began = time.perf_counter()
    base = load_base(engine.model, sha256, engine.cache, engine.dtype, str(device), spec.held)  # type: ignore[arg-type]
    figures = {"load_s": time.perf_counter() - began}
    scorer = Scorer(base, engine.layers, Lanes(engine.threads, device))
    sampled = load_episodes(Path(engine.episodes))
    with tempfile.TemporaryDirectory() as name:
        for number, kind in enumerate(("warm_up", "timed")):
            job = make_job(engine, sha256, rated_episodes(sampled, 1000 * (number + 1)), job_id=kind)
            job = dataclasses.replace(job, ppo=dataclasses.replace(job.ppo, critic=spec.critic))  # type: ignore[arg-type]
            reset_peak(device)
            chances = Chances()
            joules, began = joules_of(device), time.perf_counter()
            result = run_job(write_job(Path(name) / kind, job), scorer, sha256, chances.tick)
            seconds, after = time.perf_counter() - began, joules_of(device)
    scorer.lanes.close()
    n_tokens = sum(len(one.prompt_ids) + len(one.completion_ids) for one in sampled)
    figures |= {f"{stage}_s": taken for stage, taken in result.seconds.items()}
    figures |= {
        "update_s": seconds,
        "tokens_per_s": n_tokens * engine.epochs / seconds,
        "yield_gap_ms": chances.longest_s * 1000,
        "steps": result.metrics["policy/steps"],
    }
    if joules is not None and after is not None:
        figures["update_j"] = after - joules
    return figures | {"peak_mb": peak_bytes(device) / 1e6}


class Chances:
    """The longest time between two moments at which the update could have given way to something else."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._last = time.perf_counter()

    def tick(self, *_: object) -> None:
        """One of these moments."""
        now = time.perf_counter()
        self.longest_s, self._last = max(self.longest_s, now - self._last), now


def joules_of(device: torch.device) -> float | None:
    """Of the card, or of the processor's packages."""
    if device.type == "cpu":
        return read_joules()
    return read_card_joules(pci_bus_id_of(device))


def reset_peak(device: torch.device) -> None:
    """Begin to look for the peak of a card's memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """What torch has taken of the card at most, or this process of the machine's memory."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_rss_bytes()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("spec")
    finish(run(GpuSpec(**json.loads(Path(parser.parse_args().spec).read_text()))))
