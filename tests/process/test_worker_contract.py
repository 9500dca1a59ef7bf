"""One contract for every worker: the same tests run against the light worker and the real one.

Most tests share one worker process a kind; those that end a process start their own.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgpack
import numpy as np
import pytest
import zmq

from adapters.folder import write_adapter_folder
from adapters.llamacpp_format import load_gguf_adapter, read_base_shape, save_gguf_adapter
from adapters.manifest import MANIFEST_FILE, describe_files, file_sha256, manifest_bytes, parse_manifest
from adapters.shape import BaseShape
from adapters.weights import AdapterWeights
from engine import protocol
from engine.protocol import AdapterRef, ChatMessage, Message, ProbeText, Sampling

HANG_GUARD_S = 60.0
LINK_GUARD_S = 20.0  # a worker leaves 1.5 s after the link is lost
EPOCH = 7
Kind = Literal["light", "real"]
M = TypeVar("M", bound=Message)

NEWS = (protocol.Beat, protocol.Decoding)  # what a worker says unasked
COMMANDS: dict[Kind, tuple[str, ...]] = {
    "light": (str(Path(__file__).parent / "light_worker.py"),),
    "real": ("-m", "engine.worker"),
}
KINDS = pytest.mark.parametrize("kind", ["light", pytest.param("real", marks=pytest.mark.real_model)], scope="module")
REAL = pytest.mark.parametrize("kind", [pytest.param("real", marks=pytest.mark.real_model)], scope="module")
PROBES = (
    ProbeText(user="What is a cat?", assistant="A cat is a small animal."),
    ProbeText(user="Hi", assistant="Hello!"),
)
LORA = protocol.LoraSettings(rank=4, alpha=8.0, layers=2)
BASE = AdapterRef(version=0, folder=None)


class Worker:
    """A worker process and the daemon's end of its link."""

    def __init__(self, kind: Kind, role: str, folder: Path) -> None:
        self.name = role
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        endpoint = f"ipc://{folder}/link"
        self.socket.bind(endpoint)
        environment = os.environ | {
            protocol.ENV_ENDPOINT: endpoint,
            protocol.ENV_NAME: self.name,
            protocol.ENV_EPOCH: str(EPOCH),
            "EDGED_DAEMON_PID": str(os.getpid()),
            "EDGED_LOG_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
        }
        self.process = subprocess.Popen([sys.executable, "-P", *COMMANDS[kind], role], env=environment)
        self.hello = self.expect(protocol.Hello)

    def send(self, message: Message) -> None:
        self.socket.send_multipart([f"{self.name}:{EPOCH}".encode(), protocol.encode(message, EPOCH)])

    def receive(self) -> Message:
        deadline = time.monotonic() + HANG_GUARD_S
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None  # asked first: what it said before it ended is here then
            if self.socket.poll(200):
                identity, frame = self.socket.recv_multipart()
                assert identity == f"{self.name}:{EPOCH}".encode()
                epoch, message = protocol.decode(frame)
                assert epoch == EPOCH
                return message
            assert not ended, f"the worker left with {self.process.returncode}"
        raise AssertionError("the worker says nothing")

    def expect(self, kind: type[M], *others: type[Message]) -> M:
        """The next message that is no NEWS; it must be of this kind. Messages of `others` may come before."""
        while True:
            message = self.receive()
            if isinstance(message, kind):
                return message
            assert isinstance(message, (*NEWS, *others)), f"unexpected {message}"

    def collect(self, request_id: str) -> list[Message]:
        """Everything that is said about a request, to its end."""
        said: list[Message] = []
        while not (said and isinstance(said[-1], protocol.RequestDone | protocol.RequestFailed)):
            message = self.receive()
            if not isinstance(message, NEWS):
                assert getattr(message, "request_id", None) == request_id, f"unexpected {message}"
                said.append(message)
        return said

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.socket.close(linger=0)
        self.context.term()


def start_serve(model: Path, **changes: Any) -> protocol.StartServe:
    settings: dict[str, Any] = {
        "model_path": str(model),
        "adapter": BASE,
        "slots": 4,
        "context_tokens": 1024,
        "threads": 2,
        "probes": PROBES,
    }
    return protocol.StartServe(**(settings | changes))


