"""The real engine in this process: adapters, contexts, prefix reuse and proofs on the packaged model.

Parity with the trainer is tested elsewhere; here llama.cpp is compared with itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from adapters.llamacpp_format import read_base_shape, save_gguf_adapter
from adapters.shape import BaseShape
from adapters.weights import AdapterWeights
from engine.fault import EngineFault
from engine.generate import prove
from engine.generate.backend import AdapterRefused
from engine.generate.decoder import Decoder
from engine.generate.llamacpp import Context, Model
from engine.generate.prompt import Prompts
from engine.generate.sampling import NotFinite, raw_logprob
from engine.generate.scheduler import Entry, Piece, Scheduler
from engine.protocol import ChatMessage, ProbeText

pytestmark = pytest.mark.real_model

# Kernels differ by batch width: the same tokens in other batches move a log-probability by this much (nats).
KERNEL_NOISE_NATS = 0.5
T = TypeVar("T")


@pytest.fixture(scope="module")
def model(packaged_model: Path) -> Model:
    return Model(str(packaged_model), gpu_layers=0)


@pytest.fixture(scope="module")
def contexts(model: Model) -> tuple[Context, Context]:
    first, second = (Context(model, context_tokens=512, n_sequences=6, max_rows=16, threads=2) for _ in range(2))
    return first, second


@pytest.fixture
def context(contexts: tuple[Context, Context]) -> Context:
    contexts[0].set_adapter(None)
    return contexts[0]


@pytest.fixture
def decoder(context: Context) -> Decoder:
    return Decoder(context, Scheduler(slots=4, n_sequences=6, pool_tokens=512))


@pytest.fixture(scope="module")
def write_gguf(packaged_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Write an adapter of the top block: write_gguf(name, scale=, base=); its path."""
    folder = tmp_path_factory.mktemp("gguf")

    def write(name: str, *, scale: float = 0.05, base: BaseShape | None = None) -> str:
        base = base or read_base_shape(packaged_model)
        rng = np.random.default_rng(1)
        matrices = {}
        for module in base.top_modules(1):
            n_out, n_in = base.module_shape(module)
            a = rng.standard_normal((4, n_in), dtype=np.float32) * np.float32(0.05)
            b = rng.standard_normal((n_out, 4), dtype=np.float32) * np.float32(scale)
            matrices[module] = (a, b)
        weights = AdapterWeights(base=base, rank=4, alpha=8.0, matrices=matrices)
        path = folder / f"{name}.gguf"
        save_gguf_adapter(path, weights, version=1, parent=None, base_sha256="0" * 64)
        return str(path)

    return write


def logits_of(context: Context, tokens: tuple[int, ...], sequence: int = 0) -> np.ndarray:
    """The last row of `tokens`, evaluated by themselves."""
    context.clear()
    last = len(tokens) - 1
    (row,) = context.decode([Entry(sequence, i, token, i == last) for i, token in enumerate(tokens)])
    return row.copy()


def finish(work: Generator[None, None, T]) -> T:
    """Run a proof to its end."""
    while True:
        try:
            next(work)
        except StopIteration as stop:
            value: T = stop.value
            return value


def test_an_adapter_changes_its_own_context_and_not_a_bit_of_the_other(
    model: Model, contexts: tuple[Context, Context], write_gguf: Callable[..., str]
) -> None:
    tokens = model.tokenise("The capital of France is", add_special=True, parse_special=False)
    live, spare = contexts
    live.set_adapter(None)
    spare.set_adapter(None)
    base = logits_of(live, tokens)
    adapter = model.load_adapter(write_gguf("plain"))
    spare.set_adapter(adapter)
    assert np.abs(logits_of(spare, tokens) - base).max() > 1.0
    assert np.array_equal(logits_of(live, tokens), base)
    spare.set_adapter(None)
    adapter.free()
    assert np.array_equal(logits_of(spare, tokens), base)


def test_changing_the_adapter_forgets_what_was_computed_under_the_old_one(
    model: Model, decoder: Decoder, write_gguf: Callable[..., str]
) -> None:
    tokens = model.tokenise("One two three four five six seven", add_special=True, parse_special=False)
    decoder.scheduler.submit(Piece("old", tokens, rows_from=len(tokens) - 1, room=0))
    decoder.step(64)
    decoder.scheduler.finish("old")
    adapter = model.load_adapter(write_gguf("plain"))
    decoder.set_adapter(adapter)
    decoder.scheduler.submit(Piece("new", tokens, rows_from=len(tokens) - 1, room=0))
    (admitted,), (evaluated,) = decoder.step(64)
    assert admitted.n_cached == 0
    warm = evaluated.row.copy()
    decoder.abandon()
    cold_context = Context(model, context_tokens=256, n_sequences=2, max_rows=8, threads=2)
    cold_context.set_adapter(adapter)
    assert np.array_equal(warm, logits_of(cold_context, tokens))
    decoder.set_adapter(None)


