"""The deep gate put together: its sampler, what it asks of the other parts, and the loop that looks at what went live.

Built by `edged.assembly`, which passes on what others tell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from edged import resolved
from edged.base_model import BaseModel
from edged.learn.deep_gating import DeepGating
from edged.learn.deep_proving import DeepProver, Judge
from edged.learn.folders import Folders
from edged.learn.practice import hindrance
from edged.learning_parts import LearningParts
from edged.records import DeepVerdict
from edged.serve.routing import Routing
from edged.serve.sampling import Interrupted, Sampler
from edged.serve.translation import Serving
from edged.settings import Settings
from edged.standing import DeepView
from edged.store.store import Store
from edged.swap import DEEP_GATE
from edged.swapping import Swaps
from edged.system.workers import Worker
from engine import protocol


class DeepParts:
    """The parts of the deep gate."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        *,
        model: BaseModel,
        store: Store,
        folders: Folders,
        serve_worker: Worker,
        routing: Routing,
        learning: LearningParts,
        candidates: asyncio.Lock,
        swaps: Swaps,
        judge: Judge | None,
        on_verdict: Callable[[int, DeepVerdict], None],
        on_trouble: Callable[[], None],
    ) -> None:
        """candidates: held while an adapter is staged. judge: of `[reward] source`; None without one."""
        self._serve_worker = serve_worker
        self._learner = learning.learner
        serving = Serving(model=model.name, base_sha256=model.sha256, wait_s=settings().serve.start_timeout_s)
        self._sampler = Sampler(serving, serve_worker, "deep-gate")

        def prover(free: Callable[[], Awaitable[None]]) -> DeepProver:
            return DeepProver(
                settings=lambda: resolved.deep_gate(settings()),
                sampler=self._sampler,
                interrupted=Interrupted,
                stage=routing,
                candidates=candidates,
                trainer=learning.trainer,
                judge=judge,
                held_out=store.held_out,
                written=store.written,
                eos_ids=learning.eos_ids,
                base_sha256=model.sha256,
                free=free,
            )

        self._gating = DeepGating(
            enabled=lambda: settings().gate.deep,
            blocked=self._blocked,
            lineage=store.lineage,
            keep=store.deep_verdicts.keep,
            versions=folders.versions,
            complaint_about=folders.complaint_about,
            reference_to=lambda version: folders.reference_to(version, folders.versions()),
            prover=prover,
            sampler=self._sampler,
            roll_back=lambda version, reason: swaps.roll_back(version, reason, caller=DEEP_GATE),
            on_verdict=on_verdict,
            on_trouble=on_trouble,
        )
        self.run = self._gating.run
        self.users = self._gating.users
        self.changed = self._gating.changed

    def view(self) -> DeepView:
        """What a status shows."""
        view = self._gating.view()
        return DeepView(state=view.state, why=view.why, verdict=view.verdict)

    @property
    def is_looking(self) -> bool:
        """Whether a version is being examined."""
        return self._gating.is_looking

    def hindrance(self) -> str:
        """Why the box should not practise now; "" if it may."""
        return "the deep gate looks at what is live" if self._gating.is_looking else ""

    def received(self, message: protocol.Message) -> bool:
        """Take a message of the serve worker; False if it is not for the deep gate."""
        return self._sampler.received(message)

    def serve_down(self) -> None:
        """The serve worker is gone."""
        self._sampler.down()
        self._gating.changed()

    def _blocked(self) -> str:
        """Why the box has no time for it, besides people's requests; "" if it has."""
        if not self._serve_worker.is_ready:
            return "the serve worker is starting"
        return hindrance(self._learner.state, self._learner.why, due=self._learner.due)