@pytest.fixture(scope="module")
def open_worker() -> Iterator[Callable[[Kind, str], Worker]]:
    """Starts worker processes and ends those that are left."""
    with tempfile.TemporaryDirectory() as root:
        workers: list[Worker] = []

        def start(kind: Kind, role: str) -> Worker:
            folder = Path(root) / str(len(workers))
            folder.mkdir()
            workers.append(Worker(kind, role, folder))
            return workers[-1]

        yield start
        for worker in workers:
            worker.close()


@pytest.fixture(scope="module")
def serving(kind: Kind, open_worker: Callable[[Kind, str], Worker], packaged_model: Path) -> Worker:
    """A serve worker of this kind that is shared by the tests of this module."""
    worker = open_worker(kind, "serve")
    worker.send(start_serve(packaged_model))
    ready = worker.expect(protocol.Ready)
    assert ready.model is not None
    assert len(ready.probes) == len(PROBES)
    return worker


@pytest.fixture(scope="module")
def adapters(packaged_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], AdapterRef]:
    """Random adapters by version, each made once."""
    root = tmp_path_factory.mktemp("adapters")

    def adapter(version: int) -> AdapterRef:
        folder = root / f"v{version}"
        if not folder.exists():
            write_adapter(folder, packaged_model, version)
        return AdapterRef(version=version, folder=str(folder))

    return adapter


def write_adapter(
    folder: Path, model: Path, version: int, *, scale: float = 0.02, base: BaseShape | None = None
) -> None:
    base = base or read_base_shape(model)
    rng = np.random.default_rng(version)
    matrices = {}
    for module in base.top_modules(2):
        n_out, n_in = base.module_shape(module)
        a, b = rng.standard_normal((4, n_in)), rng.standard_normal((n_out, 4))
        matrices[module] = (a.astype(np.float32) * np.float32(scale), b.astype(np.float32) * np.float32(scale))
    weights = AdapterWeights(base=base, rank=4, alpha=8.0, matrices=matrices)
    lineage: dict[str, Any] = {"parent": None, "base_sha256": "0" * 64, "base_model_name": "test", "origin": "imported"}
    write_adapter_folder(folder, weights, version=version, created_at=0.0, **lineage)


_numbers = iter(range(10**9))


def chat(text: str = "What is a cat?", *, n: int = 1, prompt: str | None = None, **sampling: Any) -> protocol.Generate:
    settings: dict[str, Any] = {"max_tokens": 12, "seed": 5} | sampling
    return protocol.Generate(
        request_id=f"request-{next(_numbers)}",
        messages=(ChatMessage(role="user", content=text),) if prompt is None else None,
        prompt=prompt,
        n=n,
        sampling=Sampling(**settings),
    )


def ask(worker: Worker, message: protocol.Generate) -> list[Message]:
    worker.send(message)
    return worker.collect(message.request_id)


def of(said: list[Message], kind: type[M]) -> list[M]:
    return [message for message in said if isinstance(message, kind)]


def stage(worker: Worker, adapter: AdapterRef, **changes: Any) -> protocol.Staged | protocol.StageFailed:
    settings: dict[str, Any] = {"fluency_prompts": ("Hi", "Why?"), "fluency_tokens": 6, "seed": 1} | changes
    worker.send(protocol.Stage(job_id=f"stage-{next(_numbers)}", adapter=adapter, **settings))
    while True:
        message = worker.receive()
        if isinstance(message, protocol.Staged | protocol.StageFailed):
            return message
        assert isinstance(message, NEWS), f"unexpected {message}"


def route(worker: Worker, version: int) -> protocol.Routed | protocol.RouteFailed:
    worker.send(protocol.Route(job_id=f"route-{next(_numbers)}", version=version))
    while True:
        message = worker.receive()
        if isinstance(message, protocol.Routed | protocol.RouteFailed):
            return message


def check_request(said: list[Message], n: int) -> None:
    """The order of messages, and that the records agree with what was streamed."""
    assert isinstance(said[0], protocol.Begun)
    assert isinstance(said[-1], protocol.RequestDone)
    done = of(said, protocol.ChoiceDone)
    assert sorted(choice.choice for choice in done) == list(range(n))
    for choice in done:
        texts = [chunk.text for chunk in of(said, protocol.Chunk) if chunk.choice == choice.choice]
        assert "".join(texts) == choice.text
        assert len(choice.completion_ids) == len(choice.logprobs) == len(choice.raw_logprobs)
        assert all(logprob is not None and logprob <= 0 for logprob in choice.logprobs + choice.raw_logprobs)
    assert said[-1].completion_tokens == sum(len(choice.completion_ids) for choice in done)
    assert said[-1].prompt_tokens == len(said[0].prompt_ids)


