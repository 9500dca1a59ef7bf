"""One contract for every backend of the serve worker: the same requests, the same tests.

All of them have the same tiny model, so that not only the form of what they say is the same but the tokens and the
numbers are, up to the rounding of their kernels.
"""

from __future__ import annotations

import codecs
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from engine import protocol
from engine.generate import worker
from engine.protocol import AdapterRef, Message
from tests.engine.generate.chatter import Chatter, write_chatter
from tests.engine.generate.desk import PROBES, Desk, chat, of, start_serve, written
from tests.engine.generate.stand_in import Options, StandIn

CLOSE = 0.02  # nats, between float32 and llama.cpp's float16 of keys and values
FAR = 0.2  # what an adapter of these tests moves the canary by at the least


@dataclasses.dataclass(frozen=True)
class Kind:
    """A backend under test.

    knows: the log-probabilities that it tells at any temperature. server: what stands in for the one that it speaks to.
    is_variant: of the one before; it differs in what its log-probabilities are of, and how streams are cut.
    """

    name: str
    knows: frozenset[str] = frozenset({"behaviour", "raw"})
    server: Options | None = None
    is_variant: bool = False


KINDS = (
    Kind("llamacpp"),
    Kind("transformers"),
    Kind("vllm", knows=frozenset({"raw"}), server=Options("vllm", "raw", api_key="secret")),
    Kind("vllm processed", knows=frozenset({"behaviour"}), server=Options("vllm", "processed"), is_variant=True),
    Kind("sglang", knows=frozenset({"behaviour"}), server=Options("sglang", "tempered")),
    Kind(
        "sglang incremental",
        knows=frozenset({"raw"}),
        server=Options("sglang", "raw", incremental=True),
        is_variant=True,
    ),
)


@pytest.fixture(scope="module")
def chatter(tmp_path_factory: pytest.TempPathFactory) -> Chatter:
    return write_chatter(tmp_path_factory.mktemp("chatter"))


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, id=kind.name, marks=[pytest.mark.full] if kind.is_variant else []) for kind in KINDS],
)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture(scope="module")
def start(kind: Kind, chatter: Chatter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[protocol.StartServe]:
    """How a worker of this kind is started."""
    if kind.server is None:
        path, backend = (chatter.file, "llamacpp") if kind.name == "llamacpp" else (chatter.folder, "transformers")
        yield start_serve(str(path), backend=backend)
        return
    folder, server = tmp_path_factory.mktemp("remote"), StandIn(chatter.folder, kind.server)
    (folder / "key").write_text("secret\n")
    yield start_serve(
        str(chatter.folder),
        backend="remote",
        url=server.url,
        api_key_file=str(folder / "key") if kind.server.api_key else "",
        shelf=str(folder / "shelf"),
    )
    server.down()


@pytest.fixture(scope="module")
def desk(start: protocol.StartServe) -> Iterator[Desk]:
    """A serve worker of this kind that the tests share; version 0 is live between them."""
    opened = Desk(worker.run, start)
    yield opened
    opened.stop()


@pytest.fixture(scope="module")
def adapters(chatter: Chatter, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], AdapterRef]:
    """A new adapter at each call: versions only rise."""
    root, versions = tmp_path_factory.mktemp("adapters"), itertools.count(1)

    def adapter() -> AdapterRef:
        version = next(versions)
        return chatter.adapter(root / f"v{version}", version)

    return adapter


def check_request(said: list[Message], n: int) -> None:
    """The order of messages, and that the records agree with what was streamed."""
    assert isinstance(said[0], protocol.Begun)
    assert isinstance(said[-1], protocol.RequestDone), said[-1]
    done = of(said, protocol.ChoiceDone)
    assert sorted(choice.choice for choice in done) == list(range(n))
    for choice in done:
        texts = [chunk.text for chunk in of(said, protocol.Chunk) if chunk.choice == choice.choice]
        assert "".join(texts) == choice.text
        assert len(choice.completion_ids) == len(choice.logprobs) == len(choice.raw_logprobs)
        assert all(logprob is None or logprob <= 0 for logprob in choice.logprobs + choice.raw_logprobs)
    assert said[-1].completion_tokens == sum(len(choice.completion_ids) for choice in done)
    assert said[-1].prompt_tokens == len(said[0].prompt_ids)
    assert min(said[-1].queue_s, said[-1].prefill_s, said[-1].decode_s) >= 0


