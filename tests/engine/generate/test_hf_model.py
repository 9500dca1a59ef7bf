"""A Hugging Face folder as an engine: transformers' own forward pass and PEFT are its referees, family by family."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from adapters.errors import BaseModelError
from adapters.hf_base import ARCHITECTURE_OF, folder_sha256, is_tied, read_folder_shape
from adapters.peft import save_peft
from engine.families import FAMILIES, read_config
from engine.fault import EngineFault
from engine.generate.backend import AdapterRefused, DecodeFailed
from engine.generate.hf_model import Context, Model
from engine.generate.scheduler import Entry
from engine.lora import new_lora, weights_of_lora
from engine.protocol import LoraSettings
from tests.engine.families import SERVED, VARIANTS, write_family
from tests.engine.generate.chatter import vocabulary, write_tokenizer

TOKENS = tuple(range(4, 40))
FAMILY_NAMES = [*SERVED, *VARIANTS]


def write_folder(folder: Path, family: str) -> None:
    write_family(folder, family)
    write_tokenizer(folder, vocabulary())


def open_context(model: Model) -> Context:
    return model.open_context(context_tokens=128, n_sequences=4, max_rows=64, threads=1)


def entries(sequence: int, start: int, tokens: Sequence[int]) -> list[Entry]:
    return [Entry(sequence, start + place, token, True) for place, token in enumerate(tokens)]


def served(context: Context) -> torch.Tensor:
    """float32[T, V] of TOKENS, evaluated in pieces of every kind: a prompt, beside another one, and token by token."""
    rows = list(context.decode(entries(0, 0, TOKENS[:20])))
    rows += context.decode([*entries(0, 20, TOKENS[20:24]), *entries(1, 0, (9, 8, 7))])[:4]
    for place in range(24, 30):
        rows += context.decode([*entries(0, place, TOKENS[place : place + 1]), *entries(1, place - 21, (5,))])[:1]
    context.copy(0, 2, 30)
    context.forget(0)
    rows += context.decode(entries(2, 30, TOKENS[30:]))
    context.clear()
    return torch.from_numpy(np.array(rows))


def refereed(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([TOKENS])).logits[0]
    return logits


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_is_computed_as_transformers_does_with_and_without_an_adapter(family: str, tmp_path: Path) -> None:
    write_folder(tmp_path, family)
    model = Model(str(tmp_path), dtype="float32", device="cpu")
    lora = new_lora(model.shape, LoraSettings(rank=3, alpha=6.0, layers=2), 5, torch.device("cpu"))
    for _, b in lora.matrices.values():
        b.normal_(0.0, 0.3)
    (tmp_path / "adapter").mkdir()
    save_peft(tmp_path / "adapter", weights_of_lora(lora), "test")
    context = open_context(model)
    referee = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    base = refereed(referee)
    torch.testing.assert_close(served(context), base, rtol=0, atol=2e-4)
    adapter = model.open_adapter(str(tmp_path / "adapter"))
    context.set_adapter(adapter)
    adapted = refereed(peft.PeftModel.from_pretrained(referee, tmp_path / "adapter").eval())
    assert (adapted - base).abs().mean() > 0.05
    torch.testing.assert_close(served(context), adapted, rtol=0, atol=2e-3)
    context.set_adapter(None)
    adapter.free()
    torch.testing.assert_close(served(context), base, rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_shape_of_a_folder_is_what_the_trainer_reads(family: str, tmp_path: Path) -> None:
    write_folder(tmp_path, family)
    config = read_config(tmp_path)
    assert read_folder_shape(tmp_path) == config.shape
    assert is_tied(tmp_path) == config.tied


def test_the_model_types_that_are_served_are_those_that_are_trained() -> None:
    assert {name: family.arch for name, family in FAMILIES.items()} == ARCHITECTURE_OF


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_folder(folder, "llama")
    return folder


def test_the_hash_of_a_folder_changes_with_its_weights_and_its_template_and_nothing_else(folder: Path) -> None:
    first = folder_sha256(folder, folder / "hashes")
    assert folder_sha256(folder, folder / "hashes") == folder_sha256(folder) == first
    (folder / "README.md").write_text("of no matter")
    assert folder_sha256(folder) == first
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert folder_sha256(folder, folder / "hashes") != first
    (folder / "chat_template.jinja").unlink()


def test_two_contexts_have_an_adapter_each(folder: Path, tmp_path: Path) -> None:
    model = Model(str(folder), dtype="float32", device="cpu")
    lora = new_lora(model.shape, LoraSettings(rank=2, alpha=4.0, layers=0), 1, torch.device("cpu"))
    for _, b in lora.matrices.values():
        b.normal_(0.0, 0.3)
    save_peft(tmp_path, weights_of_lora(lora), "test")
    plain, adapted = open_context(model), open_context(model)
    adapted.set_adapter(model.open_adapter(str(tmp_path)))
    first = plain.decode(entries(0, 0, TOKENS))
    other = adapted.decode(entries(0, 0, TOKENS))
    plain.clear()
    assert np.array_equal(plain.decode(entries(0, 0, TOKENS)), first)
    assert np.abs(np.array(other) - np.array(first)).mean() > 0.05


def test_a_step_that_the_pool_cannot_hold_fails_and_clearing_helps(folder: Path) -> None:
    model = Model(str(folder), dtype="float32", device="cpu")
    context = model.open_context(context_tokens=16, n_sequences=2, max_rows=16, threads=1)
    with pytest.raises(DecodeFailed):
        context.decode(entries(0, 0, TOKENS))
    context.clear()
    assert len(context.decode(entries(0, 0, TOKENS[:16]))) == 16


def test_an_adapter_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    model = Model(str(folder), dtype="float32", device="cpu")
    wider = dataclasses.replace(model.shape, n_embd=64)
    lora = new_lora(wider, LoraSettings(rank=2, alpha=4.0, layers=1), 1, torch.device("cpu"))
    save_peft(tmp_path, weights_of_lora(lora), "test")
    with pytest.raises(AdapterRefused) as refused:
        model.open_adapter(str(tmp_path))
    assert refused.value.code == "adapter_mismatch"


@pytest.mark.parametrize(
    ("missing", "told"),
    [("config.json", "config.json"), ("tokenizer.json", "tokenizer.json"), ("model.safetensors", "safetensors")],
)
def test_a_folder_that_lacks_a_file_is_named_with_it(missing: str, told: str, tmp_path: Path) -> None:
    write_folder(tmp_path, "llama")
    (tmp_path / missing).unlink()
    with pytest.raises(BaseModelError, match=told):
        read_folder_shape(tmp_path)
    with pytest.raises(EngineFault) as fault:
        Model(str(tmp_path), dtype="float32", device="cpu")
    assert fault.value.code == "model_unreadable"


def test_a_model_type_that_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "mamba"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BaseModelError, match="mamba"):
        read_folder_shape(tmp_path)


def test_a_card_that_is_not_there_is_a_fault(folder: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(EngineFault) as fault:
        Model(str(folder), dtype="bfloat16", device="cuda:0")
    assert fault.value.code == "device_missing"
