"""Adapters on the serve worker: stage one in the spare context, then route new requests to it.

The client side of Stage and Route; the contexts themselves live in the worker. One staging or routing at a time: the
caller holds them in order. A worker that dies ends what is under way with `WorkerLost`.
"""

from __future__ import annotations

import itertools

from edged.failure import JobRefused, WorkerLost
from edged.serve.answers import Engine
from edged.underway import Underway
from engine import protocol

STAGE_TIMEOUT_S = 120.0  # staging waits for the spare context to drain, so it can take as long as the longest answer


class Staging:
    """Stage and Route as awaitable calls. Lives on the event loop."""

    def __init__(self, engine: Engine) -> None:
        self._underway = Underway(engine, "serve")
        self._numbers = itertools.count(1)

    async def stage(
        self, adapter: protocol.AdapterRef, *, fluency_prompts: tuple[str, ...], fluency_tokens: int, seed: int
    ) -> protocol.Staged:
        """Prove `adapter` in the spare context. Changes nothing for requests.

        Raises:
            JobRefused: the file is unreadable, of another model, or not finite.
            WorkerLost: the worker died meanwhile.
        """
        job_id = f"stage-{next(self._numbers)}"
        stage = protocol.Stage(
            job_id=job_id,
            adapter=adapter,
            fluency_prompts=fluency_prompts,
            fluency_tokens=fluency_tokens,
            seed=seed,
        )
        answer = await self._underway.call(job_id, stage, timeout_s=STAGE_TIMEOUT_S)
        match answer:
            case protocol.Staged():
                return answer
            case protocol.StageFailed():
                raise JobRefused(answer.code, answer.message)
            case _:
                raise WorkerLost(f"the serve worker answered Stage with {type(answer).__name__}")

    async def route(self, version: int) -> protocol.Routed:
        """Send new requests to a staged or resident version. Raises JobRefused `not_resident`, WorkerLost."""
        job_id = f"route-{next(self._numbers)}"
        route = protocol.Route(job_id=job_id, version=version)
        answer = await self._underway.call(job_id, route, timeout_s=STAGE_TIMEOUT_S)
        match answer:
            case protocol.Routed():
                return answer
            case protocol.RouteFailed():
                raise JobRefused("not_resident", answer.message)
            case _:
                raise WorkerLost(f"the serve worker answered Route with {type(answer).__name__}")

    async def go_live(self, adapter: protocol.AdapterRef) -> float:
        """Make the worker serve `adapter` for new requests, staging it first where it is not resident.

        Returns:
            milliseconds in which no decode step ran because of the routing.
        Raises:
            JobRefused, WorkerLost: it still serves what it served, or is dead.
        """
        try:
            return (await self.route(adapter.version)).swap_ms
        except JobRefused as refused:
            if refused.code != "not_resident":
                raise
        await self.stage(adapter, fluency_prompts=(), fluency_tokens=0, seed=0)
        return (await self.route(adapter.version)).swap_ms

    def received(self, message: protocol.Message) -> bool:
        """Take a message of the serve worker; False if it is not an answer to Stage or Route."""
        match message:
            case protocol.Staged() | protocol.StageFailed() | protocol.Routed() | protocol.RouteFailed():
                self._underway.answer(message.job_id, message)
                return True
            case _:
                return False

    def down(self) -> None:
        """The worker is gone."""
        self._underway.lose()
