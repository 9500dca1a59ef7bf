"""Stage and Route as calls, against a worker whose answers the test writes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from edged.failure import JobRefused, WorkerBusy, WorkerDown, WorkerLost
from edged.serve import staging as staging_module
from edged.serve.staging import NOT_RESIDENT, Staging
from engine import protocol

ADAPTER = protocol.AdapterRef(version=3, folder="/adapters/v3")


class LightEngine:
    """A serve worker with two contexts: routes to what is resident, stages what is readable."""

    def __init__(self, resident: set[int], *, unreadable: frozenset[int] = frozenset()) -> None:
        self.is_ready = True
        self.resident = resident
        self.unreadable = unreadable
        self.sent: list[protocol.Message] = []
        self.staging: Staging
        self.answers = True

    def send(self, message: protocol.Message) -> None:
        self.sent.append(message)
        if self.answers:
            asyncio.get_running_loop().call_soon(self.staging.received, self.answer(message))

    def answer(self, message: protocol.Message) -> protocol.Message:
        match message:
            case protocol.Route():
                if message.version in self.resident:
                    return protocol.Routed(job_id=message.job_id, version=message.version, swap_ms=1.5)
                return protocol.RouteFailed(job_id=message.job_id, version=message.version, message="not here")
            case protocol.Stage():
                version = message.adapter.version
                if version in self.unreadable:
                    return protocol.StageFailed(
                        job_id=message.job_id, version=version, code="adapter_unreadable", message="half a file"
                    )
                self.resident.add(version)
                return staged(message.job_id, version)
        raise AssertionError(message)


def staged(job_id: str, version: int) -> protocol.Staged:
    return protocol.Staged(
        job_id=job_id,
        version=version,
        canary=(),
        live_canary=(),
        fluency=(),
        fluency_texts=(),
        load_ms=1.0,
        prove_ms=2.0,
        longest_gap_ms=0.0,
    )


def with_staging(engine: LightEngine, scenario: Callable[[Staging], Awaitable[None]]) -> None:
    async def main() -> None:
        engine.staging = Staging(engine)
        await scenario(engine.staging)

    asyncio.run(main())


def stage(staging: Staging) -> Awaitable[protocol.Staged]:
    return staging.stage(ADAPTER, fluency_prompts=("Why?",), fluency_tokens=8, seed=5)


def test_staging_asks_the_worker_and_returns_its_proof() -> None:
    engine = LightEngine({0})

    async def scenario(staging: Staging) -> None:
        proof = await stage(staging)
        assert proof.version == 3
        assert engine.sent == [
            protocol.Stage(job_id=proof.job_id, adapter=ADAPTER, fluency_prompts=("Why?",), fluency_tokens=8, seed=5)
        ]

    with_staging(engine, scenario)


def test_an_adapter_that_the_worker_cannot_load_is_refused_with_its_code() -> None:
    async def scenario(staging: Staging) -> None:
        with pytest.raises(JobRefused, match="half a file") as caught:
            await stage(staging)
        assert caught.value.code == "adapter_unreadable"

    with_staging(LightEngine({0}, unreadable=frozenset({3})), scenario)


def test_routing_to_a_version_that_is_nowhere_is_refused() -> None:
    async def scenario(staging: Staging) -> None:
        assert (await staging.route(0)).swap_ms == 1.5
        with pytest.raises(JobRefused, match="not here") as caught:
            await staging.route(3)
        assert caught.value.code == NOT_RESIDENT

    with_staging(LightEngine({0}), scenario)


def test_a_staging_that_takes_long_is_told_as_busy_and_joined_by_who_asks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging_module, "STAGE_WAIT_S", 0.01)
    engine = LightEngine({0})
    engine.answers = False

    async def scenario(staging: Staging) -> None:
        for _ in range(2):
            with pytest.raises(WorkerBusy, match="v3 waits for the answers"):
                await stage(staging)
        assert len(engine.sent) == 1
        again = asyncio.ensure_future(stage(staging))
        await asyncio.sleep(0)
        staging.received(engine.answer(engine.sent[0]))
        assert (await again).version == 3
        engine.answers = True
        assert (await stage(staging)).job_id != (await again).job_id

    with_staging(engine, scenario)


def test_a_worker_that_dies_ends_every_call() -> None:
    engine = LightEngine({0})
    engine.answers = False

    async def scenario(staging: Staging) -> None:
        calls = [asyncio.ensure_future(stage(staging)), asyncio.ensure_future(staging.route(3))]
        await asyncio.sleep(0)
        staging.down()
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, WorkerLost)
            assert not isinstance(outcome, WorkerDown)

    with_staging(engine, scenario)


def test_a_worker_that_does_not_run_is_asked_nothing() -> None:
    engine = LightEngine({0})
    engine.is_ready = False

    async def scenario(staging: Staging) -> None:
        with pytest.raises(WorkerDown, match="the serve worker is not running"):
            await staging.route(3)
        assert engine.sent == []

    with_staging(engine, scenario)


def test_an_answer_to_a_call_that_was_given_up_is_taken_and_forgotten() -> None:
    engine = LightEngine({0})
    engine.answers = False

    async def scenario(staging: Staging) -> None:
        call = asyncio.ensure_future(stage(staging))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert staging.received(engine.answer(engine.sent[0]))
        staging.down()

    with_staging(engine, scenario)


def test_messages_of_others_are_left_to_them() -> None:
    async def scenario(staging: Staging) -> None:
        assert not staging.received(protocol.Chunk(request_id="r1", choice=0, text=""))

    with_staging(LightEngine({0}), scenario)