# -------------------------------------------------------------------------------------------------------- answers


def test_what_it_says_of_its_model_is_in_the_files(desk: Desk, chatter: Chatter) -> None:
    model = desk.ready.model
    assert model is not None
    assert (model.architecture, model.n_layers, model.n_embd, model.n_vocab) == ("llama", 3, 32, chatter.shape.n_vocab)
    assert (model.n_ctx_train_tokens, model.chat_template, model.keeps_turns) == (512, True, True)
    assert set(model.eos_ids) == {chatter.end, chatter.end - 2}
    assert [bytes(probe.completion_ids[:2]) for probe in desk.ready.probes[1:]] == ["é".encode()]


def test_a_request_is_begun_streamed_recorded_and_done(desk: Desk) -> None:
    said = desk.ask(chat())
    check_request(said, 1)
    (done,) = of(said, protocol.ChoiceDone)
    assert done.seed == 5
    assert 1 <= len(done.completion_ids) <= 12


def test_a_prompt_has_the_same_tokens_everywhere(desk: Desk) -> None:
    begun = desk.ask(chat("at", max_tokens=1))[0]
    assert isinstance(begun, protocol.Begun)
    assert begun.prompt_ids == (263, *b"user\n", 260, 264, *b"\n", 263, *b"assist", *b"ant\n")  # "at" is one token


def test_choices_of_one_request_differ_and_the_same_seed_gives_the_same_text(desk: Desk) -> None:
    first, second = (desk.ask(chat(n=3)) for _ in range(2))
    check_request(first, 3)
    ids = [{c.choice: c.completion_ids for c in of(said, protocol.ChoiceDone)} for said in (first, second)]
    assert len(set(ids[0].values())) > 1
    # Later tokens may differ by the kernels' rounding.
    assert [ids[0][choice][0] for choice in range(3)] == [ids[1][choice][0] for choice in range(3)]


def test_more_choices_than_slots_are_all_answered(desk: Desk) -> None:
    check_request(desk.ask(chat(n=7, max_tokens=3)), 7)


def test_requests_that_come_together_are_all_answered(desk: Desk) -> None:
    messages = [chat(text, max_tokens=5) for text in ("the cat", "the hat", "a", "1 2 3", "the cat sat", "é")]
    for message in messages:
        desk.send(message)
    for said in desk.collect(*(message.request_id for message in messages)).values():
        check_request(said, 1)


def test_a_plain_prompt_is_continued(desk: Desk) -> None:
    said = desk.ask(chat(prompt="the cat"))
    check_request(said, 1)
    assert isinstance(said[0], protocol.Begun)
    assert said[0].prompt_ids == (257, 32, 261)


def test_a_length_limit_ends_the_answer(desk: Desk) -> None:
    done = desk.answer(chat(max_tokens=2, logit_bias=((264, -100.0), (262, -100.0))))
    assert (done.finish_reason, len(done.completion_ids)) == ("length", 2)


def test_the_token_that_ends_an_answer_is_recorded_and_not_shown(desk: Desk, chatter: Chatter) -> None:
    said = desk.ask(chat(logit_bias=((chatter.end, 100.0),)))
    check_request(said, 1)
    (done,) = of(said, protocol.ChoiceDone)
    assert (done.finish_reason, done.completion_ids, done.text) == ("stop", (chatter.end,), "")