# ------------------------------------------------------------------------------------------------------------ serve


@KINDS
def test_hello_names_the_process(serving: Worker, kind: Kind) -> None:
    assert serving.hello == protocol.Hello(role="serve", name="serve", pid=serving.process.pid)


@KINDS
def test_an_idle_worker_beats_with_its_memory(serving: Worker, kind: Kind) -> None:
    beat = serving.receive()
    while not (isinstance(beat, protocol.Beat) and beat.busy == ""):
        beat = serving.receive()
    assert beat.rss_bytes > 1e6


@KINDS
def test_a_request_is_begun_streamed_recorded_and_done(serving: Worker, kind: Kind) -> None:
    said = ask(serving, chat())
    check_request(said, 1)
    (done,) = of(said, protocol.ChoiceDone)
    assert done.text
    assert done.seed == 5
    assert len(done.completion_ids) <= 12


@KINDS
def test_choices_of_one_request_differ_and_the_same_seed_gives_the_same_text(serving: Worker, kind: Kind) -> None:
    first, second = (ask(serving, chat(n=2)) for _ in range(2))
    check_request(first, 2)
    texts = {choice.choice: choice.text for choice in of(first, protocol.ChoiceDone)}
    assert texts[0] != texts[1]
    # The first token depends on the seed alone; later ones may differ by the kernels' rounding.
    ids = [{c.choice: c.completion_ids[0] for c in of(said, protocol.ChoiceDone)} for said in (first, second)]
    assert ids[0] == ids[1]


@KINDS
def test_more_choices_than_slots_are_all_answered(serving: Worker, kind: Kind) -> None:
    check_request(ask(serving, chat(n=6, max_tokens=3)), 6)


@KINDS
def test_a_plain_prompt_is_continued(serving: Worker, kind: Kind) -> None:
    check_request(ask(serving, chat(prompt="Once upon a time")), 1)


@KINDS
def test_a_length_limit_ends_the_answer(serving: Worker, kind: Kind) -> None:
    (done,) = of(ask(serving, chat(max_tokens=2)), protocol.ChoiceDone)
    assert (done.finish_reason, len(done.completion_ids)) == ("length", 2)


@KINDS
def test_a_stop_string_ends_the_answer_and_is_not_shown(serving: Worker, kind: Kind) -> None:
    (plain,) = of(ask(serving, chat(temperature=0.0)), protocol.ChoiceDone)
    stop = plain.text.split()[2]
    said = ask(serving, chat(temperature=0.0, stop=(stop,)))
    check_request(said, 1)
    (done,) = of(said, protocol.ChoiceDone)
    assert done.finish_reason == "stop"
    assert done.text == plain.text[: plain.text.index(stop)].rstrip(" ") or done.text == plain.text.split(stop)[0]


@REAL
def test_a_biased_token_is_not_chosen_and_an_unknown_one_is_refused(serving: Worker, kind: Kind) -> None:
    (plain,) = of(ask(serving, chat(temperature=0.0, max_tokens=3)), protocol.ChoiceDone)
    first = plain.completion_ids[0]
    (biased,) = of(
        ask(serving, chat(temperature=0.0, max_tokens=3, logit_bias=((first, -100.0),))), protocol.ChoiceDone
    )
    assert biased.completion_ids[0] != first
    assert biased.raw_logprobs[0] < plain.raw_logprobs[0]
    (failed,) = of(ask(serving, chat(logit_bias=((10**8, 1.0),))), protocol.RequestFailed)
    assert failed.code == "bad_logit_bias"


@KINDS
def test_a_cancelled_request_ends_with_what_it_has(serving: Worker, kind: Kind) -> None:
    running, waiting = chat(n=4, max_tokens=300), chat(n=1)
    serving.send(running)
    serving.send(waiting)
    serving.send(protocol.Cancel(request_id=waiting.request_id))
    serving.send(protocol.Cancel(request_id=running.request_id))
    said: dict[str, list[Message]] = {running.request_id: [], waiting.request_id: []}
    while not all(messages and isinstance(messages[-1], protocol.RequestDone) for messages in said.values()):
        message = serving.receive()
        if not isinstance(message, NEWS):
            said[getattr(message, "request_id", "")].append(message)
    check_request(said[running.request_id], 4)
    check_request(said[waiting.request_id], 1)
    check_request(ask(serving, chat()), 1)


