"""Proving a candidate: gather the evidence on the served stack and from the trainer, and let the gate judge it.

A thin shell around `edged.learn.gate`. It stages the adapter (which changes nothing for requests), has its sampled
answers scored under the base, and keeps each version's fluency with the lineage so that it is measured once. It
publishes nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

from adapters.errors import AdapterError, MismatchedAdapter
from adapters.folder import GGUF_FILE, load_adapter_folder
from adapters.llamacpp_format import load_gguf_adapter
from adapters.shape import BaseShape
from adapters.weights import compare
from edged.learn import gate
from edged.learn.measurement import name_of
from edged.learn.ports import LineageBook, Stage
from edged.learn.trainer import Trainer
from engine import protocol

MEASUREMENT = "fluency/measurement"
FILES_APART_MAX = 1e-3  # of the norm: both files hold float32, and fused matrices are scaled by powers of two
FLUENCY_SEED = 20_011  # the same dice for every version, so that versions differ by their weights only


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProvingSettings:
    """limits, fluency_prompts, fluency_tokens: of `[gate]`."""

    limits: gate.Limits
    fluency_prompts: tuple[str, ...]
    fluency_tokens: int


class Prover:
    """Judges adapters. One at a time: the caller holds them in order."""

    def __init__(
        self,
        stage: Stage,
        trainer: Trainer,
        lineage: LineageBook,
        settings: Callable[[], ProvingSettings],
        eos_ids: Callable[[], frozenset[int]],
        base: BaseShape,
        base_sha256: str,
    ) -> None:
        self._stage = stage
        self._trainer = trainer
        self._lineage = lineage
        self._settings = settings
        self._eos_ids = eos_ids
        self._base = base
        self._base_sha256 = base_sha256

    async def prove(
        self, adapter: protocol.AdapterRef, live: protocol.AdapterRef, result: protocol.TrainResult | None
    ) -> gate.Judgement:
        """The judgement on `adapter`, which then stands staged.

        Args:
            live: the version that it is compared with, which must be live.
            result: what the trainer said of it; None for an adapter that was not trained here.

        Raises:
            JobRefused: the engine cannot load it. WorkerLost: a worker died. WorkerBusy: the serve worker is not free.
            Refused: 409 `live_changed`.
        """
        self._lineage.expect(live.version)
        assert adapter.folder is not None
        try:
            norm = await asyncio.to_thread(_weigh, Path(adapter.folder), self._base)
        except AdapterError as error:
            return gate.Judgement(accepted=False, reason=f"its files cannot be used: {error}", metrics={})
        settings = self._settings()  # for all of the proof: figures of different settings are not comparable
        base = await self._fluency_of(protocol.BASE, settings)
        at_live = base if live.version == 0 else await self._fluency_of(live, settings)
        staged = await self._stage_probes(adapter, settings)
        fluency = await self._judge_answers(staged)
        await self._keep(adapter.version, fluency, settings)
        evidence = gate.Evidence(
            norm=norm,
            kl_live=None if result is None else result.metrics.get("kl/live"),
            served=staged.canary,
            served_live=staged.live_canary,
            predicted=None if result is None else result.canary,
            predicted_live=None if result is None else result.parent_canary,
            fluency=fluency,
            live=at_live,
            base=base,
        )
        judgement = gate.judge(evidence, settings.limits)
        times = {
            "gate/load_ms": staged.load_ms,
            "gate/prove_ms": staged.prove_ms,
            "gate/longest_gap_ms": staged.longest_gap_ms,
        }
        return dataclasses.replace(judgement, metrics=judgement.metrics | times)

    async def _fluency_of(self, adapter: protocol.AdapterRef, settings: ProvingSettings) -> gate.Fluency:
        """The fluency of a version: remembered of the same measurement, or measured now."""
        known = (await self._lineage.get(adapter.version)).metrics
        names = [field.name for field in dataclasses.fields(gate.Fluency)]
        if known.get(MEASUREMENT) == self._measurement(settings) and all(f"fluency/{name}" in known for name in names):
            return gate.Fluency(**{name: known[f"fluency/{name}"] for name in names})
        fluency = await self._judge_answers(await self._stage_probes(adapter, settings))
        await self._keep(adapter.version, fluency, settings)
        return fluency

    async def _keep(self, version: int, fluency: gate.Fluency, settings: ProvingSettings) -> None:
        await self._lineage.set_metrics(
            version,
            {f"fluency/{name}": value for name, value in dataclasses.asdict(fluency).items()}
            | {MEASUREMENT: self._measurement(settings)},
        )

    def _measurement(self, settings: ProvingSettings) -> float:
        return name_of([settings.fluency_prompts, settings.fluency_tokens, FLUENCY_SEED, self._base_sha256])

    async def _stage_probes(self, adapter: protocol.AdapterRef, settings: ProvingSettings) -> protocol.Staged:
        return await self._stage.stage(
            adapter,
            fluency_prompts=settings.fluency_prompts,
            fluency_tokens=settings.fluency_tokens,
            seed=FLUENCY_SEED,
        )

    async def _judge_answers(self, staged: protocol.Staged) -> gate.Fluency:
        """Have the staged version's answers scored under the base.

        They are no episodes: negative ids keep them apart from the store's.
        """
        episodes = tuple(
            protocol.EpisodeTokens(
                episode_id=-1 - index,
                prompt_ids=answer.prompt_ids,
                completion_ids=answer.completion_ids,
                logprobs=(None,) * len(answer.completion_ids),
                temperature=1.0,
                adapter=protocol.BASE,
            )
            for index, answer in enumerate(staged.fluency)
            if answer.completion_ids
        )
        scores = (
            {score.episode_id: score for score in await self._trainer.score(episodes, protocol.BASE)}
            if episodes
            else {}
        )
        eos_ids = self._eos_ids()
        return gate.fluency_of(
            [
                (
                    answer.completion_ids,
                    scores[-1 - index].reference_logprob if -1 - index in scores else None,
                )
                for index, answer in enumerate(staged.fluency)
            ],
            eos_ids,
        )


def _weigh(folder: Path, base: BaseShape) -> float:
    """The norm of the adapter. Blocking: reads the folder.

    Raises AdapterError: damaged, not finite, or the file that is served is another adapter than the one that was
    trained (a wrong scale, rows in another order): of a small update the canary does not tell that from rounding.
    """
    weights, _ = load_adapter_folder(folder, base)
    weights.check_finite()
    served, _ = load_gguf_adapter(folder / GGUF_FILE, base)
    found = compare(weights, served)
    if found.distance > FILES_APART_MAX * found.norm:
        raise MismatchedAdapter(
            f"{folder.name}: {GGUF_FILE} is another adapter than the one that was trained, {found.distance:.3g} apart "
            f"of a norm of {found.norm:.3g}; export it again"
        )
    return found.norm
