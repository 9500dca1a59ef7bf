"""The packed forward pass against transformers' own, one sequence at a time, and its gradients against autograd's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers

from adapters.peft import save_peft
from engine.lora import Lora, weights_of_lora
from engine.models import Base
from engine.train import attention, decoder
from tests.engine.train.tiny import random_lora

SEQUENCES = ([5, 9, 2, 44, 61, 7], [12, 3], [80] * 30, [1, 2, 3, 4, 5, 6, 7, 8, 9])


def packed_logits(base: Base, lora: Lora | None, sequences: tuple[list[int], ...]) -> list[torch.Tensor]:
    """float32[t, V] of every sequence, all of them in one pass."""
    packing = decoder.pack(base, [len(ids) for ids in sequences])
    stream = decoder.embed(base, [token for ids in sequences for token in ids])
    stream = decoder.run_blocks(base, stream, packing, lora, 0, base.config.shape.n_layers)
    logits = F.linear(decoder.final_norm(base, stream), base.head)
    return list(logits.split([len(ids) for ids in sequences]))


def alone_logits(model: Any, sequences: tuple[list[int], ...]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[0] for ids in sequences]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_t_mask_5_packed_sequences_give_the_logits_of_transformers_one_by_one(tiny_base: Base, tiny_peer: Any) -> None:
    assert_same(packed_logits(tiny_base, None, SEQUENCES), alone_logits(tiny_peer, SEQUENCES))


@pytest.mark.parametrize("short", [attention.SHORT_TOKENS, 0])
def test_what_all_sequences_begin_with_is_computed_once_and_changes_nothing(
    short: int, tiny_base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SHORT_TOKENS", short)
    lora, opening = random_lora(tiny_base), [3, 1, 4, 1, 5]
    for parameter in lora.parameters():
        parameter.requires_grad_()
    alone = [one[len(opening) :] for one in packed_logits(tiny_base, lora, tuple(opening + ids for ids in SEQUENCES))]
    packing = decoder.pack(tiny_base, [len(ids) for ids in SEQUENCES], shared=len(opening))
    stream = decoder.embed(tiny_base, opening + [token for ids in SEQUENCES for token in ids])
    stream = decoder.run_blocks(tiny_base, stream, packing, lora, 0, tiny_base.config.shape.n_layers)
    logits = F.linear(decoder.final_norm(tiny_base, stream), tiny_base.head)
    together = list(logits[len(opening) :].split(packing.lengths))
    assert_same(together, alone)
    weights = [torch.randn(one.shape, generator=torch.Generator().manual_seed(i)) for i, one in enumerate(alone)]
    totals = [sum((one * w).sum() for one, w in zip(kind, weights, strict=True)) for kind in (together, alone)]
    for one, other in zip(*(torch.autograd.grad(total, lora.parameters()) for total in totals), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_t_lora_7_an_adapter_has_the_effect_that_peft_gives_it(
    tiny_base: Base, tiny_folder: Path, tmp_path: Path
) -> None:
    lora = random_lora(tiny_base)
    save_peft(tmp_path, weights_of_lora(lora), "tiny")
    plain = transformers.LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(plain, str(tmp_path)).eval()
    found, bare = packed_logits(tiny_base, lora, SEQUENCES), packed_logits(tiny_base, None, SEQUENCES)
    assert_same(found, alone_logits(adapted, SEQUENCES))
    assert max(float((a - b).abs().max()) for a, b in zip(found, bare, strict=True)) > 0.01


def test_gradients_reach_the_adapter_only_and_equal_those_of_autograd(tiny_base: Base) -> None:
    lora = random_lora(tiny_base)
    for parameter in lora.parameters():
        parameter.requires_grad_()
    packed = packed_logits(tiny_base, lora, SEQUENCES)
    weights = [torch.randn(one.shape, generator=torch.Generator().manual_seed(i)) for i, one in enumerate(packed)]
    found = torch.autograd.grad(sum((one * w).sum() for one, w in zip(packed, weights, strict=True)), lora.parameters())
    expected = torch.autograd.grad(
        sum((textbook_logits(tiny_base, lora, ids) * w).sum() for ids, w in zip(SEQUENCES, weights, strict=True)),
        lora.parameters(),
    )
    for module, (one, other) in zip(
        [m for m in lora.matrices for _ in "AB"], zip(found, expected, strict=True), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-4, msg=lambda text, m=module: f"{m}: {text}")
    tensors = [tiny_base.embedding, *(linear.weight for b in tiny_base.blocks for linear in b.linears.values())]
    assert not any(tensor.requires_grad or tensor.grad is not None for tensor in tensors)


def textbook_logits(base: Base, lora: Lora, ids: list[int]) -> torch.Tensor:
    """The whole network in plain operations, merged weights and all, for autograd to differentiate."""
    shape, eps = base.config.shape, base.config.norm_eps

    def weight(layer: int, kind: str) -> torch.Tensor:
        merged = base.blocks[layer].linears[kind].weight
        pair = lora.matrices.get(f"model.layers.{layer}.{kind}")
        return merged if pair is None else merged + lora.scale * pair[1] @ pair[0]

    def norm(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return by * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

    angles = torch.outer(torch.arange(len(ids)).float(), base.inverse_frequencies[0])
    cos, sin = (torch.cat((f(angles), f(angles)), -1)[None] for f in (torch.cos, torch.sin))

    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    x = base.embedding[torch.tensor(ids)]
    for layer, block in enumerate(base.blocks):
        h = norm(x, block.attention_norm)
        q, k, v = (
            (h @ weight(layer, f"self_attn.{name}_proj").T).view(len(ids), -1, shape.head_dim).transpose(0, 1)
            for name in "qkv"
        )
        group = shape.n_heads // shape.n_kv_heads
        q, k, v = rotate(q), rotate(k).repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = q @ k.transpose(1, 2) / shape.head_dim**0.5
        scores = scores.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), float("-inf"))
        attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(ids), -1)
        x = x + attended @ weight(layer, "self_attn.o_proj").T
        h = norm(x, block.mlp_norm)
        mixed = F.silu(h @ weight(layer, "mlp.gate_proj").T) * (h @ weight(layer, "mlp.up_proj").T)
        x = x + mixed @ weight(layer, "mlp.down_proj").T
    return norm(x, base.final_norm) @ base.head.T


def test_t_lora_2_computing_blocks_again_in_backward_gives_the_same_gradients(
    tiny_base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = random_lora(tiny_base)
    for parameter in lora.parameters():
        parameter.requires_grad_()

    def gradients() -> tuple[torch.Tensor, ...]:
        total = torch.stack([one.square().sum() for one in packed_logits(tiny_base, lora, SEQUENCES)]).sum()
        return torch.autograd.grad(total, lora.parameters())

    kept = gradients()
    monkeypatch.setattr(decoder, "RECOMPUTE_ABOVE_TOKENS", 4)
    for one, other in zip(kept, gradients(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shared", [0, 7])
@pytest.mark.parametrize("window", [None, 40, 6, 1])
def test_both_ways_of_attention_give_the_same_values_and_gradients(
    window: int | None, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(4)
    shapes = ((40, 6, 8), (40, 2, 8), (40, 2, 8))
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    slope = torch.randn(40, 6, 8, generator=generator)
    results = []
    for short in (attention.SHORT_TOKENS, 0):
        monkeypatch.setattr(attention, "SHORT_TOKENS", short)
        out = attention.attend(*inputs, (25 - shared, 15), scale=0.3, window=window, shared=shared)
        results.append((out, *torch.autograd.grad((out * slope).sum(), inputs)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
