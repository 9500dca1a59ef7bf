"""The smallest honest worker: the whole protocol of both roles without a model.

`python -P light_worker.py serve|train|score`, of which score is the real one. Answers are words drawn from a hash of
prompt, version, seed and choice; the canary is a function of the version alone, so that both roles agree on it.
Adapters are real folders with tiny real weights. Everything about the process is real: link, beats, exit codes, swaps
(`engine.generate.swap`), job folders and their rename.

Environment:
    EDGED_LIGHT_TOKEN_S      seconds a token takes (0)
    EDGED_LIGHT_TRAIN_S      seconds a training takes (0)
    EDGED_LIGHT_CRASH        a point at which the worker kills itself: serve:start, serve:token, stage:begin,
                             train:start, train:begin, train:mid, train:before_rename, train:after_rename
    EDGED_LIGHT_CRASH_ONCE   a file that is made before the crash; if it is there, nothing crashes
    EDGED_LIGHT_CRASH_WHILE  a file; it crashes only while that is there
    EDGED_LIGHT_HOLD         a file; while it is there, answers to prompts with "hold" in them get no further
    EDGED_LIGHT_REFUSES      a version that it will not start with
    EDGED_LIGHT_STAMMERS     a version whose answers to requests are one word over and over
    EDGED_LIGHT_DISK_FULL    a file; while it is there, no result of a training can be written
    EDGED_LIGHT_HANG         a point as above at which it stops turning, without dying
"""

from __future__ import annotations

import collections
import hashlib
import json
import logging
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgpack

from engine import logs, protocol
from engine.fault import EngineFault
from engine.generate.swap import Action, Decline, Free, Place, Restore, Swap
from engine.link import Link, LinkLost, Stopped
from engine.worker import tie_to_daemon

log = logging.getLogger("light")

WORDS: list[str] = re.findall(
    r"\w+",
    "a the cat dog sea sky tree stone river road house light water fire wind rain snow sun moon star bird fish leaf "
    "seed corn bread salt milk book word song tale hand eye heart door key lamp rope boat wheel bell drum gold iron",
)
FIRST_WORD_ID = 1000  # ids below are the bytes of prompts
EOS_ID = 2
GGUF_MAGIC = b"GGUF"
CONTEXT_TOKENS_MAX = 8192
ROLES_KNOWN = ("system", "user", "assistant")


