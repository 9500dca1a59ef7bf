"""A learning box for tests: the real store, folders, trainer client, prover, updater and learner, on light workers.

The light workers follow the protocol: the train worker starts when it is wanted, writes what a trainer writes (real
adapter files, of a very small base), and dies or refuses when a test says so; the serve worker stages and routes."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import msgpack
import numpy as np
import pytest

from adapters.folder import write_adapter_folder
from adapters.shape import BaseShape
from adapters.weights import AdapterWeights
from edged.learn import gate
from edged.learn.folders import Folders
from edged.learn.job import LearnSettings
from edged.learn.learner import Learner
from edged.learn.plan import Rules
from edged.learn.proving import Prover, ProvingSettings
from edged.learn.trainer import Trainer
from edged.learn.updating import Updater
from edged.records import Caller, Episode, NewFeedback, Update
from edged.store.lineage import Lineage
from edged.store.store import Store
from engine import protocol

GUARD_S = 60.0
BASE_SHA256 = "b" * 64
SHAPE = BaseShape(arch="llama", n_layers=3, n_embd=24, n_heads=4, n_kv_heads=2, head_dim=8, n_ff=40, n_vocab=64)
LORA = protocol.LoraSettings(rank=2, alpha=4.0, layers=1)
OPERATOR = Caller(name="uid:0", scopes=frozenset({"admin"}))
PROBES = (
    protocol.ProbeTokens(prompt_ids=(1, 2), completion_ids=(3, 4)),
    protocol.ProbeTokens(prompt_ids=(1,), completion_ids=(5,)),
)
LIVE_CANARY = ((-1.0, -2.0), (-0.5,))
MOVED_CANARY = ((-0.5, -2.5), (-1.0,))
PPO = protocol.PpoSettings(epochs=2, critic_warmup_steps=3)
Behaviour = Literal["train", "die", "die_when_done", "refuse", "empty", "disk_full", "hang"]


def make_weights(seed: int, *, rank: int = LORA.rank, layers: int = LORA.layers, bad: bool = False) -> AdapterWeights:
    """Small random weights; `bad`: with a NaN in them."""
    rng = np.random.default_rng(seed)
    matrices = {}
    for module in SHAPE.top_modules(layers):
        n_out, n_in = SHAPE.module_shape(module)
        a = 0.1 * rng.standard_normal((rank, n_in), dtype=np.float32)
        b = 0.1 * rng.standard_normal((n_out, rank), dtype=np.float32)
        matrices[module] = (a, b)
    if bad:
        next(iter(matrices.values()))[0][0, 0] = np.nan
    return AdapterWeights(base=SHAPE, rank=rank, alpha=LORA.alpha, matrices=matrices)


def write_adapter(folder: Path, version: int, *, parent: int | None = None, seed: int | None = None) -> None:
    """A complete adapter folder of `version`."""
    write_adapter_folder(
        folder,
        make_weights(version if seed is None else seed),
        version=version,
        parent=parent,
        base_sha256=BASE_SHA256,
        base_model_name="small",
        origin="trained",
        created_at=1.0,
    )


def write_out(folder: Path, job: protocol.TrainJob, metrics: dict[str, float] | None = None) -> protocol.TrainResult:
    """What a trainer leaves in a job folder."""
    half = folder / "out.tmp"
    half.mkdir()
    write_adapter(half / "adapter", job.version, parent=job.parent.version)
    (half / "checkpoint").mkdir()
    (half / "checkpoint" / "critic.safetensors").write_bytes(b"critic of v%d" % job.version)
    result = protocol.TrainResult(
        job_id=job.job_id,
        version=job.version,
        metrics=metrics or {"kl/live": 0.1, "reward/mean": 0.25},
        seconds={"epochs": 1e-6},
        usage={"busy/cores": 0.75},
        dropped={"no_logprobs": 1},
        canary=MOVED_CANARY,
        parent_canary=LIVE_CANARY,
    )
    (half / protocol.RESULT_FILE).write_bytes(msgpack.packb(protocol.to_map(result)))
    half.rename(folder / protocol.OUT_FOLDER)
    return result


class LightTrainWorker:
    """A train worker without a process. `behaviours`: what it does with the next Train messages, then it trains."""

    def __init__(self) -> None:
        self.trainer: Trainer
        self.is_ready = False
        self.wanted = False
        self.starts_total = 0
        self.fault: protocol.Fault | None = None
        self.behaviours: collections.deque[Behaviour] = collections.deque()
        self.trained: list[str] = []
        self.scored: list[protocol.Score] = []
        self.refuse_scores = False
        self.metrics: dict[str, float] | None = None

    def want(self) -> None:
        if not self.wanted:
            self.wanted = True
            self._soon(self._start)

    def unwant(self) -> None:
        self.wanted = False
        self._soon(self.die)

    def kill(self, why: str) -> None:
        self._soon(self.die)

    def die(self) -> None:
        """The process is gone; it is started again if it is wanted."""
        self.is_ready = False
        self.trainer.down()
        if self.wanted:
            self._soon(self._start)

    def send(self, message: protocol.Message) -> None:
        assert self.is_ready
        match message:
            case protocol.Score():
                self.scored.append(message)
                self._soon(self.trainer.received, self._score(message))
            case protocol.Train():
                self._soon(self._train, message)

    def _soon(self, call: Callable[..., Any], *arguments: Any) -> None:
        asyncio.get_running_loop().call_soon(call, *arguments)

    def _start(self) -> None:
        self.starts_total += 1
        if self.fault is not None:
            self.trainer.fault(self.fault)
        elif self.wanted:
            self.is_ready = True
            self.trainer.ready()

    def _score(self, message: protocol.Score) -> protocol.Message:
        if self.refuse_scores:
            return protocol.TrainFailed(job_id=message.job_id, code="engine_error", message="cannot score")
        return protocol.Scored(
            job_id=message.job_id,
            scores=tuple(
                protocol.EpisodeScore(
                    episode_id=episode.episode_id, n_tokens=2, reference_logprob=-1.5, kl=0.25, engine_gap=None
                )
                for episode in message.episodes
            ),
        )

    def _train(self, message: protocol.Train) -> None:
        behaviour = self.behaviours.popleft() if self.behaviours else "train"
        self.trained.append(message.job_id)
        folder = Path(message.folder)
        job = protocol.from_map(protocol.TrainJob, msgpack.unpackb((folder / protocol.JOB_FILE).read_bytes()))
        match behaviour:
            case "train":
                self.trainer.received(protocol.Progress(job_id=job.job_id, stage="epochs", done=1, total=2))
                self.trainer.received(protocol.Trained(job_id=job.job_id, result=write_out(folder, job, self.metrics)))
            case "die":
                self.die()
            case "die_when_done":
                write_out(folder, job, self.metrics)
                self.die()
            case "refuse":
                self.trainer.received(
                    protocol.TrainFailed(job_id=job.job_id, code="not_finite", message="the loss is NaN")
                )
            case "empty":
                self.trainer.received(
                    protocol.TrainFailed(
                        job_id=job.job_id, code="batch_empty", message="nothing left", details={"engine_mismatch": 2}
                    )
                )
            case "disk_full":
                self.trainer.received(
                    protocol.TrainFailed(job_id=job.job_id, code="engine_error", message="is the disk full?")
                )
            case "hang":
                pass


class LightStage:
    """Staging and routing on a serve worker. `failures`: what the next calls to `stage` raise. `is_behind`: new
    requests do not run on what is live yet."""

    def __init__(self, lineage: Lineage) -> None:
        self.lineage = lineage
        self.staged: list[int] = []
        self.live: list[int] = []
        self.failures: collections.deque[Exception] = collections.deque()
        self.is_behind = False
        self.canary = MOVED_CANARY
        self.texts = True

    async def stage(
        self, adapter: protocol.AdapterRef, *, fluency_prompts: tuple[str, ...], fluency_tokens: int, seed: int
    ) -> protocol.Staged:
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.popleft()
        assert adapter.folder is None or (Path(adapter.folder) / "adapter.gguf").is_file()
        self.staged.append(adapter.version)
        ids = (7, 8, 9) if self.texts else ()
        return protocol.Staged(
            job_id=f"stage-{len(self.staged)}",
            version=adapter.version,
            canary=self.canary,
            live_canary=LIVE_CANARY,
            fluency=tuple(protocol.ProbeTokens(prompt_ids=(1,), completion_ids=ids) for _ in fluency_prompts),
            fluency_texts=("some text",) * len(fluency_prompts),
            load_ms=1.0,
            prove_ms=2.0,
            longest_gap_ms=3.0,
        )

    async def go_live(self) -> float | None:
        await asyncio.sleep(0)
        if self.is_behind:
            return None
        self.live.append(self.lineage.live().version)
        return 1.5


@dataclasses.dataclass
class LightCalibration:
    """A calibration that is over before it began."""

    noise: protocol.EngineNoise | None = None
    is_pending: bool = False
    is_over: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    async def over(self) -> None:
        await self.is_over.wait()


class Box:
    """One state folder and everything that learns in it."""

    # What tests need of this module, which they cannot import.
    BASE_SHA256, SHAPE, LORA, OPERATOR, PROBES = BASE_SHA256, SHAPE, LORA, OPERATOR, PROBES
    LIVE_CANARY, MOVED_CANARY, GUARD_S = LIVE_CANARY, MOVED_CANARY, GUARD_S
    make_weights = staticmethod(make_weights)
    write_adapter = staticmethod(write_adapter)
    write_out = staticmethod(write_out)

    def __init__(self, root: Path, store: Store) -> None:
        self.root = root
        self.store = store
        self.folders = Folders(root, BASE_SHA256)
        self.worker = LightTrainWorker()
        self.stage = LightStage(store.lineage)
        self.progress: list[protocol.Progress] = []
        self.trainer = Trainer(self.worker, start_timeout_s=GUARD_S, on_progress=self.progress.append)
        self.worker.trainer = self.trainer
        self.candidates = asyncio.Lock()
        self.calibration = LightCalibration()
        self.rules = Rules(batch_ratings=16, max_wait_s=900.0, max_batch=64, replay_ratio=0.5, staleness=8)
        self.limits = gate.Limits(
            norm_max=20.0, live_kl_max=0.5, canary_gap_max=0.25, fluency_drop=0.8, fluency_floor=1.5, distinct_drop=0.4
        )
        self.fluency_prompts: tuple[str, ...] = ("Why?", "How?")
        self.fluency_tokens = 8
        self.objectives = {"ppo": 1.0}
        self.reference = 0
        self.enabled = True
        self.is_stopping = False
        self.max_attempts = 3
        self.probes: tuple[protocol.ProbeTokens, ...] = PROBES
        self.stages: list[tuple[int, str]] = []
        self.finished: list[Update] = []
        self.changes = 0
        self._numbers = itertools.count(1)
        self.prover = Prover(
            self.stage,
            self.trainer,
            store.lineage,
            lambda: ProvingSettings(
                limits=self.limits, fluency_prompts=self.fluency_prompts, fluency_tokens=self.fluency_tokens
            ),
            lambda: frozenset({0}),
            SHAPE,
            BASE_SHA256,
        )
        self.updater = Updater(
            folders=self.folders,
            updates=store.updates,
            trainer=self.trainer,
            prover=self.prover,
            router=self.stage,
            candidates=self.candidates,
            max_attempts=lambda: self.max_attempts,
            on_stage=self._staged,
        )
        self.learner = Learner(
            settings=self._settings,
            base_sha256=BASE_SHA256,
            probes=lambda: self.probes,
            ratings=store.feedback,
            episodes=store.episodes,
            written=store.written,
            practice_book=store.practice,
            updates=store.updates,
            lineage=store.lineage,
            folders=self.folders,
            trainer=self.trainer,
            updater=self.updater,
            calibration=self.calibration,
            on_change=self._changed,
            on_finished=self.finished.append,
        )

    def _settings(self) -> LearnSettings:
        return LearnSettings(
            enabled=self.enabled,
            rules=dataclasses.replace(
                self.rules, feeds=frozenset(protocol.OBJECTIVES[name] for name in self.objectives)
            ),
            objectives=self.objectives,
            ppo=PPO,
            preference=protocol.PreferenceSettings(),
            lora=LORA,
            reference=self.reference,
            reward_clip=1.0,
            seed=40,
            threads=1,
        )

    def _staged(self, update: Update, stage: Literal["training", "gating"]) -> None:
        self.stages.append((update.id, stage))
        self.learner.stage(update, stage)

    def _changed(self) -> None:
        self.changes += 1

    async def answer(self, **changes: Any) -> tuple[str, int]:
        """Store an episode; its completion id and its id."""
        completion_id = f"c{next(self._numbers)}-{self.store.episodes.count()}"
        values: dict[str, Any] = {
            "id": 0,
            "completion_id": completion_id,
            "choice": 0,
            "created_at": 100.0,
            "kind": "chat",
            "model": "small",
            "base_sha256": BASE_SHA256,
            "version": 0,
            "messages": [{"role": "user", "content": "Why?"}],
            "prompt": None,
            "prompt_ids": (1, 2, 3),
            "completion_ids": (4, 5),
            "logprobs": (-0.5, -0.25),
            "raw_logprobs": (-0.5, -0.25),
            "text": "Because.",
            "finish_reason": "stop",
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "seed": 7,
            "max_tokens": None,
            "user": None,
            "metadata": {},
            "caller": "uid:1000",
        }
        return completion_id, await self.store.episodes.add(Episode(**{**values, **changes}))

    async def rate(self, *ratings: float, **changes: Any) -> list[str]:
        """Store an episode for each rating, and the rating; the feedback ids."""
        answers = await asyncio.gather(*[self.answer(**changes) for _ in ratings])
        stored = await self.store.feedback.add_many(
            [
                self.feedback_on(completion_id, rating, changes.get("user"))
                for (completion_id, _), rating in zip(answers, ratings, strict=True)
            ]
        )
        self.learner.wake()
        return [outcome[0].id for outcome in stored if isinstance(outcome, tuple)]

    def feedback_on(self, completion_id: str, rating: float = 1.0, user: str | None = None) -> NewFeedback:
        """A rating as it comes in."""
        return NewFeedback(
            completion_id=completion_id,
            choice=0,
            rating=rating,
            correction=None,
            reason=None,
            user=user,
            tags=(),
            source="api",
            caller="uid:1000",
        )

    async def plan(self, n: int = 2) -> tuple[Update, protocol.TrainJob]:
        """An update of `n` fresh ratings, planned and with its job on disk, as the learner leaves it."""
        feedback_ids = await self.rate(*[1.0 if number % 2 else -1.0 for number in range(n)])
        chosen = {choice.feedback_id: choice for choice in await self.store.feedback.unused_rated(512)}
        episode_ids = [chosen[feedback_id].episode_id for feedback_id in feedback_ids]
        live = self.store.lineage.live().version
        update = await self.store.updates.create(
            parent_version=live,
            seed=1,
            new_episode_ids=episode_ids,
            replay_episode_ids=[],
            new_feedback_ids=feedback_ids,
            now=10.0,
        )
        job = self.job(update)
        self.folders.write_job(update.id, job)
        return update, job

    def job(self, update: Update) -> protocol.TrainJob:
        """A job without episodes: the light trainer does not look at them."""
        return protocol.TrainJob(
            job_id=f"update-{update.id}",
            version=update.version,
            parent=self.folders.reference_to(update.parent_version, self.folders.versions()),
            reference=protocol.AdapterRef(version=0, folder=None),
            checkpoint=None,
            episodes=(),
            probes=PROBES,
            ppo=PPO,
            lora=LORA,
            seed=update.seed,
            threads=1,
            base_sha256=BASE_SHA256,
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(GUARD_S):
            while not condition():
                await asyncio.sleep(0.002)

    async def unused(self) -> int:
        """Rated choices that wait for their first update."""
        return len(await self.store.feedback.unused_rated(1000))


InBox = Callable[[Callable[[Any], Awaitable[None]]], None]


@pytest.fixture
def in_box(tmp_path: Path) -> InBox:
    """Runs a coroutine function on a box; each call is a new start of the daemon on the same state folder."""

    def run(scenario: Callable[[Any], Awaitable[None]]) -> None:
        async def opened() -> None:
            store = await Store.open(tmp_path / "edged.db", readers=1)
            try:
                box = Box(tmp_path, store)
                box.folders.prepare([update.id for update in await store.updates.unfinished()])
                await scenario(box)
            finally:
                await store.close()

        asyncio.run(opened())

    return run
