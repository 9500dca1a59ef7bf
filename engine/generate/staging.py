"""Adapters on the two contexts: performs what `swap` decides, and proves staged adapters in slices.

Owns the loaded adapters. Speaks the Stage and Route half of the serve role's protocol. A proof is a generator; `slice`
advances it by one slice, so that decode steps of running answers go on in between.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from adapters.errors import AdapterError
from adapters.manifest import verify
from engine.generate import prove
from engine.generate.backend import Adapter, AdapterRefused, DecodeFailed, Model
from engine.generate.decoder import Decoder
from engine.generate.prompt import Prompts
from engine.generate.prove import Canary
from engine.generate.sampling import NotFinite
from engine.generate.swap import Action, Decline, Free, Place, Restore, Swap
from engine.generate.template import BadTemplate
from engine.protocol import (
    AdapterRef,
    Message,
    ProbeTokens,
    Route,
    Routed,
    RouteFailed,
    Stage,
    Staged,
    StageFailed,
)

log = logging.getLogger(__name__)

# The version that is served from the start is proved in the spare context too, under this job: its canary is what the
# first staged adapter is compared with.
BASELINE = "baseline"


@dataclasses.dataclass(slots=True)
class _Job:
    """A stage job. gap_s: the longest slice while an answer was running."""

    stage: Stage
    proof: Generator[None, None, Staged] | None = None
    gap_s: float = 0.0


class Staging:
    """Stages and routes adapters. `send` takes the answers; `is_answering` tells whether a decode step waits."""

    def __init__(
        self,
        model: Model,
        prompts: Prompts,
        decoders: Sequence[Decoder],
        swap: Swap,
        probes: tuple[ProbeTokens, ...],
        *,
        adapter: Adapter | None,
        send: Callable[[Message], None],
        is_answering: Callable[[], bool],
    ) -> None:
        """adapter: the one of the version that `swap` holds, already set on both contexts."""
        self._model = model
        self._prompts = prompts
        self._decoders = decoders
        self._swap = swap
        self._probes = probes
        self._send = send
        self._is_answering = is_answering
        self._adapters: dict[int, Adapter | None] = {swap.live_version: adapter}
        self._canaries: dict[int, Canary] = {}
        self._jobs: dict[str, _Job] = {}
        self._running: str | None = None

    @property
    def has_work(self) -> bool:
        """Whether `slice` has something to do now."""
        return self._running is not None

    def prove_baseline(self) -> None:
        """Score the probes under the version that is live, in the spare context."""
        version = self._swap.live_version
        self._begin(
            Stage(
                job_id=BASELINE,
                adapter=AdapterRef(version=version, folder=None),  # it is loaded, so the folder is not looked at
                fluency_prompts=(),
                fluency_tokens=0,
                seed=0,
            )
        )

    def stage(self, message: Stage) -> None:
        if message.job_id in self._jobs:
            log.error("stage job %s is under way already; the second one is ignored", message.job_id)
            return
        self._begin(message)

    def route(self, message: Route, *, reroute: Callable[[], None]) -> None:
        """Send new requests to a version. `reroute` moves what is queued, if the live context changed."""
        began = time.perf_counter()
        before = self._swap.live
        if not self._swap.route(message.version):
            held = ", ".join(f"{self._swap.version(c)} ({self._swap.role(c)})" for c in (0, 1))
            self._send(
                RouteFailed(
                    job_id=message.job_id,
                    version=message.version,
                    message=f"version {message.version} is not ready to be routed, the contexts hold {held}; stage it",
                )
            )
            return
        if self._swap.live != before:
            reroute()
            log.info("live version %d -> %d", self._swap.version(before), message.version)
        swap_ms = (time.perf_counter() - began) * 1000
        self._send(Routed(job_id=message.job_id, version=message.version, swap_ms=swap_ms))
        self.perform(self._swap.after_route())

    def perform(self, actions: Sequence[Action]) -> None:
        """Carry out what `swap` decided, in order."""
        for action in actions:
            match action:
                case Place(context, version, job_id):
                    job = self._jobs[job_id]
                    self._running = job_id
                    job.proof = self._prove(job, context, version)
                case Restore(context, version):
                    self._decoders[context].set_adapter(self._adapters[version])
                case Free(version):
                    self._free(version)
                case Decline(job_id, version):
                    del self._jobs[job_id]
                    self._fail(job_id, version, "engine_error", "too many adapters wait to be staged; try again later")

    def slice(self) -> None:
        """Advance the running proof by one slice."""
        job_id = self._running
        assert job_id is not None
        job = self._jobs[job_id]
        assert job.proof is not None
        began = time.perf_counter()
        delays_answers = self._is_answering()
        try:
            next(job.proof)
        except StopIteration as stop:
            self._end(job_id)
            self._report(job, stop.value)
            self.perform(self._swap.proved(job_id))
        except (AdapterRefused, AdapterError) as error:
            self._refuse(job, error.code, str(error))
        except NotFinite as error:
            self._refuse(job, "not_finite", f"version {job.stage.adapter.version}: {error}")
        except (DecodeFailed, BadTemplate, ValueError) as error:
            self._refuse(job, "engine_error", f"version {job.stage.adapter.version}: {error}")
        if delays_answers:
            job.gap_s = max(job.gap_s, time.perf_counter() - began)

    def _begin(self, message: Stage) -> None:
        self._jobs[message.job_id] = _Job(message)
        self.perform(self._swap.stage(message.job_id, message.adapter.version))

    def _prove(self, job: _Job, context: int, version: int) -> Generator[None, None, Staged]:
        """Load, set, score, and let it answer. Raises what `slice` turns into StageFailed."""
        stage, decoder = job.stage, self._decoders[context]
        began = time.perf_counter()
        if version not in self._adapters:
            yield from self._load(stage.adapter)
        live = self._swap.live_version
        if live not in self._canaries and live != version:
            self._canaries[live] = yield from self._prove_live(decoder, live)
        decoder.set_adapter(self._adapters[version])
        loaded = time.perf_counter()
        yield
        canary = yield from prove.score(decoder, self._probes)
        self._canaries[version] = canary
        fluency, texts, logprobs = yield from prove.answer(
            decoder,
            [self._prompts.user(text) for text in stage.fluency_prompts] if stage.fluency_tokens > 0 else [],
            max_tokens=stage.fluency_tokens,
            seed=stage.seed,
            eos_ids=self._model.eos_ids,
            piece_of=self._model.piece,
        )
        return Staged(
            job_id=stage.job_id,
            version=version,
            canary=canary,
            live_canary=self._canaries[live],
            fluency=fluency,
            fluency_texts=texts,
            fluency_logprobs=logprobs,
            load_ms=(loaded - began) * 1000,
            prove_ms=(time.perf_counter() - loaded) * 1000,
            longest_gap_ms=job.gap_s * 1000,
        )

    def _prove_live(self, decoder: Decoder, live: int) -> Generator[None, None, Canary]:
        """The canary of the live version, whose own proof failed. Its failure is none of the staged version's."""
        decoder.set_adapter(self._adapters[live])
        try:
            return (yield from prove.score(decoder, self._probes))
        except NotFinite as error:
            raise DecodeFailed(f"version {live}, which is live, cannot be proved: {error}") from error

    def _load(self, ref: AdapterRef) -> Generator[None, None, None]:
        """Check the files and load the adapter, as two slices."""
        if ref.folder is None:
            self._adapters[ref.version] = None
            return
        verify(Path(ref.folder))
        yield
        self._adapters[ref.version] = self._model.open_adapter(ref.folder)

    def _refuse(self, job: _Job, code: str, message: str) -> None:
        job_id, version = job.stage.job_id, job.stage.adapter.version
        self._end(job_id)
        self._decoders[1 - self._swap.live].abandon()
        self._fail(job_id, version, code, message)
        self.perform(self._swap.failed(job_id))

    def _end(self, job_id: str) -> None:
        self._running = None
        del self._jobs[job_id]

    def _report(self, job: _Job, staged: Staged) -> None:
        if job.stage.job_id != BASELINE:
            self._send(staged)

    def _fail(self, job_id: str, version: int, code: str, message: str) -> None:
        log.warning("staging version %d failed: %s: %s", version, code, message)
        if job_id != BASELINE:
            self._send(StageFailed(job_id=job_id, version=version, code=code, message=message))

    def _free(self, version: int) -> None:
        self._canaries.pop(version, None)
        adapter = self._adapters.pop(version, None)
        if adapter is not None:
            adapter.free()
