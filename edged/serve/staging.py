"""Adapters on the serve worker: stage one in the spare context, or route new requests to one.

The client side of Stage and Route; the contexts themselves live in the worker. A worker that dies ends what is under
way with `WorkerLost`. Staging waits for the spare context to drain, which takes as long as the longest answer there; a
caller that does not want to wait so long is told `WorkerBusy`, and joins the same staging when it asks again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools

from edged.failure import JobRefused, WorkerBusy, WorkerLost
from edged.serve.answers import Engine
from edged.underway import Underway
from engine import protocol

STAGE_WAIT_S = 10.0  # several times what loading and proving take; others may want to change what is live meanwhile
NOT_RESIDENT = "not_resident"


@dataclasses.dataclass(frozen=True, slots=True)
class _Wish:
    """What a staging was asked for: equal wishes share one job."""

    adapter: protocol.AdapterRef
    fluency_prompts: tuple[str, ...]
    fluency_tokens: int
    seed: int


class Staging:
    """Stage and Route as awaitable calls. Lives on the event loop."""

    def __init__(self, engine: Engine) -> None:
        self._underway = Underway(engine, "serve")
        self._numbers = itertools.count(1)
        self._wishes: dict[_Wish, asyncio.Future[protocol.Message]] = {}

    async def stage(
        self, adapter: protocol.AdapterRef, *, fluency_prompts: tuple[str, ...], fluency_tokens: int, seed: int
    ) -> protocol.Staged:
        """Prove `adapter` in the spare context. Changes nothing for requests.

        Raises:
            JobRefused: the file is unreadable, of another model, or not finite.
            WorkerBusy: the spare context was not free within STAGE_WAIT_S.
            WorkerLost: the worker died meanwhile.
        """
        wish = _Wish(adapter, fluency_prompts, fluency_tokens, seed)
        future = self._wishes.get(wish) or self._begin(wish)
        await asyncio.wait({future}, timeout=STAGE_WAIT_S)
        if not future.done():
            raise WorkerBusy(f"v{adapter.version} waits for the answers that still run in the spare context")
        answer = future.result()
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
        answer = await self._underway.call(job_id, protocol.Route(job_id=job_id, version=version))
        match answer:
            case protocol.Routed():
                return answer
            case protocol.RouteFailed():
                raise JobRefused(NOT_RESIDENT, answer.message)
            case _:
                raise WorkerLost(f"the serve worker answered Route with {type(answer).__name__}")

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

    def _begin(self, wish: _Wish) -> asyncio.Future[protocol.Message]:
        job_id = f"stage-{next(self._numbers)}"
        stage = protocol.Stage(
            job_id=job_id,
            adapter=wish.adapter,
            fluency_prompts=wish.fluency_prompts,
            fluency_tokens=wish.fluency_tokens,
            seed=wish.seed,
        )
        future = self._wishes[wish] = self._underway.begin(job_id, stage)

        def over(ended: asyncio.Future[protocol.Message]) -> None:
            self._wishes.pop(wish, None)
            ended.exception()  # looked at, in case that nobody waits for it any more

        future.add_done_callback(over)
        return future
