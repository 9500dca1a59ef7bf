"""Bases of given shapes with random weights, made on the card, and answers for them."""

from __future__ import annotations

import dataclasses
import math

import torch

from adapters.shape import BaseShape
from engine.families import parse_config
from engine.models import Base, assemble
from engine.protocol import EpisodeTokens, RatedEpisode
from engine.train.scorer import Scorer
from tests.engine.train.tiny import BASE, silent

# Llama 3.2 1B.
ONE_BILLION = BaseShape(
    arch="llama", n_layers=16, n_embd=2048, n_heads=32, n_kv_heads=8, head_dim=64, n_ff=8192, n_vocab=128256
)
WEIGHT_STD = 0.02


def random_base(shape: BaseShape, device: torch.device, dtype: torch.dtype) -> Base:
    """A llama of the shape, tied."""
    config = parse_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": shape.n_layers,
            "hidden_size": shape.n_embd,
            "num_attention_heads": shape.n_heads,
            "num_key_value_heads": shape.n_kv_heads,
            "head_dim": shape.head_dim,
            "intermediate_size": shape.n_ff,
            "vocab_size": shape.n_vocab,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "eos_token_id": [2],
        }
    )
    generator = torch.Generator(device).manual_seed(7)

    def matrix(n_out: int, n_in: int) -> torch.Tensor:
        made = torch.empty(n_out, n_in, device=device, dtype=dtype)
        return made.normal_(0.0, WEIGHT_STD, generator=generator)

    ones = torch.ones(shape.n_embd, device=device, dtype=dtype)
    tensors = {"model.embed_tokens.weight": matrix(shape.n_vocab, shape.n_embd), "model.norm.weight": ones}
    for module in shape.top_modules(0):
        tensors[f"{module}.weight"] = matrix(*shape.module_shape(module))
    for layer in range(shape.n_layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = ones
    return assemble("random", config, tensors)


def random_answers(n_vocab: int, n: int, prompt_tokens: int, completion_tokens: int) -> list[RatedEpisode]:
    """Liked and disliked in turns, with the log-probabilities of a uniform sampler."""
    generator = torch.Generator().manual_seed(3)

    def ids(k: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, n_vocab, (k,), generator=generator).tolist())

    return [
        RatedEpisode(
            episode=EpisodeTokens(
                episode_id=number + 1,
                prompt_ids=ids(prompt_tokens),
                completion_ids=ids(completion_tokens),
                logprobs=(-math.log(n_vocab),) * completion_tokens,
                temperature=1.0,
                adapter=BASE,
            ),
            reward=1.0 if number % 2 else -1.0,
            replay=False,
        )
        for number in range(n)
    ]


def sampled_by(scorer: Scorer, rated: list[RatedEpisode]) -> list[RatedEpisode]:
    """The answers with the log-probabilities that the base of `scorer` gives them."""
    episodes = [one.episode for one in rated]
    measured = scorer.measure(episodes, [BASE] * len(episodes), silent)
    return [
        dataclasses.replace(one, episode=dataclasses.replace(one.episode, logprobs=tuple(measure.scaled.tolist())))
        for one, measure in zip(rated, measured, strict=True)
    ]
