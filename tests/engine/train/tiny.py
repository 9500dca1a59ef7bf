"""A tiny random llama for tests: its folder, its episodes' jobs, and what transformers says of its tokens."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgpack
import torch
import transformers

from adapters.folder import write_adapter_folder
from engine.lora import Lora, new_lora, weights_of_lora
from engine.models import Base
from engine.protocol import (
    JOB_FILE,
    AdapterRef,
    LoraSettings,
    PpoSettings,
    ProbeTokens,
    RatedEpisode,
    TrainJob,
    to_map,
)

BASE = AdapterRef(version=0, folder=None)
LORA = LoraSettings(rank=4, alpha=8.0, layers=2)
BASE_SHA256 = "5" * 64
PPO = PpoSettings(learning_rate=1e-3, critic_learning_rate=1e-2, epochs=2, live_kl_max=10.0, critic_warmup_steps=5)


def silent(*_: Any) -> None:
    """A tick that does nothing."""


def write_tiny_model(folder: Path, family: str = "Llama", **changes: Any) -> Any:
    """A random model of 4 small blocks as a folder; the transformers model that wrote it."""
    torch.manual_seed(11)
    settings = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        # Large enough that the distribution is far from uniform, as a trained model's is.
        "initializer_range": 0.2,
        **changes,
    }
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.save_pretrained(folder)
    return model


def peer_logprobs(model: Any, ids: tuple[int, ...], n_completion: int, temperature: float) -> torch.Tensor:
    """float32[n_completion]: log-probabilities of the last tokens by transformers, alone in the batch."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -n_completion - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[-n_completion:])[:, None])[:, 0]


def make_job(episodes: list[RatedEpisode], **changes: Any) -> TrainJob:
    """A job on the tiny base."""
    settings: dict[str, Any] = {
        "job_id": "job-1",
        "version": 1,
        "parent": BASE,
        "reference": BASE,
        "checkpoint": None,
        "episodes": tuple(episodes),
        "probes": (ProbeTokens(prompt_ids=(5, 6, 7), completion_ids=(8, 9)),),
        "ppo": PPO,
        "lora": LORA,
        "seed": 3,
        "threads": 2,
        "base_sha256": BASE_SHA256,
        **changes,
    }
    return TrainJob(**settings)


def write_job(folder: Path, job: TrainJob) -> Path:
    """The job as a folder."""
    folder.mkdir(parents=True)
    (folder / JOB_FILE).write_bytes(msgpack.packb(to_map(job)))
    return folder


def random_lora(base: Base, *, seed: int = 1, layers: int = LORA.layers, size: float = 0.05) -> Lora:
    """An adapter with an effect: B is not zero."""
    lora = new_lora(base.config.shape, LoraSettings(rank=4, alpha=8.0, layers=layers), seed, base.device)
    generator = torch.Generator().manual_seed(seed)
    for _, b in lora.matrices.values():
        b.normal_(0.0, size, generator=generator)
    return lora


def publish_lora(folder: Path, lora: Lora, version: int) -> AdapterRef:
    """The adapter as a folder on disk."""
    write_adapter_folder(
        folder,
        weights_of_lora(lora),
        version=version,
        parent=0,
        base_sha256=BASE_SHA256,
        base_model_name="tiny",
        origin="trained",
        created_at=0.0,
    )
    return AdapterRef(version=version, folder=str(folder))


def hash_tree(folder: Path) -> dict[str, str]:
    """Relative path -> hash of every file below `folder`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