@KINDS
def test_a_request_without_a_slot_by_its_deadline_fails_and_is_not_begun(serving: Worker, kind: Kind) -> None:
    running, late = chat(n=4, max_tokens=300), dataclasses.replace(chat(), queue_timeout_s=1e-6)
    for message in (running, late, protocol.Cancel(request_id=running.request_id)):
        serving.send(message)
    said: dict[str, list[Message]] = {running.request_id: [], late.request_id: []}
    last = (protocol.RequestDone, protocol.RequestFailed)
    while not all(messages and isinstance(messages[-1], last) for messages in said.values()):
        message = serving.receive()
        if not isinstance(message, NEWS):
            said[getattr(message, "request_id", "")].append(message)
    (failed,) = said[late.request_id]
    assert isinstance(failed, protocol.RequestFailed)
    assert failed.code == "queue_timeout"
    check_request(said[running.request_id], 4)
    check_request(ask(serving, dataclasses.replace(chat(), queue_timeout_s=60.0)), 1)


@KINDS
def test_a_cancel_of_nothing_is_ignored(serving: Worker, kind: Kind) -> None:
    serving.send(protocol.Cancel(request_id="nobody"))
    check_request(ask(serving, chat()), 1)


def written(answer: str, **changes: Any) -> protocol.Tokenise:
    messages = (ChatMessage(role="user", content="What is a cat?"),)
    settings: dict[str, Any] = {"request_id": f"request-{next(_numbers)}", "messages": messages, "answer": answer}
    return protocol.Tokenise(**(settings | changes))


def tokenise(worker: Worker, message: protocol.Tokenise) -> protocol.Tokenised:
    worker.send(message)
    said = worker.expect(protocol.Tokenised)
    assert said.request_id == message.request_id
    return said


@KINDS
def test_a_written_answer_has_the_prompt_of_a_sampled_one_and_ends_as_one(serving: Worker, kind: Kind) -> None:
    begun, *_, done, _ = ask(serving, chat(max_tokens=200))
    assert isinstance(begun, protocol.Begun)
    assert isinstance(done, protocol.ChoiceDone)
    assert done.finish_reason == "stop"
    tokens = tokenise(serving, written("A cat is a small animal."))
    assert tokens.prompt_ids == begun.prompt_ids
    assert tokens.completion_ids[-1] == done.completion_ids[-1]
    assert len(tokens.completion_ids) > 4


@KINDS
def test_an_answer_to_a_prompt_that_has_its_tokens_is_tokenised_alone(serving: Worker, kind: Kind) -> None:
    whole = tokenise(serving, written("A cat."))
    alone = tokenise(serving, written("A cat.", messages=None, prompt_tokens=7))
    assert (alone.prompt_ids, alone.completion_ids) == ((), whole.completion_ids)


@KINDS
@pytest.mark.parametrize(
    ("message", "code"),
    [
        (written("word " * 3000), "context_length_exceeded"),
        (written("A cat.", messages=None, prompt_tokens=1024), "context_length_exceeded"),
        (written("A cat.", messages=()), "bad_template"),
    ],
)
def test_a_written_answer_that_cannot_be_one_is_refused(
    serving: Worker, kind: Kind, message: protocol.Tokenise, code: str
) -> None:
    serving.send(message)
    failed = serving.expect(protocol.RequestFailed)
    assert (failed.request_id, failed.code) == (message.request_id, code)


@KINDS
@pytest.mark.parametrize(
    ("message", "code"),
    [
        (chat("word " * 3000), "context_length_exceeded"),
        (chat(prompt=""), "bad_prompt"),
        (protocol.Generate(request_id="empty", messages=(), prompt=None, n=1, sampling=Sampling()), "bad_template"),
    ],
)
def test_a_request_that_cannot_be_done_is_refused_with_its_reason(
    serving: Worker, kind: Kind, message: protocol.Generate, code: str
) -> None:
    (failed,) = ask(serving, message)
    assert isinstance(failed, protocol.RequestFailed)
    assert failed.code == code
    assert failed.message


