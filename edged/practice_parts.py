"""Practice mode put together: the judge's worker, the sampler, and the loop that uses both while the box is idle.

Built by `edged.assembly`, which passes on what others tell. Without a judge (`[reward] source`) there is no score
worker, and everything here does nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from edged import resolved, status
from edged.base_model import BaseModel
from edged.learn.judging import Judging
from edged.learn.learner import Learner
from edged.learn.practice import hindrance
from edged.learn.practising import Practising
from edged.records import PracticeCounts
from edged.serve.sampling import Interrupted, Sampler
from edged.serve.translation import Serving
from edged.settings import Settings
from edged.store.store import Store
from edged.system.workers import Role, Worker, Workers
from engine import protocol

log = logging.getLogger(__name__)

SCORE_OOM_SCORE_ADJ = 600  # when memory runs out, a judge goes before the trainer
SCORE_HANG_S = 120.0  # of silence; a batch has a shorter limit of its own
FITTED_RATINGS = 1024  # the newest, which take about 3 s to fit


class PracticeParts:
    """The parts of practice mode."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        *,
        model: BaseModel,
        store: Store,
        workers: Workers,
        cache_folder: Path,
        serve_worker: Worker,
        learner: Learner,
        is_stopping: Callable[[], bool],
        hindered: Callable[[], str],
        on_change: Callable[[], None],
    ) -> None:
        """hindered: why other work of the box goes before practice; "" if none does."""
        self._settings = settings
        self._store = store
        self._hindered = hindered
        self._base_sha256 = model.sha256
        self._serve_worker = serve_worker
        self._learner = learner
        self._is_stopping = is_stopping
        self._judging: Judging | None = None
        self._practising: Practising | None = None
        section = settings()
        start = resolved.start_score(section, model, str(cache_folder))
        if start is None:
            return
        serving = Serving(model=model.name, base_sha256=model.sha256, wait_s=section.serve.start_timeout_s)
        self._sampler = Sampler(serving, serve_worker, "practice")
        self.score_worker = workers.add(self._role(section, start))
        self._judging = Judging(
            self.score_worker,
            rules=lambda: resolved.judging(settings()),
            start_timeout_s=section.reward.start_timeout_s,
            ratings=self._ratings if section.reward.source == "fitted" else None,
        )
        self._practising = Practising(
            settings=lambda: resolved.practising(settings()),
            blocked=self._blocked,
            book=store.practice,
            sampler=self._sampler,
            interrupted=Interrupted,
            judge=self._judging,
            trainer=learner,
            base_sha256=model.sha256,
            on_change=on_change,
        )

    async def run(self) -> None:
        """Until cancelled."""
        if self._practising is None:
            await asyncio.Event().wait()
        else:
            await self._practising.run()

    @property
    def judge(self) -> Judging | None:
        """Who rewards answers; None if only people do."""
        return self._judging

    def view(self) -> status.PracticeView:
        """What a status shows."""
        if self._practising is None or self._judging is None:
            off = resolved.practising(self._settings()).rules.off
            return status.PracticeView(state="off", why=off, counts=PracticeCounts(), detail="", fitted=None)
        view = self._practising.view()
        return status.PracticeView(
            state=view.state,
            why=view.why,
            counts=view.counts,
            detail=self._judging.detail,
            fitted=self._judging.report,
        )

    @property
    def is_working(self) -> bool:
        """Whether a round of practice is under way."""
        return self._practising is not None and self._practising.view().state in (
            "preparing",
            "sampling",
            "judging",
            "training",
        )

    def close(self) -> None:
        """The daemon is stopping."""
        if self._judging is not None:
            self._judging.rest()

    # -------------------------------------------------------------------------------------------------- what happened

    def users(self, active: int) -> None:
        """So many requests are under way."""
        if self._practising is not None:
            self._practising.users(active)

    def rated(self) -> None:
        """A person has rated."""
        if self._practising is not None:
            self._practising.rated()

    def removed(self) -> None:
        """Answers, prompts and ratings of a user are gone."""
        if self._practising is not None:
            self._practising.removed()

    def asked(self) -> None:
        """A user's answer was recorded."""
        if self._practising is not None:
            self._practising.asked()

    def reloaded(self) -> None:
        """There are other settings."""
        if self._practising is not None:
            self._practising.reloaded()

    def changed(self) -> None:
        """The learner or a worker has changed."""
        if self._practising is not None:
            self._practising.changed()

    def received(self, message: protocol.Message) -> bool:
        """Take a message of the serve worker; False if it is not for practice."""
        return self._practising is not None and self._sampler.received(message)

    def serve_down(self) -> None:
        """The serve worker is gone."""
        if self._practising is not None:
            self._sampler.down()
            self._practising.changed()

    def _blocked(self) -> str:
        """Why the box cannot practise now, besides people's requests; "" if it can."""
        if self._is_stopping():
            return "the daemon is stopping"
        if not self._serve_worker.is_ready:
            return "the serve worker is starting"
        return self._hindered() or hindrance(self._learner.state, self._learner.why, due=self._learner.due)

    # --------------------------------------------------------------------------------------------------- score worker

    def _role(self, settings: Settings, start: protocol.StartScore) -> Role:
        async def told() -> protocol.Message:
            return start

        return Role(
            name="score",
            role="score",
            limits=resolved.worker_limits(settings.reward.start_timeout_s, SCORE_HANG_S),
            start=told,
            on_ready=lambda ready: self._judge.ready(),
            on_message=self._said,
            on_down=lambda why: self._judge.down(),
            on_fault=lambda fault: self._judge.fault(fault),
            oom_score_adj=SCORE_OOM_SCORE_ADJ,
        )

    @property
    def _judge(self) -> Judging:
        assert self._judging is not None  # its worker is only there if it is
        return self._judging

    def _said(self, message: protocol.Message) -> None:
        if not self._judge.received(message):
            log.warning("the score worker sent a %s that nobody expects", type(message).__name__)

    async def _ratings(self) -> list[protocol.RatedTokens]:
        """What people rated, for a judge that is fitted to it."""
        return [
            protocol.RatedTokens(
                episode_id=answer.episode_id,
                prompt_ids=answer.prompt_ids,
                completion_ids=answer.completion_ids,
                rating=answer.rating,
            )
            for answer in await self._store.practice.rated_answers(FITTED_RATINGS, self._base_sha256)
        ]
