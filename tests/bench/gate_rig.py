"""What judges and trains candidates for `gate.py`: the daemon's own workers, prover and deep prover, without its store.

The base is live and stays so; a candidate stands staged beside it, and both are asked through `Generate.version`, as
the deep gate asks a version that is live and its parent. What the base answered once is not asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack

from edged import resolved
from edged.base_model import BaseModel
from edged.demo.prompts import HELD_OUT
from edged.failure import JobRefused, WorkerBusy
from edged.learn import deep_gate, gate
from edged.learn.deep_proving import DeepProver
from edged.learn.proving import Prover
from edged.learn.trainer import Trainer
from edged.records import Episode, PracticePrompt
from edged.serve.sampling import Interrupted, Sampler
from edged.serve.staging import Staging
from edged.serve.tokenising import Tokeniser
from edged.serve.translation import Serving
from edged.settings import Settings
from edged.system.workers import Role, Workers
from engine import protocol

START_S = 300.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An adapter to judge. result: what the trainer said of it; None for one that comes from elsewhere."""

    ref: protocol.AdapterRef
    result: protocol.TrainResult | None


class Lineage:
    """Versions by number, with what was measured of them."""

    def __init__(self) -> None:
        self._metrics: dict[int, dict[str, float]] = {}

    def expect(self, if_live: int | None) -> None:
        assert if_live == 0

    async def get(self, version: int) -> Any:
        return types.SimpleNamespace(metrics=self._metrics.get(version, {}))

    async def set_metrics(self, version: int, metrics: dict[str, float]) -> None:
        self._metrics.setdefault(version, {}).update(metrics)


class Questions:
    """The held-out questions of the demo, in the place of users' prompts."""

    async def prompts(self, limit: int, base_sha256: str, *, tokens_max: int) -> list[PracticePrompt]:
        return [asked(text) for text in HELD_OUT[:limit]]


class NoCorrections:
    async def unused_written(self, limit: int, base_sha256: str) -> list[Any]:
        return []

    async def used_written(self, limit: int, base_sha256: str) -> list[Any]:
        return []

    async def tokens(self, ids: Any) -> list[Any]:
        return []