def test_a_reused_prefix_gives_what_a_cold_sequence_gives(model: Model, decoder: Decoder) -> None:
    text = model.tokenise("The quick brown fox jumps over the lazy dog and runs", add_special=True, parse_special=False)
    rows = []
    for number in range(2):
        decoder.scheduler.submit(Piece(number, text, rows_from=len(text) - 1, room=0))
        (admitted,), (evaluated,) = decoder.step(64)
        assert admitted.n_cached == number * (len(text) - 1)
        rows.append(evaluated.row.copy())
        decoder.scheduler.finish(number)
    best = int(rows[0].argmax())
    assert raw_logprob(rows[1], best) == pytest.approx(raw_logprob(rows[0], best), abs=KERNEL_NOISE_NATS)


def test_the_same_adapter_has_the_same_canary_bit_for_bit_and_another_has_not(
    model: Model, decoder: Decoder, write_gguf: Callable[..., str]
) -> None:
    prompts = Prompts(model)
    probes = [prompts.probe(ProbeText(user=u, assistant=a)) for u, a in (("Hi", "Hello, how are you?"), ("2+2?", "4"))]
    first = finish(prove.score(decoder, probes))
    decoder.set_adapter(None)
    assert finish(prove.score(decoder, probes)) == first
    assert [len(row) for row in first] == [len(probe.completion_ids) for probe in probes]
    adapter = model.load_adapter(write_gguf("plain"))
    decoder.set_adapter(adapter)
    changed = finish(prove.score(decoder, probes))
    gaps = [abs(a - b) for x, y in zip(first, changed, strict=True) for a, b in zip(x, y, strict=True)]
    assert max(gaps) > 0.1
    decoder.set_adapter(None)
    adapter.free()


def test_an_adapter_of_nan_is_found_by_its_canary(
    model: Model, decoder: Decoder, write_gguf: Callable[..., str]
) -> None:
    adapter = model.load_adapter(write_gguf("nan", scale=float("nan")))
    decoder.set_adapter(adapter)
    probe = Prompts(model).probe(ProbeText(user="Hi", assistant="Hello"))
    with pytest.raises(NotFinite):
        finish(prove.score(decoder, [probe]))
    decoder.abandon()
    decoder.set_adapter(None)
    adapter.free()


def test_answers_of_a_proof_stop_at_their_length_and_carry_their_text(model: Model, decoder: Decoder) -> None:
    prompts = Prompts(model)
    asked = [prompts.user(text) for text in ("Name a colour.", "Name a fruit.", "Say hi.")]
    answers, texts, logprobs = finish(
        prove.answer(decoder, asked, max_tokens=5, seed=3, eos_ids=model.eos_ids, piece_of=model.piece)
    )
    assert [answer.prompt_ids for answer in answers] == asked
    assert all(1 <= len(answer.completion_ids) <= 5 for answer in answers)
    assert all(texts)
    assert [len(one) for one in logprobs] == [len(answer.completion_ids) for answer in answers]
    assert all(-20.0 < value <= 0.0 for one in logprobs for value in one)
    assert not decoder.scheduler.has_work


def test_an_adapter_for_another_shape_or_architecture_is_a_mismatch(
    model: Model, packaged_model: Path, write_gguf: Callable[..., str]
) -> None:
    base = read_base_shape(packaged_model)
    wider = dataclasses.replace(base, n_ff=base.n_ff * 2)
    deeper = dataclasses.replace(base, n_layers=base.n_layers + 4)
    other = dataclasses.replace(base, arch="qwen2")
    for name, shape in (("wider", wider), ("deeper", deeper), ("other", other)):
        with pytest.raises(AdapterRefused) as refused:
            model.load_adapter(write_gguf(name, base=shape))
        assert refused.value.code == "adapter_mismatch", str(refused.value)


def test_a_truncated_adapter_is_unreadable(model: Model, write_gguf: Callable[..., str], tmp_path: Path) -> None:
    whole = Path(write_gguf("whole")).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in (3, 100, len(whole) // 2):
        cut.write_bytes(whole[:size])
        with pytest.raises(AdapterRefused) as refused:
            model.load_adapter(str(cut))
        assert refused.value.code == "adapter_unreadable", str(refused.value)


@pytest.mark.parametrize("share", [0.001, 0.5])
def test_a_truncated_model_is_unreadable_and_the_error_says_what_llama_cpp_found(
    packaged_model: Path, tmp_path: Path, share: float
) -> None:
    cut = tmp_path / "model.gguf"
    with packaged_model.open("rb") as whole:
        cut.write_bytes(whole.read(int(packaged_model.stat().st_size * share)))
    with pytest.raises(EngineFault, match="cannot load this model: .*(bounds|read|load)") as fault:
        Model(str(cut), gpu_layers=0)
    assert fault.value.code == "model_unreadable"


def test_pieces_of_tokens_join_to_the_text_and_control_tokens_are_silent(model: Model) -> None:
    text = "Grüße, 你好 🙂!\n"
    tokens = model.tokenise(text, add_special=False, parse_special=False)
    assert b"".join(model.piece(token) for token in tokens).decode() == text
    (end,) = model.tokenise("<|im_end|>", add_special=False, parse_special=True)
    assert model.piece(end) == b""
    assert end in model.eos_ids


def test_a_conversation_is_laid_out_by_the_models_own_template(model: Model) -> None:
    tokens = Prompts(model).chat([ChatMessage(role="user", content="Hi")])
    starts = model.tokenise("<|im_start|>", add_special=False, parse_special=True)[0]
    assert tokens.count(starts) >= 2
    assert b"".join(model.piece(token) for token in tokens).endswith(b"assistant\n")