def test_a_stop_string_over_token_borders_ends_the_answer_and_is_not_shown(desk: Desk) -> None:
    bias = tuple((token, 100.0) for token in b"ab")
    plain = desk.answer(chat(max_tokens=40, logit_bias=bias)).text
    assert set(plain) == {"a", "b"}
    stop = plain[6:9]
    said = desk.ask(chat(max_tokens=40, logit_bias=bias, stop=(stop,)))
    check_request(said, 1)
    (done,) = of(said, protocol.ChoiceDone)
    assert done.finish_reason == "stop"
    assert stop not in done.text
    drawn = bytes(done.completion_ids).decode()
    assert drawn.startswith(done.text + stop)


def test_no_chunk_cuts_a_character(desk: Desk) -> None:
    bias = tuple((token, 100.0) for token in "é".encode())
    said = desk.ask(chat(max_tokens=40, logit_bias=bias))
    check_request(said, 1)
    (done,) = of(said, protocol.ChoiceDone)
    assert "é" in done.text
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    assert done.text == decoder.decode(bytes(done.completion_ids))


def test_a_cancelled_request_ends_with_what_it_has(desk: Desk) -> None:
    running, waiting = chat(n=4, max_tokens=300), chat(n=1)
    desk.send(running)
    desk.send(waiting)
    desk.send(protocol.Cancel(request_id=waiting.request_id))
    desk.send(protocol.Cancel(request_id=running.request_id))
    said = desk.collect(running.request_id, waiting.request_id)
    check_request(said[running.request_id], 4)
    check_request(said[waiting.request_id], 1)
    check_request(desk.ask(chat()), 1)


def test_an_answer_is_cancelled_in_its_middle(desk: Desk) -> None:
    message = chat(max_tokens=400, logit_bias=((264, -100.0), (262, -100.0)))
    desk.send(message)
    desk.expect(protocol.Begun)
    desk.expect(protocol.Chunk)
    desk.send(protocol.Cancel(request_id=message.request_id))
    (done,) = of(desk.collect(message.request_id)[message.request_id], protocol.ChoiceDone)
    assert done.finish_reason == "cancelled"
    assert 1 <= len(done.completion_ids) < 400


def test_a_request_that_finds_no_slot_in_time_is_given_up(desk: Desk) -> None:
    running = chat(n=4, max_tokens=400, logit_bias=((264, -100.0), (262, -100.0)))
    desk.send(running)
    desk.expect(protocol.Begun)
    late = dataclasses.replace(chat(), queue_timeout_s=0.01)
    desk.send(late)
    while not isinstance(message := desk.receive(), protocol.RequestFailed):
        assert isinstance(message, protocol.Chunk), message
    assert (message.request_id, message.code) == (late.request_id, "queue_timeout")
    desk.send(protocol.Cancel(request_id=running.request_id))
    desk.collect(running.request_id)


def test_a_cancel_of_nothing_is_ignored(desk: Desk) -> None:
    desk.send(protocol.Cancel(request_id="nobody"))
    check_request(desk.ask(chat()), 1)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (chat("word " * 300), "context_length_exceeded"),
        (chat(prompt=""), "bad_prompt"),
        (chat(max_tokens=0), "bad_prompt"),
        (chat(logit_bias=((10**6, 1.0),)), "bad_logit_bias"),
        (
            protocol.Generate(request_id="e", messages=(), prompt=None, n=1, sampling=protocol.Sampling()),
            "bad_template",
        ),
    ],
    ids=["too long", "empty", "no tokens", "unknown token", "no messages"],
)
def test_a_request_that_cannot_be_done_is_refused_with_its_reason(
    desk: Desk, message: protocol.Generate, code: str
) -> None:
    (failed,) = desk.ask(message)
    assert isinstance(failed, protocol.RequestFailed)
    assert failed.code == code
    assert failed.message


def test_an_answer_is_held_to_a_schema_or_refused_with_the_code(desk: Desk, kind: Kind) -> None:
    asked = dataclasses.replace(chat(max_tokens=40), schema='{"enum":["yes","no"]}')
    last = desk.ask(asked)[-2:]
    if kind.name == "llamacpp":
        assert isinstance(last[0], protocol.ChoiceDone)
        assert last[0].text in ('"yes"', '"no"')
    else:
        assert isinstance(last[-1], protocol.RequestFailed)
        assert last[-1].code == "bad_response_format"


