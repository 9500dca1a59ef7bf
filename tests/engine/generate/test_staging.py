"""Proofs on the spare context: what they are compared with, and what a failed one leaves behind.

The context is played, and everything above it is real: scheduler, decoder, swap and proof."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from engine.generate.backend import Adapter, Context, DecodeFailed, Model, Row
from engine.generate.decoder import Decoder
from engine.generate.prompt import Prompts
from engine.generate.scheduler import Entry, Scheduler
from engine.generate.staging import Staging
from engine.generate.swap import Swap
from engine.protocol import AdapterRef, Message, ProbeTokens, Stage, Staged, StageFailed

N_VOCAB = 8
PROBES = (ProbeTokens(prompt_ids=(1, 2), completion_ids=(3, 4)),)
LIVE = 3


class LightAdapter:
    """Moves every logit of its token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def free(self) -> None:
        pass


class LightContext:
    """Logits that depend on the adapter alone. `failing`: decodes that fail from now on. `bad`: adapter of NaN."""

    def __init__(self) -> None:
        self.adapter: LightAdapter | None = None
        self.failing = 0
        self.bad: LightAdapter | None = None

    def set_adapter(self, adapter: LightAdapter | None) -> None:
        self.adapter = adapter

    def decode(self, entries: Sequence[Entry]) -> list[Row]:
        if self.failing:
            self.failing -= 1
            raise DecodeFailed("llama_decode returned -1")
        row = np.zeros(N_VOCAB, np.float32)
        if self.adapter is not None:
            row[self.adapter.token] = np.nan if self.adapter is self.bad else 1.0
        return [row for entry in entries if entry.wants_row]

    def copy(self, source: int, target: int, n_tokens: int) -> None:
        pass

    def forget(self, sequence: int) -> None:
        pass

    def clear(self) -> None:
        pass


class LightModel:
    """What a proof without fluency prompts asks of a model."""

    eos_ids = frozenset({0})

    def piece(self, token: int) -> bytes:
        return b"%d" % token


class Bench:
    """A staging whose live version, LIVE, moves token 3."""

    def __init__(self) -> None:
        self.contexts = (LightContext(), LightContext())
        self.live = LightAdapter(3)
        self.sent: list[Message] = []
        decoders = [
            Decoder(cast(Context, context), Scheduler(slots=2, n_sequences=4, pool_tokens=64))
            for context in self.contexts
        ]
        for decoder in decoders:
            decoder.set_adapter(cast(Adapter, self.live))
        self.staging = Staging(
            cast(Model, LightModel()),
            cast(Prompts, None),  # no fluency prompts are asked here
            decoders,
            Swap(LIVE),
            PROBES,
            adapter=cast(Adapter, self.live),
            send=self.sent.append,
            is_answering=lambda: False,
        )

    def turn(self) -> None:
        while self.staging.has_work:
            self.staging.slice()

    def stage(self, version: int) -> Any:
        """Stage `version`, whose files are known to be loaded; what is sent."""
        stage = Stage(
            job_id=f"s{version}",
            adapter=AdapterRef(version=version, folder=None),
            fluency_prompts=(),
            fluency_tokens=0,
            seed=0,
        )
        self.staging.stage(stage)
        self.turn()
        return self.sent[-1]


@pytest.fixture
def expected() -> Staged:
    """What staging the base says when nothing goes wrong."""
    bench = Bench()
    bench.staging.prove_baseline()
    bench.turn()
    assert bench.sent == []
    staged = bench.stage(0)
    assert isinstance(staged, Staged)
    assert staged.canary != staged.live_canary
    return staged


def test_a_failed_proof_of_the_live_version_is_made_up_for_when_an_adapter_is_staged(expected: Staged) -> None:
    bench = Bench()
    bench.contexts[1].failing = 1
    bench.staging.prove_baseline()
    bench.turn()
    staged = bench.stage(0)
    assert isinstance(staged, Staged)
    assert (staged.canary, staged.live_canary) == (expected.canary, expected.live_canary)


def test_a_live_version_that_cannot_be_proved_does_not_speak_against_the_staged_one(expected: Staged) -> None:
    bench = Bench()
    bench.contexts[1].bad = bench.live
    bench.staging.prove_baseline()
    bench.turn()
    failed = bench.stage(0)
    assert isinstance(failed, StageFailed)
    assert failed.code == "engine_error"
    assert f"version {LIVE}, which is live" in failed.message
    bench.contexts[1].bad = None
    staged = bench.stage(0)
    assert isinstance(staged, Staged)
    assert (staged.canary, staged.live_canary) == (expected.canary, expected.live_canary)
