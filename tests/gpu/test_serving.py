"""transformers on a card as an engine: what it gives on the CPU, with an adapter and without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adapters.peft import save_peft
from engine.generate.hf_model import Model
from engine.generate.scheduler import Entry
from engine.lora import new_lora, weights_of_lora
from engine.protocol import LoraSettings
from tests.engine.families import SERVED, write_family
from tests.engine.generate.chatter import vocabulary, write_tokenizer

TOKENS = tuple(range(4, 44))
BOUNDS = {"float32": 2e-2, "bfloat16": 0.6}  # of logits that differ by 10 and more


def served(folder: Path, device: str, dtype: str, *, adapted: bool) -> torch.Tensor:
    """float32[T, V]: a prompt beside another one, and then token by token."""
    model = Model(str(folder), dtype=dtype, device=device)
    context = model.open_context(context_tokens=128, n_sequences=2, max_rows=64, threads=1)
    context.set_adapter(model.open_adapter(str(folder / "adapter")) if adapted else None)
    rows = list(context.decode([Entry(0, place, token, True) for place, token in enumerate(TOKENS[:30])]))
    context.decode([Entry(1, place, token, False) for place, token in enumerate(TOKENS[5:12])])
    for place in range(30, len(TOKENS)):
        rows += context.decode([Entry(0, place, TOKENS[place], True), Entry(1, place - 23, 5, False)])
    return torch.stack([torch.from_numpy(row) for row in rows])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", list(SERVED))
def test_a_card_computes_what_the_cpu_does(card: torch.device, family: str, dtype: str, tmp_path: Path) -> None:
    write_family(tmp_path, family)
    write_tokenizer(tmp_path, vocabulary())
    shape = Model(str(tmp_path), dtype="float32", device="cpu").shape
    lora = new_lora(shape, LoraSettings(rank=3, alpha=6.0, layers=2), 5, torch.device("cpu"))
    for _, b in lora.matrices.values():
        b.normal_(0.0, 0.3)
    (tmp_path / "adapter").mkdir()
    save_peft(tmp_path / "adapter", weights_of_lora(lora), "test")
    for adapted in (False, True):
        on_cpu = served(tmp_path, "cpu", "float32", adapted=adapted)
        on_card = served(tmp_path, str(card), dtype, adapted=adapted)
        assert (on_card - on_cpu).abs().mean() < BOUNDS[dtype]