def test_a_written_answer_has_the_prompt_of_a_sampled_one_and_ends_as_one(desk: Desk, chatter: Chatter) -> None:
    begun = desk.ask(chat(max_tokens=1))[0]
    assert isinstance(begun, protocol.Begun)
    desk.send(written("a cat"))
    tokens = desk.expect(protocol.Tokenised)
    assert tokens.prompt_ids == begun.prompt_ids
    assert tokens.completion_ids == (97, 32, 261, chatter.end)
    desk.send(written("<|im_end|>", messages=None, prompt_tokens=7))
    tokens = desk.expect(protocol.Tokenised)
    assert tokens.prompt_ids == ()
    assert chatter.end not in tokens.completion_ids[:-1]  # what a person writes is text
    desk.send(written("word " * 300))
    assert desk.expect(protocol.RequestFailed).code == "context_length_exceeded"


# ----------------------------------------------------------------------------------------------- log-probabilities


def test_at_temperature_one_both_log_probabilities_are_the_same(desk: Desk) -> None:
    done = desk.answer(chat(max_tokens=8))
    assert None not in done.logprobs + done.raw_logprobs
    assert done.logprobs == done.raw_logprobs


def test_a_greedy_answer_has_probability_one_under_its_behaviour(desk: Desk, kind: Kind) -> None:
    done = desk.answer(chat(max_tokens=8, temperature=0.0))
    assert set(done.logprobs) == {0.0}
    if "raw" in kind.knows:
        assert all(logprob is not None and -6 < logprob < 0 for logprob in done.raw_logprobs)


def test_at_another_temperature_what_is_known_differs_and_what_is_not_is_none(desk: Desk, kind: Kind) -> None:
    done = desk.answer(chat(max_tokens=20, temperature=0.5, logit_bias=((264, -100.0), (262, -100.0))))
    told = {"behaviour": done.logprobs, "raw": done.raw_logprobs}
    for name, logprobs in told.items():
        assert all((logprob is not None) == (name in kind.knows) for logprob in logprobs)
    if len(kind.knows) == 2:
        assert np.mean(done.logprobs) > np.mean(done.raw_logprobs) + FAR


def test_the_likeliest_tokens_are_told_with_the_text(desk: Desk) -> None:
    said = desk.ask(chat(max_tokens=6, temperature=0.0, logprobs=True, top_logprobs=3))
    check_request(said, 1)
    (done,) = of(said, protocol.ChoiceDone)
    tokens = [token for chunk in of(said, protocol.Chunk) for token in chunk.tokens]
    assert [token.id for token in tokens] == [token for token in done.completion_ids if token not in (262, 264)]
    for token in tokens:
        assert token.top[0].id == token.id
        assert [top.logprob for top in token.top] == sorted((top.logprob for top in token.top), reverse=True)
        assert len(token.top) == 3


# ------------------------------------------------------------------------------------------------------- adapters


def test_a_staged_adapter_changes_nothing_until_it_is_routed_and_can_be_left_again(
    desk: Desk, adapters: Callable[[], AdapterRef]
) -> None:
    new = adapters()
    base = desk.answer(chat(temperature=0.0)).completion_ids
    staged = desk.stage(new)
    assert isinstance(staged, protocol.Staged), staged
    assert (staged.version, len(staged.canary)) == (new.version, len(PROBES))
    assert [len(row) for row in staged.canary] == [len(row) for row in staged.live_canary]
    assert mean_difference(staged.canary, staged.live_canary) > FAR
    assert len(staged.fluency) == len(staged.fluency_texts) == 2
    assert all(1 <= len(answer.completion_ids) <= 6 for answer in staged.fluency)
    assert desk.version() == 0
    assert isinstance(desk.route(new.version), protocol.Routed)
    assert desk.version() == new.version
    assert desk.answer(chat(temperature=0.0)).completion_ids != base
    assert isinstance(desk.route(0), protocol.Routed)
    assert desk.version() == 0
    assert desk.answer(chat(temperature=0.0)).completion_ids == base


