"""Adapters on a server: loaded under names that are never used again, proved there, routed, and unloaded after drain.

`engine.generate.swap` decides, as it does for an engine in this process: a context is here nothing but a version and
the name that requests to it carry. A proof blocks on the server, so a thread does it, one at a time, and puts its
outcome into a mailbox; requests go on meanwhile, beside it in the server's own batches.

An adapter's files are laid out for the server under the adapter's name, by hard links: a candidate's folder is renamed
when it is published, and a server that has evicted an adapter from its memory reads the files again.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import queue
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from adapters.errors import AdapterError, MismatchedAdapter, NotFiniteAdapter, UnsupportedAdapter
from adapters.hf_base import read_folder_shape
from adapters.manifest import MANIFEST_FILE, parse_manifest, verify
from adapters.peft import CONFIG_FILE, WEIGHTS_FILE, load_peft
from engine.generate.answer import Choice
from engine.generate.backend import AdapterRefused, Vocabulary
from engine.generate.prompt import Prompts
from engine.generate.prove import FLUENCY_TEMPERATURE, Canary
from engine.generate.remote.mailbox import Mailbox
from engine.generate.remote.meaning import Meaning
from engine.generate.remote.server import ADAPTER_PREFIX, Asked, Drawn, Server
from engine.generate.remote.transport import ServerGone, ServerRefused, Transport
from engine.generate.sampling import Sampled
from engine.generate.staging import BASELINE
from engine.generate.swap import Action, Decline, Free, Place, Restore, Swap
from engine.generate.template import BadTemplate
from engine.protocol import (
    AdapterRef,
    Message,
    ProbeTokens,
    Route,
    Routed,
    RouteFailed,
    Sampling,
    Stage,
    Staged,
    StageFailed,
)

log = logging.getLogger(__name__)

AT_ONCE = 8  # answers to fluency prompts that the server is asked for together, beside users' requests


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """Of a stage job. name: of the adapter on the server, where it was loaded."""

    job_id: str
    staged: Staged | StageFailed
    name: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Proof:
    stage: Stage
    known: str | None  # the name of the version, if the server has it under one
    is_known: bool
    live: int
    live_name: str | None
    live_canary: Canary | None


class Shelf:
    """The folder in which adapters lie for the server.

    folder: as this process sees it. seen_at: as the server does.
    """

    def __init__(self, folder: Path, seen_at: str) -> None:
        self._folder = folder
        self._seen_at = seen_at

    def lay_out(self, source: Path, name: str) -> str:
        """The PEFT files of an adapter folder under `name`; where the server finds them. Raises OSError."""
        target = self._folder / name
        if not target.is_dir():
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary = self._folder / f".{name}.{secrets.token_hex(4)}"
            temporary.mkdir()
            for file in (CONFIG_FILE, WEIGHTS_FILE):
                try:
                    os.link(source / file, temporary / file)
                except OSError:  # another file system, or one without links
                    shutil.copyfile(source / file, temporary / file)
            temporary.rename(target)
        return f"{self._seen_at.rstrip('/')}/{name}"

    def holds(self, path: str) -> bool:
        """Whether a path, as the server sees it, is one of this shelf."""
        return path.startswith(self._seen_at.rstrip("/") + "/")

    def remove(self, name: str) -> None:
        """The server needs it no more."""
        shutil.rmtree(self._folder / name, ignore_errors=True)


def adapter_name(version: int, adapter_sha256: str) -> str:
    """What an adapter is called on a server: another one for every content, so that no cache of the server's can take
    one for another."""
    return f"{ADAPTER_PREFIX}{version}-{adapter_sha256[:8]}"


class Adapters:
    """Loads adapters onto a server, and scores and samples with them. Blocking; one thread at a time."""

    def __init__(
        self,
        server: Server,
        transport: Transport,
        meaning: Meaning,
        shelf: Shelf,
        vocabulary: Vocabulary,
        prompts: Prompts,
        model_folder: Path,
    ) -> None:
        self._server = server
        self._transport = transport
        self._meaning = meaning
        self._shelf = shelf
        self._vocabulary = vocabulary
        self._prompts = prompts
        self._shape = read_folder_shape(model_folder)

    def load(self, ref: AdapterRef) -> str | None:
        """Check an adapter's files and load it; its name, None for the base.

        Raises:
            AdapterRefused: adapter_unreadable, adapter_mismatch, not_finite. ServerGone.
        """
        if ref.folder is None:
            return None
        folder = Path(ref.folder)
        try:
            verify(folder)
            load_peft(folder, self._shape).check_finite()
            sha256 = parse_manifest((folder / MANIFEST_FILE).read_bytes()).adapter_sha256
        except NotFiniteAdapter as error:
            raise AdapterRefused("not_finite", str(error)) from error
        except (MismatchedAdapter, UnsupportedAdapter) as error:
            raise AdapterRefused(error.code, str(error)) from error
        except (AdapterError, OSError) as error:
            raise AdapterRefused("adapter_unreadable", str(error)) from error
        name = adapter_name(ref.version, sha256)
        try:
            self._server.load(name, self._shelf.lay_out(folder, name))
        except ServerRefused as error:
            self._shelf.remove(name)
            raise AdapterRefused("adapter_mismatch", f"{self._server.name} does not load {name}: {error}") from error
        except OSError as error:
            raise AdapterRefused("adapter_unreadable", f"{name} cannot be laid out: {error}") from error
        return name

    def unload(self, name: str) -> None:
        """Take an adapter off the server; one that will not go costs its memory, and nothing else."""
        try:
            self._server.unload(name)
        except (ServerGone, ServerRefused) as error:
            log.warning("%s does not unload %s: %s", self._server.name, name, error)
        self._shelf.remove(name)

    def unload_others(self, kept: str | None) -> None:
        """Take off what a worker before this one has left: adapters whose files lie on this shelf."""
        for name, path in self._server.loaded().items():
            if name != kept and name.startswith(ADAPTER_PREFIX) and self._shelf.holds(path):
                self.unload(name)

    def canary(self, probes: Sequence[ProbeTokens], name: str | None) -> Canary:
        """Per probe, the raw log-probability of each completion token. Raises ServerGone, ServerRefused, ValueError."""
        canary = []
        for probe in probes:
            told = self._server.score(probe.prompt_ids + probe.completion_ids, name)[len(probe.prompt_ids) :]
            row = tuple(math.nan if logprob is None else logprob for logprob in told)
            if not all(map(math.isfinite, row)):
                raise AdapterRefused("not_finite", f"{name or 'the base'} gives log-probabilities that are no numbers")
            canary.append(row)
        return tuple(canary)

    def answer(self, stage: Stage, name: str | None) -> tuple[list[ProbeTokens], list[Choice]]:
        """One sampled answer to each fluency prompt. Raises ServerGone, ServerRefused, BadTemplate."""
        prompts = [self._prompts.user(text) for text in stage.fluency_prompts] if stage.fluency_tokens > 0 else []
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="probe") as pool:
            choices = list(pool.map(lambda one: self._sample(one[1], stage, one[0], name), enumerate(prompts)))
        answers = [
            ProbeTokens(prompt_ids=prompt, completion_ids=tuple(choice.completion_ids))
            for prompt, choice in zip(prompts, choices, strict=True)
        ]
        return answers, choices

    def _sample(self, prompt_ids: tuple[int, ...], stage: Stage, index: int, name: str | None) -> Choice:
        sampling = Sampling(temperature=FLUENCY_TEMPERATURE, max_tokens=stage.fluency_tokens)
        choice = Choice(sampling, seed=stage.seed, index=index, room=stage.fluency_tokens)
        asked = Asked(
            prompt_ids=prompt_ids,
            adapter=name,
            sampling=sampling,
            seed=stage.seed + index,
            max_tokens=stage.fluency_tokens,
            top=0,
            end_ids=tuple(sorted(self._vocabulary.eos_ids)),
        )
        stream = self._transport.stream()
        for item in self._server.draw(stream, asked):
            if isinstance(item, Drawn) and choice.finish_reason is None:
                sampled = Sampled(item.id, *self._meaning.split(item.told, sampling), told=item.told)
                choice.take(sampled, self._vocabulary.piece, is_eos=item.id in self._vocabulary.eos_ids)
        if choice.finish_reason is None:
            choice.end("stop")
        return choice


class Staging:
    """Stages and routes versions. `send` takes the answers."""

    def __init__(
        self,
        adapters: Adapters,
        swap: Swap,
        probes: tuple[ProbeTokens, ...],
        mailbox: Mailbox[Outcome],
        *,
        name: str | None,
        send: Callable[[Message], None],
    ) -> None:
        """name: of the version that `swap` holds, which is loaded already."""
        self._adapters = adapters
        self._swap = swap
        self._probes = probes
        self._mailbox = mailbox
        self._send = send
        self._names: dict[int, str | None] = {swap.live_version: name}
        self._canaries: dict[int, Canary] = {}
        self._jobs: dict[str, Stage] = {}
        self._running: str | None = None
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work_on, name="staging", daemon=True).start()

    @property
    def has_work(self) -> bool:
        return self._running is not None

    def name_of(self, version: int) -> str | None:
        """What requests to a version in a context call it."""
        return self._names[version]

    def prove_baseline(self) -> None:
        """Score the probes under the version that is live."""
        ref = AdapterRef(version=self._swap.live_version, folder=None)  # it is loaded, so the folder is not looked at
        self._begin(Stage(job_id=BASELINE, adapter=ref, fluency_prompts=(), fluency_tokens=0, seed=0))

    def stage(self, message: Stage) -> None:
        if message.job_id in self._jobs:
            log.error("stage job %s is under way already; the second one is ignored", message.job_id)
            return
        self._begin(message)

    def route(self, message: Route) -> None:
        """Send new requests to a version; those that run keep theirs."""
        began, before = time.perf_counter(), self._swap.live_version
        if not self._swap.route(message.version):
            held = ", ".join(f"{self._swap.version(c)} ({self._swap.role(c)})" for c in (0, 1))
            why = f"version {message.version} is not ready to be routed, the contexts hold {held}; stage it"
            self._send(RouteFailed(job_id=message.job_id, version=message.version, message=why))
            return
        if before != message.version:
            log.info("live version %d -> %d", before, message.version)
        swap_ms = (time.perf_counter() - began) * 1000
        self._send(Routed(job_id=message.job_id, version=message.version, swap_ms=swap_ms))
        self.perform(self._swap.after_route())

    def perform(self, actions: Sequence[Action]) -> None:
        """Carry out what `swap` decided, in order."""
        for action in actions:
            match action:
                case Place(_, version, job_id):
                    self._running = job_id
                    self._prove(self._jobs[job_id], version)
                case Restore():
                    pass  # the version that stands there again was never unloaded
                case Free(version):
                    self._free(version)
                case Decline(job_id, version):
                    del self._jobs[job_id]
                    self._report(
                        StageFailed(
                            job_id=job_id,
                            version=version,
                            code="engine_error",
                            message="too many adapters wait to be staged; try again later",
                        )
                    )

    def take(self, outcome: Outcome) -> None:
        """A proof is over."""
        self._running = None
        stage = self._jobs.pop(outcome.job_id)
        version = stage.adapter.version
        if outcome.name is not None or stage.adapter.folder is None:
            self._names.setdefault(version, outcome.name)
        if isinstance(outcome.staged, Staged):
            self._canaries[version] = outcome.staged.canary
            self._report(outcome.staged)
            self.perform(self._swap.proved(outcome.job_id))
        else:
            self._report(outcome.staged)
            self.perform(self._swap.failed(outcome.job_id))

    def _begin(self, message: Stage) -> None:
        self._jobs[message.job_id] = message
        self.perform(self._swap.stage(message.job_id, message.adapter.version))

    def _prove(self, stage: Stage, version: int) -> None:
        live = self._swap.live_version
        proof = _Proof(
            stage, self._names.get(version), version in self._names, live, self._names[live], self._canaries.get(live)
        )
        self._work.put(lambda: self._mailbox.put(self._proved(proof)))

    def _free(self, version: int) -> None:
        self._canaries.pop(version, None)
        name = self._names.pop(version, None)
        if name is not None:
            self._work.put(lambda: self._adapters.unload(name))

    def _report(self, message: Staged | StageFailed) -> None:
        if isinstance(message, StageFailed):
            log.warning("staging version %d failed: %s: %s", message.version, message.code, message.message)
        if message.job_id != BASELINE:
            self._send(message)

    # ------------------------------------------------------------------------------------------- the staging thread

    def _work_on(self) -> None:
        while True:
            self._work.get()()

    def _proved(self, proof: _Proof) -> Outcome:
        stage, name = proof.stage, proof.known
        version = stage.adapter.version

        def failed(code: str, why: object) -> Outcome:
            message = StageFailed(job_id=stage.job_id, version=version, code=code, message=f"version {version}: {why}")
            return Outcome(stage.job_id, message, name)

        try:
            began = time.perf_counter()
            if not proof.is_known:
                name = self._adapters.load(stage.adapter)
            loaded = time.perf_counter()
            canary = self._adapters.canary(self._probes, name)
            live_canary = proof.live_canary
            if live_canary is None:
                live_canary = canary if version == proof.live else self._adapters.canary(self._probes, proof.live_name)
            answers, choices = self._adapters.answer(stage, name)
        except AdapterRefused as refused:
            return failed(refused.code, refused)
        except (ServerGone, ServerRefused, BadTemplate, ValueError) as error:
            return failed("engine_error", error)
        except Exception as error:  # the thread goes on, and the job has to end
            log.exception("staging version %d", version)
            return failed("engine_error", error)
        staged = Staged(
            job_id=stage.job_id,
            version=version,
            canary=canary,
            live_canary=live_canary,
            fluency=tuple(answers),
            fluency_texts=tuple(choice.text for choice in choices),
            fluency_logprobs=tuple(choice.logprobs for choice in choices),
            load_ms=(loaded - began) * 1000,
            prove_ms=(time.perf_counter() - loaded) * 1000,
            longest_gap_ms=0.0,
        )
        return Outcome(stage.job_id, staged, name)
