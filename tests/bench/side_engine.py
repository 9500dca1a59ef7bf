"""This engine's side of a comparison, one run: `python side_engine.py train|gradients SPEC.json`.

`train` runs three jobs on the same episodes in this process, as the train worker would: one that warms the kernels up,
one of which nothing was known before, and one whose episodes were scored ahead. `gradients` writes the gradient of the
last of `epochs` optimizer steps over the whole batch, read from the first moments that the checkpoints of two jobs
keep, one of which ends a step earlier: m = beta1 * m_before + (1 - beta1) * gradient. Everything goes through
`run_job`, the train worker's own entry.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack
import torch
from contest import finish, measured, peak_rss_bytes
from episodes import BASE, load_episodes, preferred_pairs, rated_episodes
from safetensors.torch import load_file, save_file

from adapters.folder import write_adapter_folder
from engine.lora import new_lora, weights_of_lora
from engine.models import load_base
from engine.protocol import (
    JOB_FILE,
    OUT_FOLDER,
    AdapterRef,
    LoraSettings,
    PpoSettings,
    RatedEpisode,
    TrainJob,
    to_map,
)
from engine.train.adamw import BETA1
from engine.train.checkpoint import TENSORS_FILE
from engine.train.job import run_job
from engine.train.lanes import Lanes
from engine.train.scorer import Scorer

RANK, ALPHA = 8, 16.0
NO_CLIP = 1e9  # of the gradient's norm
PARENT_SEED = 5
PARENT_B_STD = 0.02


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a run does. objective: a name of `engine.protocol.OBJECTIVES`. layers: topmost blocks adapted, 0 for all.
    parent: folder of the adapter that is trained on, "" for a fresh one on the base. kl_coef: 0 leaves the reference
    out of the loss. learning_rate: small unless the clip is to be at work. gradients: where `gradients` writes."""

    model: str
    cache: str
    episodes: str
    objective: str
    layers: int
    dtype: str
    epochs: int
    minibatches: int
    threads: int
    kl_coef: float = 0.0
    learning_rate: float = 1e-4
    parent: str = ""
    gradients: str = ""


def load_spec(path: str) -> Spec:
    """The spec in a JSON file."""
    return Spec(**json.loads(Path(path).read_text()))


def train(spec: Spec) -> dict[str, float]:
    """Seconds of an update's parts (gather, critic, optimise, measure), with nothing known and scored ahead."""
    scorer, sha256 = _scorer(spec)
    sampled = load_episodes(Path(spec.episodes))
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        for number, kind in enumerate(("warm_up", "cold", "ahead")):
            job = make_job(spec, sha256, rated_episodes(sampled, 1000 * (number + 1)), job_id=kind)
            if kind == "ahead":
                scorer.score([rated.episode for rated in job.episodes], BASE, lambda: None)
            with measured(figures, f"{kind}_job"):
                result = run_job(write_job(Path(name) / kind, job), scorer, sha256, lambda *_: None)
            stages = {stage: seconds for stage, seconds in result.seconds.items() if stage != "canary"}
            figures[f"{kind}_train_s"] = sum(stages.values())
            figures |= {f"{kind}_{stage}_s": seconds for stage, seconds in stages.items()}
        out = Path(name) / "cold" / OUT_FOLDER / "adapter"
        figures["adapter_gguf_bytes"] = (out / "adapter.gguf").stat().st_size
    figures["steps"] = _steps(result.metrics)
    figures["tokens"] = float(sum(len(one.prompt_ids) + len(one.completion_ids) for one in sampled))
    scorer.lanes.close()
    return {name: value for name, value in figures.items() if not name.startswith("warm_up")} | {
        "peak_rss_mb": peak_rss_bytes() / 1e6
    }