def mean_difference(a: tuple[tuple[float, ...], ...], b: tuple[tuple[float, ...], ...]) -> float:
    return float(
        np.mean([abs(x - y) for row_a, row_b in zip(a, b, strict=True) for x, y in zip(row_a, row_b, strict=True)])
    )


def test_a_request_keeps_its_version_over_a_swap(desk: Desk, adapters: Callable[[], AdapterRef]) -> None:
    new = adapters()
    assert isinstance(desk.stage(new), protocol.Staged)
    alone = desk.answer(chat(max_tokens=30, temperature=0.0))
    running, later = chat(max_tokens=30, temperature=0.0), chat(max_tokens=1)
    desk.send(running)
    begun = desk.expect(protocol.Begun)
    desk.send(protocol.Route(job_id="swap", version=new.version))
    desk.send(later)
    said: list[Message] = []
    while len(of(said, protocol.RequestDone)) < 2:
        said.append(desk.receive())
    (after,) = of(said, protocol.Begun)
    assert (begun.version, after.version) == (0, new.version)
    (done,) = [choice for choice in of(said, protocol.ChoiceDone) if choice.request_id == running.request_id]
    assert done.completion_ids == alone.completion_ids
    assert isinstance(desk.route(0), protocol.Routed)


def test_versions_follow_one_another(desk: Desk, adapters: Callable[[], AdapterRef]) -> None:
    for _ in range(3):
        new = adapters()
        assert isinstance(desk.stage(new), protocol.Staged)
        assert isinstance(desk.route(new.version), protocol.Routed)
        assert desk.version() == new.version
    base = desk.stage(protocol.BASE)
    assert isinstance(base, protocol.Staged)
    assert isinstance(desk.route(0), protocol.Routed)
    assert desk.version() == 0


def test_a_version_that_is_nowhere_cannot_be_routed(desk: Desk) -> None:
    failed = desk.route(999)
    assert isinstance(failed, protocol.RouteFailed)
    assert "999" in failed.message
    assert desk.version() == 0


def test_a_damaged_adapter_is_not_staged_and_the_next_one_is(
    desk: Desk, chatter: Chatter, adapters: Callable[[], AdapterRef], tmp_path: Path
) -> None:
    damaged = chatter.adapter(tmp_path / "damaged", 800)
    for name in ("adapter.gguf", "adapter_model.safetensors"):
        with (tmp_path / "damaged" / name).open("r+b") as file:
            file.truncate(500)
    failed = desk.stage(damaged)
    assert isinstance(failed, protocol.StageFailed)
    assert failed.code == "adapter_unreadable"
    assert isinstance(desk.route(800), protocol.RouteFailed)
    assert desk.version() == 0
    assert isinstance(desk.stage(adapters()), protocol.Staged)


def test_every_backend_computes_the_same(desk: Desk, chatter: Chatter, tmp_path: Path) -> None:
    staged = desk.stage(chatter.adapter(tmp_path / "same", 700))
    assert isinstance(staged, protocol.Staged)
    for told, computed in ((staged.live_canary, False), (staged.canary, True)):
        reference = referee(chatter, desk.ready.probes, tmp_path / "same" if computed else None)
        assert mean_difference(told, reference) < CLOSE


def referee(
    chatter: Chatter, probes: tuple[protocol.ProbeTokens, ...], adapter: Path | None
) -> tuple[tuple[float, ...], ...]:
    """The canary by transformers and PEFT themselves."""
    import peft
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(chatter.folder, dtype=torch.float32).eval()
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter).eval()
    canary = []
    for probe in probes:
        ids = torch.tensor([probe.prompt_ids + probe.completion_ids])
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
        start = len(probe.prompt_ids) - 1
        canary.append(tuple(float(logprobs[start + i, token]) for i, token in enumerate(probe.completion_ids)))
    return tuple(canary)
