"""A training job as a folder: `job.msgpack` in, `out/` out.

The folder is all there is to an update: running it again gives the same adapter and checkpoint, byte for byte. `out/`
is built as `out.tmp/`, put on disk and renamed; its existence is the only sign of success, so a kill at any moment
leaves either a whole result or a job to run again. A job that fails leaves nothing.

    out/adapter/          a complete adapter folder (PEFT files, adapter.gguf, manifest.json)
    out/checkpoint/       critic and optimizers
    out/result.msgpack    a TrainResult; all in it but `seconds` and `usage` is the same on every replay
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgpack

from adapters.errors import AdapterError
from adapters.folder import write_adapter_folder
from adapters.store import publish_folder, write_file_atomically
from engine.fault import EngineFault
from engine.lora import Lora, lora_from_weights, new_lora, weights_of_lora
from engine.protocol import (
    JOB_FILE,
    OBJECTIVES,
    OUT_FOLDER,
    RESULT_FILE,
    LoraSettings,
    TrainJob,
    TrainResult,
    WireError,
    from_map,
    to_map,
)
from engine.train.adamw import new_adam_state
from engine.train.batch import Selection, select
from engine.train.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from engine.train.critic import Critic
from engine.train.critic_head import new_head_critic
from engine.train.critic_lora import new_lora_critic
from engine.train.device import return_free_memory
from engine.train.learner import Learner, NotFinite, NothingToLearn
from engine.train.optimise import Tick
from engine.train.scorer import Scorer
from engine.train.shortage import halved, is_out_of_memory
from engine.train.stopwatch import Stopwatch
from engine.train.update import Outcome, run_update

log = logging.getLogger(__name__)


class JobFailed(Exception):
    """Raised when a job has no result. `code` as in protocol.TrainFailed; `details` for the record of the update."""

    def __init__(self, code: str, message: str, details: dict[str, int] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details or {}


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """An update before its files. job: with the plan that it was run with in the end. dropped: reason -> answers left
    out. canary, parent_canary: per probe, log-probabilities under the result and under the parent. usage: as of a
    TrainResult."""

    job: TrainJob
    learner: Learner
    outcome: Outcome
    dropped: dict[str, int]
    canary: list[tuple[float, ...]]
    parent_canary: list[tuple[float, ...]]
    usage: dict[str, float]


def run_job(
    folder: Path, scorer: Scorer, base_sha256: str, tick: Tick, begin: Callable[[], None] = lambda: None
) -> TrainResult:
    """Run the job in `folder`, or read the result that is already there.

    Args:
        base_sha256: of the base that `scorer` holds; a job for another one is refused.
        tick: called between pieces of work with stage, done, total; an exception of its own passes through.
        begin: called before the update is computed, if it is.

    Raises:
        JobFailed: nothing was written.
    """
    clock = Stopwatch()
    job = load_job(folder)
    if (folder / OUT_FOLDER).exists():
        return load_result(folder)
    if job.base_sha256 != base_sha256:
        raise JobFailed(
            "bad_job", f"{folder}: for the base {job.base_sha256[:16]}, this trainer holds {base_sha256[:16]}"
        )
    begin()
    try:
        made = compute(job, scorer, tick, lambda changed: write_job(folder, changed), clock)
        result = _publish(made, folder, scorer.base.name, clock)
    except NothingToLearn as error:
        raise JobFailed("batch_empty", f"{folder}: {error}", error.skipped) from error
    except NotFinite as error:
        raise JobFailed("not_finite", f"{folder}: the update met a number that is not finite ({error})") from error
    except AdapterError as error:
        raise JobFailed(error.code, f"{folder}: {error}") from error
    except EngineFault as error:
        raise JobFailed(error.code, f"{folder}: {error.message}") from error
    except OSError as error:
        raise JobFailed(
            "engine_error", f"{folder}: the result cannot be written ({error}); is the disk full?"
        ) from error
    except Exception as error:
        if is_out_of_memory(error):
            raise JobFailed("out_of_memory", f"{folder}: {error}") from error
        raise
    # With the time that it took to put all of it on disk, which the file in there cannot know.
    clock.lap("export")
    return dataclasses.replace(result, seconds=dict(clock.seconds))


def load_job(folder: Path) -> TrainJob:
    """The job in `folder`. Raises JobFailed (bad_job)."""
    path = folder / JOB_FILE
    try:
        job = from_map(TrainJob, msgpack.unpackb(path.read_bytes()))
    except (OSError, ValueError, WireError, msgpack.UnpackException) as error:
        raise JobFailed("bad_job", f"{path}: {error}") from error
    for name, weight in job.objectives.items():
        if name not in OBJECTIVES or not 0.0 < weight < float("inf"):
            known = ", ".join(OBJECTIVES)
            raise JobFailed(
                "bad_job", f"{path}: objective {name!r} of weight {weight}; known: {known}, weights above 0"
            )
    ppo = job.ppo
    if ppo.minibatches < 1 or ppo.epochs < 0 or not 0.0 <= ppo.kl_target < float("inf"):
        counts = f"{ppo.epochs} epochs of {ppo.minibatches} steps with a KL target of {ppo.kl_target}"
        raise JobFailed("bad_job", f"{path}: {counts}; at least 0, 1 and 0 are wanted")
    return job


def load_result(folder: Path) -> TrainResult:
    """The result of a finished job. Raises JobFailed (bad_job)."""
    path = folder / OUT_FOLDER / RESULT_FILE
    try:
        return from_map(TrainResult, msgpack.unpackb(path.read_bytes()))
    except (OSError, ValueError, WireError, msgpack.UnpackException) as error:
        raise JobFailed("bad_job", f"{path}: {error}") from error


def write_job(folder: Path, job: TrainJob) -> None:
    """Put `job` into `folder` in the place of the one that is there, whole at every moment."""
    write_file_atomically(folder / JOB_FILE, msgpack.packb(to_map(job)))


def compute(job: TrainJob, scorer: Scorer, tick: Tick, on_halved: Callable[[TrainJob], None], clock: Stopwatch) -> Made:
    """The update, without its files. Every process that works on it calls this with the same job.

    Args:
        on_halved: told of the job with smaller micro-batches, before that is run.
        clock: gets a lap for each stage; what ran out of memory is the stage `lost`.

    Raises:
        NothingToLearn, NotFinite, EngineFault, AdapterError; OutOfMemory or an allocator's own error if even single
        answers do not fit.
    """
    scorer.lanes.match_thread()
    selection = select(job, scorer.base.config.shape.n_vocab)
    if selection.empty:
        reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(selection.dropped.items())) or "none came"
        raise NothingToLearn(f"no episode can be trained on ({reasons})", selection.dropped)
    while True:
        scorer.micro_batch_tokens = job.plan.micro_batch_tokens
        try:
            return _attempt(job, selection, scorer, tick, clock)
        except Exception as error:
            plan = halved(job.plan, selection) if is_out_of_memory(error) else None
            if plan is None:
                raise
            log.warning("%s: %s; again with micro-batches of %d tokens", job.job_id, error, plan.micro_batch_tokens)
        # Here and not above, where the exception still holds on to what its frames have allocated.
        clock.all_of_it_was("lost")
        job = dataclasses.replace(job, plan=plan)
        return_free_memory(scorer.base.device)
        on_halved(job)


def _attempt(job: TrainJob, selection: Selection, scorer: Scorer, tick: Tick, clock: Stopwatch) -> Made:
    used_before, began = scorer.lanes.used(), time.perf_counter()
    parent = scorer.adapter(job.parent)
    learner = _learner(job, parent, scorer)
    clock.lap("load")
    outcome = run_update(job, selection, learner, scorer, tick, clock)

    def measure_canaries() -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
        of_parent = scorer.canary(job.parent, job.probes, lambda: tick("canary", 0, 0))
        own = scorer.measure_probes(job.probes, learner.lora, lambda: tick("canary", 0, 0))
        scorer.keep_canary(job.version, job.probes, own)
        return own, of_parent

    canary, of_parent = scorer.lanes.on("actor", measure_canaries)()
    used = scorer.lanes.used().since(used_before)
    usage = scorer.lanes.shares(used, time.perf_counter() - began)
    usage["ahead/score_s"] = outcome.ahead_s
    usage["tokens/all"] = float(sum(len(one.prompt_ids) + len(one.completion_ids) for one in selection.episodes))
    clock.lap("canary")
    return Made(job, learner, outcome, {**selection.dropped, **outcome.skipped}, canary, of_parent, usage)


def _learner(job: TrainJob, parent: Lora | None, scorer: Scorer) -> Learner:
    """The parent's adapter to train on (a fresh one on the base), with the checkpoint's state or fresh state.

    A checkpoint that cannot be read counts as none, and is told of; it is found so again on every replay.
    """
    shape, device = scorer.base.config.shape, scorer.base.device
    if parent is None:
        lora = new_lora(shape, job.lora, job.seed, device)
    else:
        lora = lora_from_weights(weights_of_lora(parent), device)
    fresh = Learner(lora, new_adam_state(lora.parameters()), _new_critic(job, lora, scorer))
    if job.checkpoint is None:
        return fresh
    try:
        return load_checkpoint(Path(job.checkpoint), lora, _new_critic(job, lora, scorer))
    except CheckpointError as error:
        # The optimizer's means and the critic grow again within a few updates; the ratings would not come again.
        log.warning("%s", error)
        return dataclasses.replace(fresh, checkpoint_lost=True)


def _new_critic(job: TrainJob, lora: Lora, scorer: Scorer) -> Critic:
    shape, device = scorer.base.config.shape, scorer.base.device
    if job.ppo.critic == "head":
        return new_head_critic(shape, device)
    # On the same blocks as the actor, because their input is what is cached.
    size = LoraSettings(rank=lora.rank, alpha=lora.alpha, layers=shape.n_layers - lora.first_layer)
    return new_lora_critic(shape, size, job.seed, device)


def _publish(made: Made, folder: Path, base_name: str, clock: Stopwatch) -> TrainResult:
    job, learner, outcome = made.job, made.learner, made.outcome
    weights = weights_of_lora(learner.lora)
    weights.check_finite()
    metrics = {
        "lora/norm": weights.norm(),
        "checkpoint/lost": float(learner.checkpoint_lost),
        "oom/halvings": float(job.plan.halvings),
    }
    result = TrainResult(
        job_id=job.job_id,
        version=job.version,
        metrics={**outcome.metrics, **metrics},
        seconds=dict(clock.seconds),
        dropped=made.dropped,
        canary=tuple(made.canary),
        parent_canary=tuple(made.parent_canary),
        usage=made.usage,
    )
    temporary = folder / (OUT_FOLDER + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
    try:
        temporary.mkdir()
        write_adapter_folder(
            temporary / "adapter",
            weights,
            version=job.version,
            parent=job.parent.version,
            base_sha256=job.base_sha256,
            base_model_name=base_name,
            origin="trained",
            created_at=job.created_at,
        )
        (temporary / "checkpoint").mkdir()
        save_checkpoint(temporary / "checkpoint", learner)
        clock.lap("export")
        result = dataclasses.replace(result, seconds=dict(clock.seconds))
        (temporary / RESULT_FILE).write_bytes(msgpack.packb(to_map(result)))
        publish_folder(temporary, folder / OUT_FOLDER)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return result
