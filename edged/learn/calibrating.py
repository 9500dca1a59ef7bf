"""Calibration: once for every base, how far trainer and server round apart (`edged.learn.noise`).

Done as soon as both workers run, before the first update: the serve worker samples a few answers of the base in its
spare context, requests go on in the other, and the trainer scores them. What comes out is kept with version 0 in the
lineage, under a number that names base, trainer and questions, so that a changed one is measured anew; the sequence
filter takes its bounds from it, and the status shows it. An update waits for it while there is hope (`is_pending`).
Where it cannot be done, updates go on without that filter, and the status says why.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable

from edged.failure import JobRefused, WorkerBusy, WorkerDown, WorkerLost
from edged.learn.measurement import name_of
from edged.learn.noise import noise_of
from edged.learn.ports import LineageBook, Stage
from edged.learn.probes import CALIBRATION_PROMPTS
from edged.learn.trainer import Trainer
from engine import protocol

log = logging.getLogger(__name__)

MEASUREMENT = "noise/measurement"
SAMPLED_AT = 0.7  # the temperature of staged answers
ANSWER_TOKENS = 24
SEED = 30_011
FIRST_ID = -(1 << 40)  # of the scored answers: neither the store's nor the gate's
ATTEMPTS = 3
PAUSE_S = 2.0  # between attempts


class Calibration:
    """`wake` when a worker got ready. noise: None until it is known; why: why it is not."""

    def __init__(
        self,
        stage: Stage,
        trainer: Trainer,
        lineage: LineageBook,
        *,
        candidates: asyncio.Lock,
        base_sha256: str,
        trainer_kind: Callable[[], str],
        is_serving: Callable[[], bool],
    ) -> None:
        """trainer_kind: what else the trainer's rounding depends on, its device and number format.
        candidates: held while a version stands staged."""
        self._stage = stage
        self._trainer = trainer
        self._lineage = lineage
        self._candidates = candidates
        self._base_sha256 = base_sha256
        self._trainer_kind = trainer_kind
        self._is_serving = is_serving
        self._awake = asyncio.Event()
        self._is_over = asyncio.Event()
        self._attempts_left = ATTEMPTS
        self.noise: protocol.EngineNoise | None = None
        self.why = "not measured yet"

    @property
    def is_pending(self) -> bool:
        """Whether it is still to be expected."""
        return self.noise is None and self._attempts_left > 0

    def wake(self) -> None:
        self._awake.set()

    async def over(self) -> None:
        """Returns once it is done, or was given up."""
        await self._is_over.wait()

    async def run(self) -> None:
        """Until cancelled; after it is over there is nothing left to do."""
        self.noise = await self._recorded()
        while self.is_pending:
            self._awake.clear()
            if self._is_serving() and self._trainer.is_ready:
                await self._attempt()
            else:
                await self._awake.wait()
        self._is_over.set()
        await asyncio.Event().wait()

    async def _attempt(self) -> None:
        """One measurement. A worker that is busy or not there has not been tried."""
        try:
            async with self._candidates:
                self.noise = await self._measure()
        except (WorkerBusy, WorkerDown) as away:
            self.why = str(away)
            await asyncio.sleep(PAUSE_S)
            return
        except (JobRefused, WorkerLost) as failure:
            self._attempts_left -= 1
            self.why = str(failure)
            log.warning("calibration, attempt %d of %d: %s", ATTEMPTS - self._attempts_left, ATTEMPTS, failure)
            await asyncio.sleep(PAUSE_S)
            return
        if self.noise is None:
            self._attempts_left = 0  # the same dice would give the same answers
            self.why = "too few tokens of the base's answers to the probes have a log-probability to compare"
            log.warning("calibration: %s", self.why)
            return
        log.info("trainer and server: bias %.4f, spread %.3f nats a token", self.noise.bias, self.noise.spread)
        await self._record(self.noise)

    async def _measure(self) -> protocol.EngineNoise | None:
        staged = await self._stage.stage(
            protocol.BASE, fluency_prompts=CALIBRATION_PROMPTS, fluency_tokens=ANSWER_TOKENS, seed=SEED
        )
        answers = zip(staged.fluency, staged.fluency_logprobs, strict=True)
        episodes = tuple(
            protocol.EpisodeTokens(
                episode_id=FIRST_ID - index,
                prompt_ids=answer.prompt_ids,
                completion_ids=answer.completion_ids,
                logprobs=logprobs,
                temperature=SAMPLED_AT,
                adapter=protocol.BASE,
            )
            for index, (answer, logprobs) in enumerate(answers)
            if answer.completion_ids
        )
        if not episodes:
            return None
        return noise_of(await self._trainer.score(episodes, protocol.BASE), SAMPLED_AT)

    async def _recorded(self) -> protocol.EngineNoise | None:
        """What was measured before, of the same."""
        known = (await self._lineage.get(0)).metrics
        names = [field.name for field in dataclasses.fields(protocol.EngineNoise)]
        if known.get(MEASUREMENT) != self._measurement() or not all(f"noise/{name}" in known for name in names):
            return None
        return protocol.EngineNoise(**{name: known[f"noise/{name}"] for name in names})

    async def _record(self, noise: protocol.EngineNoise) -> None:
        figures = {f"noise/{name}": value for name, value in dataclasses.asdict(noise).items()}
        await self._lineage.set_metrics(0, figures | {MEASUREMENT: self._measurement()})

    def _measurement(self) -> float:
        return name_of([CALIBRATION_PROMPTS, ANSWER_TOKENS, SEED, self._base_sha256, self._trainer_kind()])
