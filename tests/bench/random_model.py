"""Models of given shapes with random weights, as GGUF files of Q4_0 blocks, and random answers to train on.

Speed, memory and energy do not depend on what the weights are; a random model needs no download. Its blocks are random
bytes under one scale, so that a file of thousands of millions of weights is written as fast as the disk takes it. Every
matrix is Q4_0, embedding and head too.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import gguf
import numpy as np
from episodes import Sampled
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from adapters.shape import BaseShape

KIND = GGMLQuantizationType.Q4_0
WEIGHT_STD = 0.02  # as most models are initialised
LEVEL_STD = 4.61  # of a number that is one of sixteen
VERSION = 1  # of what is written, for the names of kept files


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """base: as adapters know it. tied: the output head is the embedding. prompt_tokens, completion_tokens: of each of
    `answers` answers to each of `prompts` prompts that it is trained on."""

    base: BaseShape
    tied: bool
    prompts: int = 8
    answers: int = 4
    prompt_tokens: int = 128
    completion_tokens: int = 256


def _llama(**sizes: int) -> BaseShape:
    return BaseShape(arch="llama", **sizes)


SHAPES = {
    "tiny": ModelShape(
        base=_llama(n_layers=4, n_embd=64, n_heads=4, n_kv_heads=2, head_dim=16, n_ff=128, n_vocab=512),
        tied=True,
        prompts=2,
        prompt_tokens=8,
        completion_tokens=12,
    ),
    # Llama 3.2 1B and Llama 3.1 8B.
    "1b": ModelShape(
        base=_llama(n_layers=16, n_embd=2048, n_heads=32, n_kv_heads=8, head_dim=64, n_ff=8192, n_vocab=128256),
        tied=True,
    ),
    "8b": ModelShape(
        base=_llama(n_layers=32, n_embd=4096, n_heads=32, n_kv_heads=8, head_dim=128, n_ff=14336, n_vocab=128256),
        tied=False,
    ),
}


def ensure_model(folder: Path, name: str) -> Path:
    """The GGUF file of a shape in `folder`, written first if it is missing."""
    path = folder / f"random-{name}-v{VERSION}.gguf"
    if not path.exists():
        temporary = path.with_suffix(".tmp")
        write_model(temporary, SHAPES[name])
        temporary.rename(path)
    return path


def write_model(path: Path, shape: ModelShape) -> None:
    """A llama of the shape, without a tokenizer: nothing is served from it."""
    base, chance = shape.base, np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, base.arch)
    writer.add_block_count(base.n_layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(base.n_embd)
    writer.add_feed_forward_length(base.n_ff)
    writer.add_head_count(base.n_heads)
    writer.add_head_count_kv(base.n_kv_heads)
    writer.add_key_length(base.head_dim)
    writer.add_value_length(base.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(base.head_dim)
    writer.add_rope_freq_base(500_000.0)
    writer.add_vocab_size(base.n_vocab)
    writer.add_eos_token_id(2)
    q, kv = base.n_heads * base.head_dim, base.n_kv_heads * base.head_dim
    maps = {
        "attn_q": (q, base.n_embd),
        "attn_k": (kv, base.n_embd),
        "attn_v": (kv, base.n_embd),
        "attn_output": (base.n_embd, q),
        "ffn_gate": (base.n_ff, base.n_embd),
        "ffn_up": (base.n_ff, base.n_embd),
        "ffn_down": (base.n_embd, base.n_ff),
    }
    outer = ("token_embd",) if shape.tied else ("token_embd", "output")
    named = {f"{name}.weight": (base.n_vocab, base.n_embd) for name in outer}
    named |= {f"blk.{layer}.{name}.weight": size for layer in range(base.n_layers) for name, size in maps.items()}
    for name, (n_rows, n_columns) in named.items():
        writer.add_tensor(name, random_blocks(n_rows, n_columns, chance), raw_dtype=KIND)
    ones = np.ones(base.n_embd, dtype=np.float32)
    for layer in range(base.n_layers):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", ones)
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", ones)
    writer.add_tensor("output_norm.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(n_rows: int, n_columns: int, chance: np.random.Generator) -> np.ndarray:
    """uint8[n_rows, bytes of a row] of Q4_0: normal enough, with WEIGHT_STD."""
    n_numbers, n_bytes = GGML_QUANT_SIZES[KIND]
    blocks = chance.integers(0, 256, (n_rows * n_columns // n_numbers, n_bytes), dtype=np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(WEIGHT_STD / LEVEL_STD).tobytes(), dtype=np.uint8)
    return blocks.reshape(n_rows, -1)


def write_episodes(path: Path, shape: ModelShape) -> None:
    """Random answers, groups of `answers`, with the log-probabilities of a uniform policy, which such a model nearly
    is; rewards fall evenly from 1 to -1 within a group."""
    chance = np.random.default_rng(11)
    behaviour = -math.log(shape.base.n_vocab)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(int(token) for token in chance.integers(3, shape.base.n_vocab, n))

    prompts = [ids(shape.prompt_tokens) for _ in range(shape.prompts)]
    sampled = [
        Sampled(
            group=group,
            prompt_ids=prompt,
            completion_ids=ids(shape.completion_tokens),
            logprobs=(behaviour,) * shape.completion_tokens,
            reward=1.0 - 2.0 * rank / (shape.answers - 1),
        )
        for group, prompt in enumerate(prompts)
        for rank in range(shape.answers)
    ]
    path.write_text(json.dumps([dataclasses.asdict(one) for one in sampled]))