@KINDS
def test_a_staged_adapter_changes_nothing_until_it_is_routed_and_can_be_left_again(
    serving: Worker, kind: Kind, adapters: Callable[[int], AdapterRef]
) -> None:
    staged = stage(serving, adapters(1))
    assert isinstance(staged, protocol.Staged), staged
    assert (staged.version, len(staged.canary)) == (1, len(PROBES))
    assert [len(row) for row in staged.canary] == [len(row) for row in staged.live_canary]
    assert staged.canary != staged.live_canary
    assert len(staged.fluency) == len(staged.fluency_texts) == 2
    assert all(1 <= len(answer.completion_ids) <= 6 for answer in staged.fluency)
    assert versions(serving) == 0
    assert isinstance(route(serving, 1), protocol.Routed)
    assert versions(serving) == 1
    assert isinstance(route(serving, 0), protocol.Routed)
    assert versions(serving) == 0


@KINDS
def test_a_request_that_names_a_version_runs_on_it_beside_what_is_live_and_is_cancelled_as_any(
    serving: Worker, kind: Kind, adapters: Callable[[int], AdapterRef]
) -> None:
    live = versions(serving)
    other = adapters(3)
    assert isinstance(stage(serving, other), protocol.Staged)
    named = [dataclasses.replace(chat(n=6, max_tokens=300), version=version) for version in (3, live)]
    for message in named:
        serving.send(message)
    for message in named:
        serving.send(protocol.Cancel(request_id=message.request_id))
    said: dict[str, list[Message]] = {message.request_id: [] for message in named}
    while not all(messages and isinstance(messages[-1], protocol.RequestDone) for messages in said.values()):
        message = serving.receive()
        if not isinstance(message, NEWS):
            said[getattr(message, "request_id", "")].append(message)
    for message in named:
        check_request(said[message.request_id], 6)
        assert [begun.version for begun in of(said[message.request_id], protocol.Begun)] == [message.version]
    whole = ask(serving, dataclasses.replace(chat(), version=3))
    check_request(whole, 1)
    (nowhere,) = ask(serving, dataclasses.replace(chat(), version=99))
    assert isinstance(nowhere, protocol.RequestFailed)
    assert nowhere.code == "not_resident"
    assert versions(serving) == live
    assert isinstance(stage(serving, adapters(2)), protocol.Staged)


def versions(worker: Worker) -> int:
    """The version that answers now."""
    said = ask(worker, chat(max_tokens=1))
    assert isinstance(said[0], protocol.Begun)
    return said[0].version


@KINDS
def test_a_request_keeps_its_version_over_a_swap(
    serving: Worker, kind: Kind, adapters: Callable[[int], AdapterRef]
) -> None:
    assert isinstance(stage(serving, adapters(2)), protocol.Staged)
    running = chat(n=2, max_tokens=40)
    serving.send(running)
    begun = serving.expect(protocol.Begun)
    serving.send(protocol.Route(job_id="swap", version=2))
    new = chat(max_tokens=1)
    serving.send(new)
    said: list[Message] = []
    while sum(isinstance(message, protocol.RequestDone) for message in said) < 2:
        said.append(serving.receive())
    (later,) = of(said, protocol.Begun)
    assert (begun.version, later.version) == (0, 2)
    assert isinstance(route(serving, 0), protocol.Routed)


@KINDS
def test_a_version_that_is_nowhere_cannot_be_routed(serving: Worker, kind: Kind) -> None:
    failed = route(serving, 99)
    assert isinstance(failed, protocol.RouteFailed)
    assert "99" in failed.message


@KINDS
def test_garbage_is_not_staged_and_the_spare_is_clean_afterwards(
    serving: Worker, kind: Kind, adapters: Callable[[int], AdapterRef], tmp_path: Path
) -> None:
    (tmp_path / "adapter.gguf").write_bytes(b"GGUF, not")
    failed = stage(serving, AdapterRef(version=3, folder=str(tmp_path)))
    assert isinstance(failed, protocol.StageFailed)
    assert failed.code == "adapter_unreadable"
    assert isinstance(route(serving, 3), protocol.RouteFailed)
    assert isinstance(stage(serving, adapters(4)), protocol.Staged)