def number(*parts: object) -> int:
    """A large number that depends on nothing but `parts`."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8])


def reach(point: str) -> None:
    """Crash or hang here, if the environment says so."""
    once = os.environ.get("EDGED_LIGHT_CRASH_ONCE")
    during = os.environ.get("EDGED_LIGHT_CRASH_WHILE")
    if during and not Path(during).exists():
        return
    if os.environ.get("EDGED_LIGHT_CRASH") == point and not (once and Path(once).exists()):
        if once:
            Path(once).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ.get("EDGED_LIGHT_HANG") == point:
        signal.pause()


def seconds(name: str) -> float:
    return float(os.environ.get(name, "0"))


def canary(version: int, probes: tuple[protocol.ProbeTokens, ...]) -> tuple[tuple[float, ...], ...]:
    """Log-probabilities of the probes under `version`; another version moves every one of them."""
    return tuple(
        tuple(-1.0 - number("canary", version, p, t) % 1000 / 1000 for t in range(len(probe.completion_ids)))
        for p, probe in enumerate(probes)
    )


# ------------------------------------------------------------------------------------------------------------ serve


class Choice:
    """The tokens still to come, the ones that came, and how it ended."""

    def __init__(self, ids: list[int], *, stop: tuple[str, ...]) -> None:
        self.left = ids
        self.stop = stop
        self.ids: list[int] = []
        self.text = ""
        self.finish_reason: protocol.FinishReason | None = None

    @property
    def runs(self) -> bool:
        return self.finish_reason is None

    def step(self) -> str:
        """Take one token; its text."""
        token = self.left.pop(0)
        self.ids.append(token)
        if token == EOS_ID:
            self.finish_reason = "stop"
            return ""
        new: str = (" " if self.text else "") + WORDS[token - FIRST_WORD_ID]
        if any(stop in self.text + new for stop in self.stop):
            self.finish_reason = "stop"
            new = ""
        elif not self.left:
            self.finish_reason = "length"
        self.text += new
        return new


class Request:
    def __init__(self, message: protocol.Generate, prompt_ids: tuple[int, ...], seed: int, room: int) -> None:
        self.message = message
        self.prompt_ids = prompt_ids
        self.seed = seed
        self.room = room
        self.context: int | None = None
        self.choices: list[Choice] = []
        self.arrived_at = time.monotonic()
        self.begun_at = self.arrived_at

    @property
    def is_late(self) -> bool:
        patience_s = self.message.queue_timeout_s
        return self.context is None and patience_s is not None and time.monotonic() - self.arrived_at >= patience_s

    def begin(self, context: int, version: int) -> None:
        self.context = context
        self.begun_at = time.monotonic()
        for index in range(self.message.n):
            draw = number(self.prompt_ids, version, self.seed, index)
            ids = [FIRST_WORD_ID + number(draw, i) % len(WORDS) for i in range(6 + draw % 12)] + [EOS_ID]
            if os.environ.get("EDGED_LIGHT_STAMMERS") == str(version):
                ids = [ids[0]] * 20
            self.choices.append(Choice(ids[: self.room], stop=self.message.sampling.stop))


class Serve:
    def __init__(self, link: Link, start: protocol.StartServe) -> None:
        began = time.monotonic()
        with open_model(start.model_path) as file:
            if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
                raise EngineFault("model_unreadable", f"{start.model_path}: not a GGUF file; check model.path")
        reach("serve:start")
        if start.adapter.folder is not None and (problem := adapter_problem(Path(start.adapter.folder))):
            raise EngineFault("adapter_unreadable", f"version {start.adapter.version}: {problem}")
        if os.environ.get("EDGED_LIGHT_REFUSES") == str(start.adapter.version):
            raise EngineFault("not_finite", f"version {start.adapter.version} gives NaN; start with another version")
        self.link = link
        self.start = start
        self.swap = Swap(start.adapter.version)
        self.requests: dict[str, Request] = {}
        self.jobs: dict[str, protocol.Stage] = {}
        self.probes = tuple(
            protocol.ProbeTokens(prompt_ids=tuple(p.user.encode()), completion_ids=tuple(p.assistant.encode()))
            for p in start.probes
        )
        facts = protocol.ModelFacts(
            architecture="light",
            n_layers=1,
            n_embd=1,
            n_vocab=FIRST_WORD_ID + len(WORDS),
            n_ctx_train_tokens=CONTEXT_TOKENS_MAX,
            eos_ids=(EOS_ID,),
            chat_template=True,
        )
        link.send(protocol.Ready(load_s=time.monotonic() - began, model=facts, probes=self.probes))

    def turn(self) -> None:
        stop_at: float | None = None
        while stop_at is None or self.requests:
            message = self.link.receive(0 if self.requests else self.link.until_next_beat_s())
            match message:
                case protocol.Generate():
                    self.generate(message)
                case protocol.Cancel():
                    self.cancel(message.request_id)
                case protocol.Tokenise():
                    self.tokenise(message)
                case protocol.Stage():
                    self.jobs[message.job_id] = message
                    self.perform(self.swap.stage(message.job_id, message.adapter.version))
                case protocol.Route():
                    self.route(message)
                case protocol.Stop():
                    stop_at = time.monotonic() + message.within_s / 2
            if stop_at is not None and time.monotonic() >= stop_at:
                for request_id in list(self.requests):
                    self.cancel(request_id)
            self.step()
            self.link.beat("answering" if self.requests else "")

    def generate(self, message: protocol.Generate) -> None:
        limit = min(self.start.context_tokens, CONTEXT_TOKENS_MAX)
        try:
            prompt = prompt_text(message)
            prompt_ids = tuple(prompt.encode())
            if len(prompt_ids) >= limit:
                raise EngineFault(
                    "context_length_exceeded", f"the prompt has {len(prompt_ids)} tokens, the context holds {limit}"
                )
        except EngineFault as refused:
            failed = protocol.RequestFailed(request_id=message.request_id, code=refused.code, message=refused.message)
            self.link.send(failed)
            return
        context = None if message.version is None else self.swap.begin_on(message.version)
        if message.version is not None and context is None:
            text = f"version {message.version} is in no context; stage it first"
            self.link.send(protocol.RequestFailed(request_id=message.request_id, code="not_resident", message=text))
            return
        asked = message.sampling.max_tokens or limit
        seed = message.sampling.seed if message.sampling.seed is not None else number(message.request_id) % 2**31
        request = Request(message, prompt_ids, seed, min(asked, limit - len(prompt_ids)))
        self.requests[message.request_id] = request
        if context is not None:
            self.begin(request, context)

    def tokenise(self, message: protocol.Tokenise) -> None:
        try:
            prompt_ids = tuple(chat_text(message.messages).encode()) if message.messages is not None else ()
            completion_ids = (*message.answer.encode(), EOS_ID)
            if max(len(prompt_ids), message.prompt_tokens) + len(completion_ids) > self.start.context_tokens:
                raise EngineFault("context_length_exceeded", "prompt and answer do not fit into the context")
        except EngineFault as refused:
            failed = protocol.RequestFailed(request_id=message.request_id, code=refused.code, message=refused.message)
            self.link.send(failed)
            return
        self.link.send(
            protocol.Tokenised(request_id=message.request_id, prompt_ids=prompt_ids, completion_ids=completion_ids)
        )

    def step(self) -> None:
        """Admit what fits into the slots, then one token of every choice that runs."""
        for request in list(self.requests.values()):
            if request.is_late:
                del self.requests[request.message.request_id]
                text = "no slot was free in time for it"
                late = protocol.RequestFailed(request_id=request.message.request_id, code="queue_timeout", message=text)
                self.link.send(late)
                continue
            running = sum(1 for r in self.requests.values() if r.context is not None)
            if request.context is None and running < self.start.slots:
                self.begin(request, self.swap.begin())
        if self.requests and (pause_s := seconds("EDGED_LIGHT_TOKEN_S")):
            time.sleep(pause_s)
        hold = os.environ.get("EDGED_LIGHT_HOLD")
        holds = bool(hold and Path(hold).exists())
        if holds:
            time.sleep(0.005)
        for request in list(self.requests.values()):
            if holds and b"hold" in bytes(request.prompt_ids):
                continue
            for index, choice in enumerate(request.choices):
                if choice.runs:
                    self.token(request, index)
            self.close_if_done(request)
        if self.requests:
            reach("serve:token")

    def token(self, request: Request, index: int) -> None:
        choice = request.choices[index]
        if text := choice.step():
            self.link.send(protocol.Chunk(request_id=request.message.request_id, choice=index, text=text))
        if not choice.runs:
            self.choice_done(request, index)

    def begin(self, request: Request, context: int) -> None:
        version = self.swap.version(context)
        request.begin(context, version)
        self.link.send(
            protocol.Begun(request_id=request.message.request_id, version=version, prompt_ids=request.prompt_ids)
        )

    def cancel(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is None:
            return
        if request.context is None:
            self.begin(request, self.swap.begin())
        for index, choice in enumerate(request.choices):
            if choice.finish_reason is None:
                choice.finish_reason = "cancelled"
                self.choice_done(request, index)
        self.close_if_done(request)

    def choice_done(self, request: Request, index: int) -> None:
        choice = request.choices[index]
        assert choice.finish_reason is not None
        logprobs = tuple(-0.5 - number(token, i) % 100 / 50 for i, token in enumerate(choice.ids))
        self.link.send(
            protocol.ChoiceDone(
                request_id=request.message.request_id,
                choice=index,
                finish_reason=choice.finish_reason,
                completion_ids=tuple(choice.ids),
                logprobs=logprobs,
                raw_logprobs=logprobs,
                text=choice.text,
                seed=request.seed,
            )
        )

    def close_if_done(self, request: Request) -> None:
        if request.context is None or any(choice.runs for choice in request.choices):
            return
        del self.requests[request.message.request_id]
        self.link.send(
            protocol.RequestDone(
                request_id=request.message.request_id,
                prompt_tokens=len(request.prompt_ids),
                cached_tokens=0,
                completion_tokens=sum(len(choice.ids) for choice in request.choices),
                queue_s=request.begun_at - request.arrived_at,
                prefill_s=0.0,
                decode_s=time.monotonic() - request.begun_at,
            )
        )
        self.perform(self.swap.end(request.context))

    def route(self, message: protocol.Route) -> None:
        if self.swap.route(message.version):
            self.link.send(protocol.Routed(job_id=message.job_id, version=message.version, swap_ms=0.0))
            self.perform(self.swap.after_route())
        else:
            text = f"version {message.version} is not ready to be routed; stage it"
            self.link.send(protocol.RouteFailed(job_id=message.job_id, version=message.version, message=text))

    def perform(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            match action:
                case Place(_, version, job_id):
                    self.stage(self.jobs.pop(job_id), version)
                case Decline(job_id, version):
                    self.fail(self.jobs.pop(job_id), version, "engine_error", "too many adapters wait to be staged")
                case Restore() | Free():
                    pass

    def stage(self, stage: protocol.Stage, version: int) -> None:
        reach("stage:begin")
        if stage.adapter.folder is not None and (problem := adapter_problem(Path(stage.adapter.folder))):
            self.fail(stage, version, "adapter_unreadable", problem)
            self.perform(self.swap.failed(stage.job_id))
            return
        fluency, texts = [], []
        for index, prompt in enumerate(stage.fluency_prompts):
            ids = [
                FIRST_WORD_ID + number("fluency", version, stage.seed, index, i) % len(WORDS)
                for i in range(stage.fluency_tokens)
            ]
            fluency.append(protocol.ProbeTokens(prompt_ids=tuple(prompt.encode()), completion_ids=tuple(ids)))
            texts.append(" ".join(WORDS[token - FIRST_WORD_ID] for token in ids))
        self.link.send(
            protocol.Staged(
                job_id=stage.job_id,
                version=version,
                canary=canary(version, self.probes),
                live_canary=canary(self.swap.live_version, self.probes),
                fluency=tuple(fluency),
                fluency_texts=tuple(texts),
                fluency_logprobs=tuple((-1.0,) * len(answer.completion_ids) for answer in fluency),
                load_ms=0.0,
                prove_ms=0.0,
                longest_gap_ms=0.0,
            )
        )
        self.perform(self.swap.proved(stage.job_id))

    def fail(self, stage: protocol.Stage, version: int, code: str, message: str) -> None:
        self.link.send(protocol.StageFailed(job_id=stage.job_id, version=version, code=code, message=message))


def open_model(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise EngineFault("model_unreadable", f"{path}: {error.strerror}; check model.path") from error


def prompt_text(message: protocol.Generate) -> str:
    if message.prompt is not None:
        if not message.prompt:
            raise EngineFault("bad_prompt", "prompt: it has no tokens; the model needs at least one")
        return message.prompt
    return chat_text(message.messages or ())


def chat_text(messages: tuple[protocol.ChatMessage, ...]) -> str:
    if not messages:
        raise EngineFault("bad_template", "messages: at least one message is needed")
    return "".join(f"<{m.role}>{m.content}\n" for m in messages) + "<assistant>"


def adapter_problem(folder: Path) -> str | None:
    """What is wrong with an adapter folder: a file that is not what the manifest says."""
    try:
        files = json.loads((folder / "manifest.json").read_text())["files"]
        hashes = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files}
        wrong = [name for name, entry in files.items() if hashes[name] != entry["sha256"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{folder}: {error}"
    return f"{folder}: {wrong[0]} is not what was published" if wrong else None


# ------------------------------------------------------------------------------------------------------------ train


class Train:
    def __init__(self, link: Link, start: protocol.StartTrain) -> None:
        began = time.monotonic()
        open_model(start.model_path).close()
        reach("train:start")
        self.link = link
        self.start = start
        self.waiting: collections.deque[protocol.Message] = collections.deque()  # what came while it trained
        link.send(protocol.Ready(load_s=time.monotonic() - began))

    def turn(self) -> None:
        while True:
            match self.waiting.popleft() if self.waiting else self.link.receive(self.link.until_next_beat_s()):
                case protocol.Score() as score:
                    scores = tuple(self.score(episode) for episode in score.episodes)
                    self.link.send(protocol.Scored(job_id=score.job_id, scores=scores))
                case protocol.Train() as train:
                    self.train(train)
                case protocol.Stop():
                    return
            self.link.beat()

    def score(self, episode: protocol.EpisodeTokens) -> protocol.EpisodeScore:
        return protocol.EpisodeScore(
            episode_id=episode.episode_id,
            n_tokens=len(episode.completion_ids),
            reference_logprob=-2.5 if any(token != EOS_ID for token in episode.completion_ids) else None,
            kl=0.01,
            engine_gap=0.0,
            engine_bias=0.0,
        )

    def train(self, message: protocol.Train) -> None:
        folder = Path(message.folder)
        job = protocol.from_map(protocol.TrainJob, msgpack.unpackb((folder / protocol.JOB_FILE).read_bytes()))
        if not (job.episodes or job.pairs or job.corrections):
            text = f"{folder}: no episode to learn from"
            self.link.send(protocol.TrainFailed(job_id=job.job_id, code="batch_empty", message=text))
            return
        reach("train:begin")
        for step in self.steps():
            self.link.send(protocol.Progress(job_id=job.job_id, stage="update", done=step, total=10))
        full = os.environ.get("EDGED_LIGHT_DISK_FULL")
        if full and Path(full).exists():
            text = f"{folder}: the result cannot be written; is the disk full?"
            self.link.send(protocol.TrainFailed(job_id=job.job_id, code="engine_error", message=text))
            return
        if not (folder / protocol.OUT_FOLDER).exists():
            self.write(job, folder)
        plain = msgpack.unpackb((folder / protocol.OUT_FOLDER / protocol.RESULT_FILE).read_bytes())
        self.link.send(protocol.Trained(job_id=job.job_id, result=protocol.from_map(protocol.TrainResult, plain)))

    def steps(self) -> Iterator[int]:
        """Ten steps that take EDGED_LIGHT_TRAIN_S together, beating. Raises Stopped."""
        for step in range(1, 11):
            time.sleep(seconds("EDGED_LIGHT_TRAIN_S") / 10)
            self.link.beat("training")
            match self.link.receive(0):
                case protocol.Stop():
                    raise Stopped
                case protocol.Message() as message:
                    self.waiting.append(message)
            if step == 5:
                reach("train:mid")
            yield step

    def write(self, job: protocol.TrainJob, folder: Path) -> None:
        # Imported here: a light worker that serves starts in a fifth of a second without numpy.
        import numpy as np

        from adapters.folder import write_adapter_folder
        from adapters.llamacpp_format import read_base_shape
        from adapters.store import publish_folder
        from adapters.weights import AdapterWeights

        out = folder / f"{protocol.OUT_FOLDER}.tmp"
        shutil.rmtree(out, ignore_errors=True)
        (out / "checkpoint").mkdir(parents=True)
        shape = read_base_shape(Path(self.start.model_path))
        module = shape.top_modules(1)[0]
        n_out, n_in = shape.module_shape(module)
        rng = np.random.default_rng(number(job.version, job.seed))
        a = rng.standard_normal((job.lora.rank, n_in), dtype=np.float32) * np.float32(0.01)
        b = rng.standard_normal((n_out, job.lora.rank), dtype=np.float32) * np.float32(0.01)
        write_adapter_folder(
            out / "adapter",
            AdapterWeights(base=shape, rank=job.lora.rank, alpha=job.lora.alpha, matrices={module: (a, b)}),
            version=job.version,
            parent=job.parent.version,
            base_sha256=job.base_sha256,
            base_model_name="light",
            origin="trained",
            created_at=0.0,
        )
        (out / "checkpoint" / "state").write_bytes(b"light")
        result = protocol.TrainResult(
            job_id=job.job_id,
            version=job.version,
            metrics={"policy/approx_kl": 0.01, "kl/live": 0.01, "kl/reference": 0.02, "reward/mean": 0.0},
            seconds={"update": seconds("EDGED_LIGHT_TRAIN_S")},
            dropped={},
            canary=canary(job.version, job.probes),
            parent_canary=canary(job.parent.version, job.probes),
        )
        (out / protocol.RESULT_FILE).write_bytes(msgpack.packb(protocol.to_map(result)))
        reach("train:before_rename")
        publish_folder(out, folder / protocol.OUT_FOLDER)
        reach("train:after_rename")


# ------------------------------------------------------------------------------------------------------- the process


def main(role: str) -> int:
    if role == "score":
        os.execv(sys.executable, [sys.executable, "-P", "-m", "engine.worker", role])
    logs.configure_from_environment()
    log.info("a light %s worker starts", role)
    if not tie_to_daemon():
        return protocol.EXIT_LINK_LOST
    name, epoch = os.environ[protocol.ENV_NAME], int(os.environ[protocol.ENV_EPOCH])
    link = Link(os.environ[protocol.ENV_ENDPOINT], name, epoch)
    try:
        link.send(protocol.Hello(role=role, name=name, pid=os.getpid()))
        match link.receive(60.0):
            case protocol.StartServe() as start:
                Serve(link, start).turn()
            case protocol.StartTrain() as start:
                Train(link, start).turn()
    except Stopped:
        return 0
    except EngineFault as fault:
        link.send(protocol.Fault(code=fault.code, message=fault.message))
        return protocol.EXIT_FAULT
    except LinkLost:
        return protocol.EXIT_LINK_LOST
    finally:
        link.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