def gradients(spec: Spec) -> dict[str, float]:
    """Write the gradient of the last step as safetensors, named `MODULE.lora_A` and `MODULE.lora_B`."""
    scorer, sha256 = _scorer(spec)
    sampled = load_episodes(Path(spec.episodes))
    parent = AdapterRef(version=1, folder=spec.parent)
    changes: dict[str, Any] = {"parent": parent}
    rated: tuple[RatedEpisode, ...] = ()
    if spec.objective == "dpo":
        changes["pairs"] = preferred_pairs(sampled, 1)
    else:
        rated = rated_episodes(sampled, 1, parent)
        # The importance weight of the sampler is ours alone: with the parent's own log-probabilities it is 1.
        measures = scorer.measure([one.episode for one in rated], [parent] * len(rated), lambda: None)
        rated = tuple(
            dataclasses.replace(one, episode=dataclasses.replace(one.episode, logprobs=tuple(measure.scaled.tolist())))
            for one, measure in zip(rated, measures, strict=True)
        )
    moments: list[dict[str, torch.Tensor]] = []
    with tempfile.TemporaryDirectory() as name:
        for epochs in range(max(1, spec.epochs - 1), spec.epochs + 1):
            job = make_job(dataclasses.replace(spec, epochs=epochs), sha256, rated, job_id=str(epochs), **changes)
            folder = write_job(Path(name) / job.job_id, job)
            result = run_job(folder, scorer, sha256, lambda *_: None)
            moments.append(_first_moments(folder / OUT_FOLDER / "checkpoint"))
    last = moments[-1]
    before = moments[0] if len(moments) > 1 else {name: torch.zeros_like(mean) for name, mean in last.items()}
    save_file({name: (last[name] - BETA1 * before[name]) / (1 - BETA1) for name in last}, spec.gradients)
    scorer.lanes.close()
    clipped = result.metrics.get(f"{spec.objective}/clip_frac", 0.0)  # a mean over the steps
    return {"steps": _steps(result.metrics), "clip_frac": clipped}


def make_job(spec: Spec, sha256: str, episodes: tuple[RatedEpisode, ...], **changes: Any) -> TrainJob:
    """An update with the spec's objective alone; no early end, no clipping of the gradient's norm."""
    settings = PpoSettings(
        learning_rate=spec.learning_rate,
        critic_learning_rate=1e-3,
        epochs=spec.epochs,
        minibatches=spec.minibatches,
        clip_low=0.2,
        clip_high=0.2,
        value_clip=0.2,
        value_coef=0.5,
        gamma=1.0,
        gae_lambda=1.0,
        kl_coef=spec.kl_coef,
        live_kl_max=10.0,
        importance_cap=2.0,
        max_grad_norm=NO_CLIP,
        dual_clip=NO_CLIP,  # TRL has no such bound by default
        critic_warmup_steps=0 if spec.objective != "ppo" else 30,
    )
    job: dict[str, Any] = {
        "job_id": "job",
        "version": 2,
        "parent": BASE,
        "reference": BASE,
        "checkpoint": None,
        "episodes": episodes,
        "probes": (),
        "ppo": settings,
        "lora": LoraSettings(rank=RANK, alpha=ALPHA, layers=spec.layers),
        "seed": 1,
        "threads": spec.threads,
        "base_sha256": sha256,
        "objectives": {spec.objective: 1.0},
        **changes,
    }
    return TrainJob(**job)


def write_job(folder: Path, job: TrainJob) -> Path:
    """The job as a folder."""
    folder.mkdir(parents=True)
    (folder / JOB_FILE).write_bytes(msgpack.packb(to_map(job)))
    return folder


def write_parent(spec: Spec, folder: Path) -> None:
    """An adapter with an effect (B not zero), as a PEFT folder that both sides start from."""
    scorer, sha256 = _scorer(spec)
    shape = scorer.base.config.shape
    lora = new_lora(shape, LoraSettings(rank=RANK, alpha=ALPHA, layers=spec.layers), PARENT_SEED, scorer.base.device)
    generator = torch.Generator().manual_seed(PARENT_SEED)
    for _, b in lora.matrices.values():
        b.normal_(0.0, PARENT_B_STD, generator=generator)
    write_adapter_folder(
        folder,
        weights_of_lora(lora),
        version=1,
        parent=0,
        base_sha256=sha256,
        base_model_name="bench",
        origin="trained",
        created_at=0.0,
    )
    scorer.lanes.close()


def _scorer(spec: Spec) -> tuple[Scorer, str]:
    """As the train worker holds it, and the hash of the base."""
    torch.use_deterministic_algorithms(True)
    with open(spec.model, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    base = load_base(spec.model, sha256, spec.cache, spec.dtype, "cpu")
    return Scorer(base, spec.layers, Lanes(spec.threads, torch.device("cpu"))), sha256


def _first_moments(checkpoint: Path) -> dict[str, torch.Tensor]:
    """`MODULE.lora_A` and `MODULE.lora_B` -> the optimizer's running mean of the gradient."""
    tensors = load_file(checkpoint / TENSORS_FILE)
    prefix = "actor.mean."
    return {
        f"{name.removeprefix(prefix)[:-2]}.lora_{name[-1]}": tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _steps(metrics: Mapping[str, float]) -> float:
    """Optimizer steps that the update took."""
    return sum(value for name, value in metrics.items() if name.endswith("/steps"))


ACTIONS = {"train": train, "gradients": gradients}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("spec")
    arguments = parser.parse_args()
    finish(ACTIONS[arguments.action](load_spec(arguments.spec)))