class RememberingSampler:
    """Asks the base once for each prompt."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._known: dict[str, list[Episode]] = {}

    async def sample(self, prompt: PracticePrompt, *, version: int | None = None, **how: Any) -> list[Episode]:
        if version != 0:
            return await self._sampler.sample(prompt, version=version, **how)
        key = repr((prompt, how))
        if key not in self._known:
            self._known[key] = await self._sampler.sample(prompt, version=0, **how)
        return self._known[key]


def asked(text: str) -> PracticePrompt:
    """A question of a user."""
    return PracticePrompt(prompt_of=None, messages=[{"role": "user", "content": text}], prompt=None)


class Rig:
    """The workers, and both gates on them. Use `open_rig`."""

    def __init__(self, settings: Settings, model: BaseModel, folder: Path, cache: Path, workers: Workers) -> None:
        self.settings, self.model, self.folder = settings, model, folder
        self.learning = resolved.learning(settings, model.shape)
        self.probes: tuple[protocol.ProbeTokens, ...] = ()
        self.answers: dict[int, list[Episode]] = {}  # of the base, by seed
        self._eos_ids: frozenset[int] = frozenset()
        self._served = asyncio.Event()
        limits = resolved.worker_limits(START_S, START_S)
        self.serve = workers.add(
            Role(
                name="serve",
                role="serve",
                limits=limits,
                start=lambda: _told(resolved.start_serve(settings, model, protocol.BASE)),
                on_ready=self._ready,
                on_message=self._said,
                on_down=self._down,
                on_fault=self._fault,
            )
        )
        self._train = workers.add(
            Role(
                name="train",
                role="train",
                limits=limits,
                start=lambda: _told(resolved.start_train(settings, model, str(cache))),
                on_ready=lambda ready: self.trainer.ready(),
                on_message=self._train_said,
                on_down=lambda why: self.trainer.down(),
                on_fault=lambda fault: self.trainer.fault(fault),
            )
        )
        self.trainer = Trainer(self._train, start_timeout_s=START_S, on_progress=lambda progress: None)
        self.staging = Staging(self.serve)
        self.tokeniser = Tokeniser(self.serve)
        serving = Serving(model=model.name, base_sha256=model.sha256, wait_s=START_S)
        self.sampler = Sampler(serving, self.serve, "bench")
        self._prover = Prover(
            self.staging,
            self.trainer,
            Lineage(),  # type: ignore[arg-type]
            lambda: resolved.proving(settings),
            lambda: self._eos_ids,
            model.shape,
            model.sha256,
        )
        self._deep = DeepProver(
            settings=lambda: resolved.deep_gate(settings),
            sampler=RememberingSampler(self.sampler),
            interrupted=Interrupted,
            stage=self.staging,
            candidates=asyncio.Lock(),
            trainer=self.trainer,
            judge=None,
            held_out=Questions(),
            written=NoCorrections(),
            eos_ids=lambda: self._eos_ids,
            base_sha256=model.sha256,
            free=_at_once,
        )

    async def ready(self) -> None:
        """Returns once both workers are."""
        self.serve.want()
        async with asyncio.timeout(START_S):
            await self._served.wait()
            await self.trainer.start()

    async def train(self, job: protocol.TrainJob) -> tuple[Path, protocol.TrainResult]:
        """The adapter's folder, and what the trainer says of it."""
        folder = self.folder / job.job_id
        folder.mkdir()
        (folder / protocol.JOB_FILE).write_bytes(msgpack.packb(protocol.to_map(job)))
        result = await self.trainer.train(job.job_id, folder)
        return folder / protocol.OUT_FOLDER / "adapter", result

    async def prove(self, candidate: Candidate) -> gate.Judgement:
        """The fast gate's judgement."""
        while True:
            try:
                return await self._prover.prove(candidate.ref, protocol.BASE, candidate.result)
            except WorkerBusy:  # it takes longer on a busy machine: asking again joins what was asked
                continue
            except JobRefused as refused:
                return gate.Judgement(accepted=False, reason=f"a worker refused it: {refused}", metrics={})

    async def look_at(self, candidate: Candidate) -> deep_gate.Judgement:
        """The deep gate's judgement; of one that cannot be loaded, that it is refused."""
        try:
            return await self._deep.examine(candidate.ref, protocol.BASE)
        except JobRefused as refused:
            return deep_gate.Judgement(verdict="refused", reason=f"a worker refused it: {refused}", metrics={})

    def _ready(self, ready: protocol.Ready) -> None:
        assert ready.model is not None
        self.probes, self._eos_ids = ready.probes, frozenset(ready.model.eos_ids)
        self._served.set()

    def _said(self, message: protocol.Message) -> None:
        for part in (self.tokeniser, self.sampler, self.staging):
            if part.received(message):
                return

    def _train_said(self, message: protocol.Message) -> None:
        self.trainer.received(message)

    def _down(self, why: str) -> None:
        for part in (self.tokeniser, self.sampler, self.staging):
            part.down()

    def _fault(self, fault: protocol.Fault) -> None:
        raise RuntimeError(f"the model cannot be served: {fault.message}")


async def _told(message: protocol.Message) -> protocol.Message:
    return message


async def _at_once() -> None:
    """Nobody else needs the box."""


@contextlib.asynccontextmanager
async def open_rig(settings: Settings, model: BaseModel, folder: Path, cache: Path) -> AsyncIterator[Rig]:
    """A rig whose workers run; they end with the block."""
    workers = Workers(folder, environment=lambda: {"EDGED_LOG_LEVEL": "ERROR"})
    workers.open()
    try:
        rig = Rig(settings, model, folder, cache, workers)
        await rig.ready()
        yield rig
    finally:
        await workers.close()
