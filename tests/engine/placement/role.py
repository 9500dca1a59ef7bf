"""Plays one role in a process of its own and prints the most memory that it was resident in, in bytes.

python role.py ROLE MODEL CACHE_FOLDER WORK_FOLDER SETTINGS_AS_JSON
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Work:
    """What the role is given to do."""

    dtype: str
    layers: int
    rank: int
    lanes: int
    episodes: int
    prompt_tokens: int
    completion_tokens: int
    minibatches: int = 1
    slots: int = 4
    context_tokens: int = 2048


def peak_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def silent(*_: Any) -> None:
    """A tick that does nothing."""


def serve(model_path: str, _cache: str, _folder: str, work: Work) -> None:
    from engine.generate.llamacpp import UBATCH_TOKENS, Context, Model
    from engine.generate.scheduler import Entry
    from engine.generate.worker import FINISHED_SEQUENCES

    model = Model(model_path, gpu_layers=0)
    rows = work.slots + FINISHED_SEQUENCES
    for _ in range(2):
        context = Context(
            model, context_tokens=work.context_tokens, n_sequences=rows, max_rows=rows, threads=work.lanes
        )
        _kept.append(context)
        prompt = [Entry(0, position, 100 + position, False) for position in range(UBATCH_TOKENS)]
        context.decode(prompt)
        context.decode([Entry(number, UBATCH_TOKENS, 100, True) for number in range(1)])


def reference(model_path: str, cache: str, _folder: str, work: Work) -> None:
    scorer, episodes = _scorer(model_path, cache, work), _episodes(work)
    scorer.score(episodes, episodes[0].adapter, silent)


def critic(model_path: str, cache: str, _folder: str, work: Work) -> None:
    import torch

    scorer, episodes = _scorer(model_path, cache, work), _episodes(work)
    scorer.remember(episodes, [scorer.first_layer(None)] * len(episodes), silent)
    _kept.append(torch.cat([scorer.features(episode) for episode in episodes]))


def actor(model_path: str, cache: str, folder: str, work: Work) -> None:
    import msgpack

    from engine.protocol import JOB_FILE, LoraSettings, PpoSettings, RatedEpisode, TrainJob, to_map
    from engine.train.job import run_job

    scorer, episodes = _scorer(model_path, cache, work), _episodes(work)
    base = episodes[0].adapter
    job = TrainJob(
        job_id="job",
        version=1,
        parent=base,
        reference=base,
        checkpoint=None,
        episodes=tuple(
            RatedEpisode(episode=one, reward=(-1.0) ** number, replay=False) for number, one in enumerate(episodes)
        ),
        probes=(),
        ppo=PpoSettings(epochs=2, minibatches=work.minibatches, live_kl_max=100.0, critic_warmup_steps=2),
        lora=LoraSettings(rank=work.rank, alpha=16.0, layers=work.layers),
        seed=0,
        threads=work.lanes,
        base_sha256="a" * 64,
    )
    Path(folder, JOB_FILE).write_bytes(msgpack.packb(to_map(job)))
    run_job(Path(folder), scorer, "a" * 64, silent)


def reward(_model_path: str, _cache: str, folder: str, _work: Work) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

    if not Path(folder, "config.json").exists():
        config = LlamaConfig(
            vocab_size=32_000,
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_labels=1,
        )
        LlamaForSequenceClassification(config).save_pretrained(folder)
    else:
        model = AutoModelForSequenceClassification.from_pretrained(folder)
        with torch.no_grad():
            _kept.append(model(torch.zeros((1, 64), dtype=torch.int64)).logits)


def _scorer(model_path: str, cache: str, work: Work) -> Any:
    import torch

    from engine.models import load_base
    from engine.train.lanes import Lanes
    from engine.train.scorer import Scorer

    torch.use_deterministic_algorithms(True)
    with open(model_path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    base = load_base(model_path, sha256, cache, work.dtype, "cpu")
    scorer = Scorer(base, work.layers, Lanes(work.lanes, torch.device("cpu")))
    scorer.lanes.match_thread()
    return scorer


def _episodes(work: Work) -> list[Any]:
    from engine.protocol import AdapterRef, EpisodeTokens

    chance = random.Random(0)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(chance.randrange(5, 49_000) for _ in range(n))

    return [
        EpisodeTokens(
            episode_id=number,
            prompt_ids=tokens(work.prompt_tokens),
            completion_ids=tokens(work.completion_tokens),
            logprobs=(-5.0,) * work.completion_tokens,
            temperature=1.0,
            adapter=AdapterRef(version=0, folder=None),
        )
        for number in range(work.episodes)
    ]


_kept: list[Any] = []  # to the end, as a worker would

if __name__ == "__main__":
    role, *paths, settings = sys.argv[1:]
    {"serve": serve, "reference": reference, "critic": critic, "actor": actor, "reward": reward}[role](
        *paths, Work(**json.loads(settings))
    )
    print(peak_bytes())