@KINDS
def test_a_truncated_adapter_is_not_staged(serving: Worker, kind: Kind, packaged_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    write_adapter(folder, packaged_model, 5)
    with (folder / "adapter.gguf").open("r+b") as file:
        file.truncate(5000)
    failed = stage(serving, AdapterRef(version=5, folder=str(folder)))
    assert isinstance(failed, protocol.StageFailed)
    assert failed.code == "adapter_unreadable"


@REAL
def test_an_adapter_of_nan_is_not_staged_and_answers_go_on(
    serving: Worker, kind: Kind, packaged_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    write_adapter(folder, packaged_model, 6)
    base = read_base_shape(packaged_model)
    whole, _ = load_gguf_adapter(folder / "adapter.gguf", base)
    broken = {module: (a, np.full_like(b, np.nan)) for module, (a, b) in whole.matrices.items()}
    save_gguf_adapter(
        folder / "adapter.gguf",
        AdapterWeights(base=base, rank=4, alpha=8.0, matrices=broken),
        version=6,
        parent=None,
        base_sha256="0" * 64,
    )
    published = parse_manifest((folder / MANIFEST_FILE).read_bytes())
    changed = dataclasses.replace(published, files=describe_files(folder))
    (folder / MANIFEST_FILE).write_bytes(manifest_bytes(changed))
    failed = stage(serving, AdapterRef(version=6, folder=str(folder)))
    assert isinstance(failed, protocol.StageFailed)
    assert failed.code == "not_finite"
    assert isinstance(route(serving, 6), protocol.RouteFailed)
    check_request(ask(serving, chat()), 1)


@REAL
def test_an_adapter_of_another_model_is_not_staged_and_answers_go_on(
    serving: Worker, kind: Kind, packaged_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    base = read_base_shape(packaged_model)
    write_adapter(folder, packaged_model, 9, base=dataclasses.replace(base, n_embd=base.n_embd * 2))
    failed = stage(serving, AdapterRef(version=9, folder=str(folder)))
    assert isinstance(failed, protocol.StageFailed)
    assert failed.code == "adapter_mismatch"
    assert isinstance(route(serving, 9), protocol.RouteFailed)
    check_request(ask(serving, chat()), 1)


@REAL
def test_staging_yields_to_running_answers(serving: Worker, kind: Kind, adapters: Callable[[int], AdapterRef]) -> None:
    message = chat(max_tokens=500, temperature=1.5)
    serving.send(message)
    serving.expect(protocol.Begun)
    serving.send(protocol.Stage(job_id="s", adapter=adapters(7), fluency_prompts=(), fluency_tokens=0, seed=1))
    between = 0
    while not isinstance(said := serving.receive(), protocol.Staged):
        between += isinstance(said, protocol.Chunk)
    assert between > 3
    assert said.longest_gap_ms > 0
    serving.send(protocol.Cancel(request_id=message.request_id))
    serving.collect(message.request_id)


@KINDS
def test_twenty_swaps_under_load_lose_no_request(
    serving: Worker, kind: Kind, adapters: Callable[[int], AdapterRef]
) -> None:
    live = versions(serving)
    other = 8
    assert isinstance(stage(serving, adapters(other)), protocol.Staged)
    said: dict[str, list[Message]] = {}
    routed: list[int] = []
    open_requests = 0
    while len(routed) < 20 or open_requests:
        while open_requests < 6 and len(routed) < 20:
            message = chat(n=1, max_tokens=4)
            said[message.request_id] = []
            serving.send(message)
            open_requests += 1
        match serving.receive():
            case protocol.Routed(version=version):
                routed.append(version)
            case protocol.Beat() | protocol.Decoding():
                pass
            case protocol.RequestDone() as done:
                said[done.request_id].append(done)
                open_requests -= 1
                if (len(said) - open_requests) % 3 == 0 and len(routed) < 20:
                    live, other = other, live
                    serving.send(protocol.Route(job_id=f"swap-{len(said)}", version=live))
            case other_message:
                said[getattr(other_message, "request_id", "")].append(other_message)
    for messages in said.values():
        check_request(messages, 1)
    assert {begun.version for messages in said.values() for begun in of(messages, protocol.Begun)} == {live, other}


# ------------------------------------------------------------------------------------------------------------ train


def train_job(folder: Path, model: Path) -> protocol.TrainJob:
    ids = tuple(range(20, 30))
    episodes = tuple(
        protocol.RatedEpisode(
            episode=protocol.EpisodeTokens(
                episode_id=number,
                prompt_ids=(1, 4093, 198, *ids),
                completion_ids=(*ids[number:], 2),
                logprobs=(-1.5,) * (len(ids) - number + 1),
                temperature=1.0,
                adapter=BASE,
            ),
            reward=1.0 if number % 2 else -1.0,
            replay=False,
        )
        for number in range(4)
    )
    ppo = protocol.PpoSettings(epochs=1, minibatches=1, live_kl_max=1.0, critic_warmup_steps=1)
    job = protocol.TrainJob(
        job_id="job", version=1, parent=BASE, reference=BASE,
        checkpoint=None, episodes=episodes, probes=(protocol.ProbeTokens(prompt_ids=(1, 2), completion_ids=(3, 4)),),
        ppo=ppo, lora=LORA, seed=1, threads=2, base_sha256=file_sha256(model),
    )  # fmt: skip
    (folder / protocol.JOB_FILE).write_bytes(msgpack.packb(protocol.to_map(job)))
    return job


@pytest.fixture(scope="module")
def training(
    kind: Kind,
    open_worker: Callable[[Kind, str], Worker],
    packaged_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Worker:
    """A train worker of this kind that is shared by the tests of this module."""
    worker = open_worker(kind, "train")
    worker.send(
        protocol.StartTrain(
            model_path=str(packaged_model),
            base_sha256=file_sha256(packaged_model),
            cache_folder=str(tmp_path_factory.mktemp("cache")),
            lora=LORA,
            threads=2,
            dtype="float32",
            device="cpu",
            idle_class=False,
        )
    )
    worker.expect(protocol.Ready)
    return worker


@KINDS
def test_a_job_becomes_a_folder_and_repeats_without_being_trained_again(
    training: Worker, kind: Kind, packaged_model: Path, tmp_path: Path
) -> None:
    train_job(tmp_path, packaged_model)
    for _ in range(2):
        training.send(protocol.Train(job_id="job", folder=str(tmp_path)))
        trained = training.expect(protocol.Trained, protocol.Progress)
        assert (trained.result.job_id, trained.result.version) == ("job", 1)
        assert [len(row) for row in trained.result.canary] == [2]
        assert "kl/live" in trained.result.metrics
    out = tmp_path / protocol.OUT_FOLDER
    written = {path.name for path in (out / "adapter").iterdir()}
    assert written == {"adapter_config.json", "adapter_model.safetensors", "adapter.gguf", "manifest.json"}
    plain = msgpack.unpackb((out / protocol.RESULT_FILE).read_bytes())
    stored = protocol.from_map(protocol.TrainResult, plain)
    assert dataclasses.replace(stored, seconds={}) == dataclasses.replace(trained.result, seconds={})
    assert stored.seconds.items() <= trained.result.seconds.items()
    assert not (tmp_path / f"{protocol.OUT_FOLDER}.tmp").exists()


@KINDS
def test_episodes_are_scored_one_by_one(training: Worker, kind: Kind, packaged_model: Path, tmp_path: Path) -> None:
    job = train_job(tmp_path, packaged_model)
    episodes = tuple(rated.episode for rated in job.episodes)
    training.send(protocol.Score(job_id="score", episodes=episodes, reference=BASE))
    scored = training.expect(protocol.Scored)
    assert scored.job_id == "score"
    assert [score.episode_id for score in scored.scores] == [episode.episode_id for episode in episodes]
    assert [score.n_tokens for score in scored.scores] == [len(episode.completion_ids) for episode in episodes]


@KINDS
def test_what_is_asked_for_while_it_trains_is_answered_afterwards(
    training: Worker, kind: Kind, packaged_model: Path, tmp_path: Path
) -> None:
    episodes = tuple(rated.episode for rated in train_job(tmp_path, packaged_model).episodes)
    training.send(protocol.Train(job_id="job", folder=str(tmp_path)))
    training.expect(protocol.Progress)
    for job_id in ("first", "second"):
        training.send(protocol.Score(job_id=job_id, episodes=episodes, reference=BASE))
    training.expect(protocol.Trained, protocol.Progress)
    assert [training.expect(protocol.Scored).job_id for _ in range(2)] == ["first", "second"]


@KINDS
def test_a_job_without_episodes_fails_and_writes_nothing(
    training: Worker, kind: Kind, packaged_model: Path, tmp_path: Path
) -> None:
    job = protocol.to_map(train_job(tmp_path, packaged_model)) | {"episodes": []}
    (tmp_path / protocol.JOB_FILE).write_bytes(msgpack.packb(job))
    training.send(protocol.Train(job_id="job", folder=str(tmp_path)))
    failed = training.expect(protocol.TrainFailed, protocol.Progress)
    assert failed.code == "batch_empty"
    assert [path.name for path in tmp_path.iterdir()] == [protocol.JOB_FILE]


# ------------------------------------------------------------------------------------------------- life and death


@KINDS
@pytest.mark.parametrize("role", ["serve", "train"])
def test_stop_before_any_work_ends_the_process_with_success(
    open_worker: Callable[[Kind, str], Worker], kind: Kind, role: str
) -> None:
    worker = open_worker(kind, role)
    worker.send(protocol.Stop(within_s=5.0))
    assert worker.process.wait(HANG_GUARD_S) == 0


@KINDS
def test_stop_lets_short_answers_finish_and_cuts_long_ones(
    open_worker: Callable[[Kind, str], Worker], kind: Kind, packaged_model: Path
) -> None:
    worker = open_worker(kind, "serve")
    worker.send(start_serve(packaged_model))
    worker.expect(protocol.Ready)
    message = chat(max_tokens=500)
    worker.send(message)
    worker.send(protocol.Stop(within_s=1.0))
    check_request(worker.collect(message.request_id), 1)
    assert worker.process.wait(HANG_GUARD_S) == 0


@KINDS
def test_a_file_that_is_no_model_is_a_fault_and_not_worth_another_try(
    open_worker: Callable[[Kind, str], Worker], kind: Kind, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"this is no model")
    worker = open_worker(kind, "serve")
    worker.send(start_serve(path))
    fault = worker.expect(protocol.Fault)
    assert fault.code == "model_unreadable"
    assert str(path) in fault.message
    assert worker.process.wait(HANG_GUARD_S) == protocol.EXIT_FAULT


@KINDS
def test_an_adapter_that_is_not_what_was_published_is_a_fault_at_the_start(
    open_worker: Callable[[Kind, str], Worker], kind: Kind, packaged_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    write_adapter(folder, packaged_model, 5)
    data = bytearray((folder / "adapter.gguf").read_bytes())
    data[-1] ^= 1
    (folder / "adapter.gguf").write_bytes(data)
    worker = open_worker(kind, "serve")
    worker.send(start_serve(packaged_model, adapter=AdapterRef(version=5, folder=str(folder))))
    fault = worker.expect(protocol.Fault)
    assert fault.code == "adapter_unreadable"
    assert str(folder) in fault.message
    assert worker.process.wait(HANG_GUARD_S) == protocol.EXIT_FAULT


@KINDS
def test_a_worker_whose_link_is_gone_leaves(
    open_worker: Callable[[Kind, str], Worker], kind: Kind, packaged_model: Path
) -> None:
    worker = open_worker(kind, "serve")
    worker.send(start_serve(packaged_model))
    worker.expect(protocol.Ready)
    worker.socket.close(linger=0)
    assert worker.process.wait(LINK_GUARD_S) == protocol.EXIT_LINK_LOST


@KINDS
@pytest.mark.parametrize("role", ["serve", "train"])
def test_a_worker_dies_with_its_daemon(kind: Kind, role: str, tmp_path: Path) -> None:
    """The daemon here is a shell that is killed with SIGKILL; the link stays up, so only the kernel can tell."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(f"ipc://{tmp_path}/link")
    environment = os.environ | {
        protocol.ENV_ENDPOINT: f"ipc://{tmp_path}/link",
        protocol.ENV_NAME: role,
        protocol.ENV_EPOCH: str(EPOCH),
    }
    command = " ".join([sys.executable, "-P", *COMMANDS[kind], role])
    shell = subprocess.Popen(["bash", "-c", f"EDGED_DAEMON_PID=$$ {command} & wait"], env=environment)
    assert socket.poll(int(HANG_GUARD_S * 1000))
    _, hello = protocol.decode(socket.recv_multipart()[1])
    assert isinstance(hello, protocol.Hello)
    shell.send_signal(signal.SIGKILL)
    shell.wait()
    deadline = time.monotonic() + HANG_GUARD_S
    while Path(f"/proc/{hello.pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{hello.pid}").exists()
    socket.close(linger=0)
    context.term()
