"""The deep gate on a real store with a real prover; who answers and who scores is light."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from edged.failure import JobRefused, WorkerLost
from edged.learn import deep_gating, deep_proving
from edged.learn.deep_gating import DeepGating
from edged.learn.deep_proving import FIRST_ID, DeepProver, DeepSettings
from edged.learn.judging import Judgement
from edged.records import DeepVerdict, Episode, Live, NewFeedback, PracticePrompt
from engine import protocol

InBox = Callable[[Callable[[Any], Awaitable[None]]], None]
QUESTIONS = tuple(f"Question {number}?" for number in range(8))
PLAIN = "water finds the lowest way and stays there for a while as long as nobody moves it"
STAMMER = "no " * 20


class Gone(Exception):
    """What the light sampler raises when it is interrupted."""


class LightSampler:
    """Answers at once, or not at all while `holds`. Versions in `stammering` stammer, `missing` are in no context."""

    def __init__(self) -> None:
        self.stammering: set[int] = set()
        self.missing: set[int] = set()
        self.refused: set[str] = set()
        self.asked: list[tuple[str, int | None]] = []
        self.holds = False
        self.waiting: list[asyncio.Future[None]] = []
        self.lost = 0

    async def sample(
        self,
        prompt: PracticePrompt,
        *,
        n: int,
        max_tokens: int,
        seed: int,
        temperature: float = 1.0,
        version: int | None = None,
    ) -> list[Episode]:
        assert prompt.messages is not None
        text = prompt.messages[-1]["content"]
        self.asked.append((text, version))
        if self.holds:
            self.waiting.append(asyncio.get_running_loop().create_future())
            await self.waiting[-1]
        await asyncio.sleep(0)
        if self.lost:
            self.lost -= 1
            raise WorkerLost("it died")
        if version in self.missing:
            raise JobRefused("not_resident", "nowhere")
        if text in self.refused:
            raise JobRefused("context_length_exceeded", "too long")
        words = STAMMER if version in self.stammering else f"{text} {PLAIN}"
        return [self.answer(prompt, words, choice) for choice in range(n)]

    def interrupt(self) -> None:
        for future in self.waiting:
            if not future.done():
                future.set_exception(Gone())

    def answer(self, prompt: PracticePrompt, text: str, choice: int) -> Episode:
        ids = tuple(sum(map(ord, word)) for word in text.split())
        return Episode(
            id=0,
            completion_id="deep-gate-1",
            choice=choice,
            created_at=1.0,
            kind="chat",
            model="small",
            base_sha256="b" * 64,
            version=0,
            messages=prompt.messages,
            prompt=None,
            prompt_ids=(1, 2),
            completion_ids=(*ids, 0),
            logprobs=(-0.5,) * (len(ids) + 1),
            raw_logprobs=(-0.5,) * (len(ids) + 1),
            text=text,
            finish_reason="stop",
            temperature=0.7,
            top_p=1.0,
            top_k=0,
            seed=seed_of(text),
            max_tokens=64,
            user=None,
            metadata={},
            caller="deep-gate",
        )


def seed_of(text: str) -> int:
    return len(text)


class LightJudge:
    """Rewards plain answers of a version with 1, or says why it cannot."""

    def __init__(self, why_not: str | None = None) -> None:
        self.why_not = why_not

    async def prepare(self) -> str | None:
        return self.why_not

    async def judge(self, items: Any) -> list[Judgement]:
        return [Judgement(episode_id=item.episode_id, reward=1.0, reason=None) for item in items]


class Bench:
    """A deep gate on a box whose v1 is live, made from the base."""

    def __init__(self, box: Any) -> None:
        self.box = box
        self.sampler = LightSampler()
        self.judge: LightJudge | None = None
        self.enabled = True
        self.blocked = ""
        self.tokens = 1024
        self.verdicts: list[tuple[int, DeepVerdict]] = []
        self.reasons: list[str] = []
        self.rests: list[bool] = []
        self.gating = self.build()

    def build(self) -> DeepGating:
        box = self.box

        def prover(free: Callable[[], Awaitable[None]]) -> DeepProver:
            return DeepProver(
                settings=lambda: DeepSettings(tokens=self.tokens, fixed_prompts=QUESTIONS),
                sampler=self.sampler,
                interrupted=Gone,
                stage=box.stage,
                candidates=box.candidates,
                trainer=box.trainer,
                judge=self.judge,
                held_out=box.store.held_out,
                written=box.store.written,
                eos_ids=lambda: frozenset({0}),
                base_sha256=box.BASE_SHA256,
                free=free,
            )

        return DeepGating(
            enabled=lambda: self.enabled,
            blocked=lambda: self.blocked,
            lineage=box.store.lineage,
            keep=box.store.deep_verdicts.keep,
            versions=box.folders.versions,
            complaint_about=box.folders.complaint_about,
            reference_to=lambda version: box.folders.reference_to(version, box.folders.versions()),
            prover=prover,
            sampler=self.sampler,
            roll_back=self.roll_back,
            on_verdict=lambda version, verdict: self.verdicts.append((version, verdict)),
            on_trouble=lambda: self.rests.append(self.gating.is_looking),
        )

    async def roll_back(self, version: int, reason: str) -> Live:
        self.reasons.append(reason)
        lineage = self.box.store.lineage
        live: Live = await lineage.set_live(
            version - 1, why="rolled_back", caller=self.box.OPERATOR, if_live=version, now=50.0
        )
        return live

    async def publish(self) -> None:
        update, job = await self.box.plan()
        await self.box.updater.carry(update, job, None)
        self.gating.changed()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.gating.run())
        yield
        assert not task.done() or task.cancelled(), task.exception()
        task.cancel()
        await asyncio.wait([task])

    async def until_judged(self, n: int = 1) -> DeepVerdict:
        await self.box.until(lambda: len(self.verdicts) >= n)
        return self.verdicts[-1][1]


def test_what_went_live_is_compared_with_its_parent_and_the_verdict_is_kept(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        bench = Bench(box)
        async with bench.running():
            assert bench.gating.view().state == "idle"
            await bench.publish()
            verdict = await bench.until_judged()
        assert (verdict.verdict, verdict.against, verdict.rolled_back_to) == ("passed", 0, None)
        assert sorted(bench.sampler.asked) == sorted((text, version) for text in QUESTIONS for version in (0, 1))
        adapter = await box.store.lineage.get(1)
        assert adapter.deep == verdict
        assert (adapter.metrics["deep/prompts"], adapter.metrics["deep/implausible"]) == (8.0, -1.5)
        assert bench.gating.view() == deep_gating.View(state="idle", why="", verdict=verdict)

    async def after_a_restart(box: Any) -> None:
        bench = Bench(box)
        async with bench.running():
            await box.until(lambda: bench.gating.view().verdict is not None)
            await asyncio.sleep(0.02)
        assert bench.sampler.asked == bench.verdicts == []

    in_box(scenario)
    in_box(after_a_restart)


def test_a_worse_version_is_rolled_back_for_its_reason_and_what_it_left_is_looked_at(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        bench = Bench(box)
        async with bench.running():
            await bench.publish()
            await bench.until_judged()
            bench.sampler.stammering.add(2)
            await bench.publish()
            verdict = await bench.until_judged(2)
        assert (verdict.verdict, verdict.against, verdict.rolled_back_to) == ("refused", 1, 1)
        assert bench.reasons == [verdict.reason]
        assert "the same phrase" in verdict.reason
        assert box.store.lineage.live().version == 1
        assert (await box.store.lineage.get(2)).deep == verdict

    in_box(scenario)


@pytest.mark.parametrize(("why", "told"), [("pinned", "v1 is pinned"), ("promoted", "promoted v1")])
def test_a_refused_version_that_an_operator_wants_stays_and_it_is_said(in_box: InBox, why: str, told: str) -> None:
    async def scenario(box: Any) -> None:
        bench = Bench(box)
        bench.sampler.stammering.add(1)
        await bench.publish()
        lineage = box.store.lineage
        if why == "pinned":
            await lineage.set_pinned(True, version=1, if_live=1, caller=box.OPERATOR)
        else:
            await lineage.set_live(0, why="promoted", caller=box.OPERATOR, if_live=1, now=50.0)
            await lineage.set_live(1, why="promoted", caller=box.OPERATOR, if_live=0, now=51.0)
        async with bench.running():
            verdict = await bench.until_judged()
        assert (verdict.verdict, verdict.rolled_back_to) == ("refused", None)
        assert told in verdict.kept_why
        assert bench.reasons == []
        assert lineage.live().version == 1

    in_box(scenario)


def test_a_rollback_that_a_stop_cut_off_is_made_up_for(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        bench = Bench(box)
        bench.sampler.stammering.add(1)
        await bench.publish()
        cut_off = asyncio.Event()

        async def never(version: int, reason: str) -> Live:
            cut_off.set()
            await asyncio.Event().wait()
            raise AssertionError

        bench.roll_back = never  # type: ignore[method-assign]
        bench.gating = bench.build()
        async with bench.running():
            await cut_off.wait()
        assert (await box.store.lineage.get(1)).deep.verdict == "refused"

    async def after_a_restart(box: Any) -> None:
        bench = Bench(box)
        async with bench.running():
            verdict = await bench.until_judged()
        assert (verdict.rolled_back_to, bench.sampler.asked) == (0, [])

    in_box(scenario)
    in_box(after_a_restart)


def test_a_request_ends_the_answers_at_once_and_they_are_asked_for_again(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        bench = Bench(box)
        bench.sampler.holds = True
        async with bench.running():
            await bench.publish()
            await box.until(lambda: len(bench.sampler.waiting) == 8)
            bench.gating.users(1)
            assert all(future.done() for future in bench.sampler.waiting)
            await box.until(lambda: bench.gating.view().state == "waiting")
            assert "1 requests" in bench.gating.view().why
            await asyncio.sleep(0.02)
            assert len(bench.sampler.asked) == 8
            bench.sampler.holds = False
            bench.gating.users(0)
            assert (await bench.until_judged()).verdict == "passed"

    in_box(scenario)


def test_a_version_that_is_replaced_while_it_is_looked_at_gets_no_verdict_and_is_no_excuse_for_the_next(
    in_box: InBox,
) -> None:
    async def scenario(box: Any) -> None:
        bench = Bench(box)
        bench.blocked = "the learner is training"
        bench.sampler.stammering |= {1, 2}
        async with bench.running():
            await bench.publish()
            await box.until(lambda: bench.gating.view().state == "waiting")
            await bench.publish()
            bench.blocked = ""
            bench.gating.changed()
            verdict = await bench.until_judged(2)
        told = [(version, found.verdict, found.against, found.rolled_back_to) for version, found in bench.verdicts]
        assert told == [(2, "refused", 0, 1), (1, "refused", 0, 0)]
        assert verdict == bench.verdicts[-1][1]
        assert box.store.lineage.live().version == 0

    in_box(scenario)


def test_a_version_in_no_context_is_staged_and_a_prompt_that_is_refused_is_left_out(
    in_box: InBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep_proving, "PAUSE_S", 0.0)

    async def scenario(box: Any) -> None:
        bench = Bench(box)
        bench.blocked = "the learner is training"
        bench.sampler.refused.add(QUESTIONS[0])
        bench.sampler.lost = 1
        staged = box.stage.stage

        async def stage(adapter: protocol.AdapterRef, **changes: Any) -> Any:
            bench.sampler.missing.discard(adapter.version)
            return await staged(adapter, **changes)

        box.stage.stage = stage
        bench.gating = bench.build()
        async with bench.running():
            await bench.publish()
            n_staged = len(box.stage.staged)
            bench.sampler.missing.add(0)
            bench.blocked = ""
            bench.gating.changed()
            verdict = await bench.until_judged()
        assert box.stage.staged[n_staged:] == [0]
        assert (verdict.verdict, "7 prompts" in verdict.reason) == ("undecided", True)

    in_box(scenario)


def test_held_out_prompts_go_before_the_fixed_ones(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        bench = Bench(box)
        await box.answer(messages=[{"role": "user", "content": "Mine?"}], prompt_ids=(9, 9))
        async with bench.running():
            await bench.publish()
            await bench.until_judged()
        assert ("Mine?", 1) in bench.sampler.asked
        assert {text for text, _ in bench.sampler.asked} == {"Mine?", *QUESTIONS[:7]}  # 1024 tokens are 8 prompts

    in_box(scenario)


def test_answers_are_scored_and_judged_as_nobodys_episodes(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        bench = Bench(box)
        bench.judge = LightJudge()
        bench.gating = bench.build()
        async with bench.running():
            await bench.publish()
            box.worker.scored.clear()
            await bench.until_judged()
        ids = [episode.episode_id for score in box.worker.scored for episode in score.episodes]
        assert sorted(ids, reverse=True) == [FIRST_ID - number for number in range(16)]
        assert all(len(score.episodes) <= deep_proving.GROUP for score in box.worker.scored)
        assert (await box.store.lineage.get(1)).metrics["deep/reward"] == 1.0
        assert await box.store.episodes.get(ids) == []

    in_box(scenario)


def test_a_judge_that_cannot_be_asked_and_a_trainer_that_refuses_leave_out_their_figures(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        bench = Bench(box)
        bench.judge = LightJudge("it is not good enough")
        bench.gating = bench.build()
        async with bench.running():
            await bench.publish()
            box.worker.refuse_scores = True
            verdict = await bench.until_judged()
        metrics = (await box.store.lineage.get(1)).metrics
        assert verdict.verdict == "passed"
        assert not {"deep/reward", "deep/implausible"} & metrics.keys()

    in_box(scenario)


def test_corrections_are_scored_under_both_versions(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        bench = Bench(box)
        completion_id, _ = await box.answer()
        correction = dataclasses.replace(_feedback(completion_id), correction="Because of the air.")
        await box.store.feedback.add(correction, idempotency_key=None)
        (text,) = await box.store.written.untokenised(10, box.BASE_SHA256)
        await box.store.written.set_tokens(
            text.id, base_sha256=box.BASE_SHA256, prompt_ids=(), chosen_ids=(7, 8, 0), rejected_ids=()
        )
        async with bench.running():
            await bench.publish()
            box.worker.scored.clear()
            verdict = await bench.until_judged()
        now, then = box.worker.scored[-2:]
        assert [one.completion_ids for one in now.episodes] == [(7, 8, 0), (4, 5)]
        assert (now.reference.version, then.reference.version) == (1, 0)
        assert now.episodes == then.episodes
        metrics = (await box.store.lineage.get(1)).metrics
        assert (metrics["deep/corrections"], metrics["deep/corrections_fall"]) == (1.0, 0.0)
        assert "1 corrections hold" in verdict.reason

    in_box(scenario)


def _feedback(completion_id: str) -> NewFeedback:
    return NewFeedback(
        completion_id=completion_id,
        choice=0,
        rating=None,
        correction=None,
        reason=None,
        user=None,
        tags=(),
        source="api",
        caller="uid:1000",
    )


def test_workers_that_do_not_answer_leave_the_version_for_later(in_box: InBox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_proving, "PAUSE_S", 0.0)
    monkeypatch.setattr(deep_gating, "RETRY_S", 0.5)  # time enough to see what is said meanwhile

    async def scenario(box: Any) -> None:
        bench = Bench(box)
        bench.sampler.lost = 8 * 2 * (deep_proving.TROUBLES_MAX + 1)
        async with bench.running():
            await bench.publish()
            await box.until(lambda: "could not be looked at: it died" in bench.gating.view().why)
            assert (bench.gating.view().state, bench.gating.is_looking, bench.rests) == ("idle", False, [False])
            assert (await bench.until_judged()).verdict == "passed"

    in_box(scenario)


def test_a_damaged_ancestor_is_passed_over_for_the_next_one_that_is_whole(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        bench = Bench(box)
        async with bench.running():
            await bench.publish()
            await bench.until_judged()
            await bench.publish()
            await bench.until_judged(2)
            assert bench.verdicts[-1][1].against == 1
            bench.blocked = "the learner is training"
            await bench.publish()
            (box.folders.versions()[2] / "adapter.gguf").write_bytes(b"half")
            bench.blocked = ""
            bench.gating = bench.build()
        async with bench.running():
            assert (await bench.until_judged(3)).against == 1
            bench.blocked = "the learner is training"
            await bench.publish()
            for version in (1, 3):
                (box.folders.versions()[version] / "adapter.gguf").write_bytes(b"half")
            bench.gating = bench.build()
        bench.blocked = ""
        async with bench.running():
            assert (await bench.until_judged(4)).against == 0
        assert [version for version, _ in bench.verdicts] == [1, 2, 3, 4]

    in_box(scenario)


def test_switched_off_it_looks_at_nothing_until_it_is_switched_on(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        bench = Bench(box)
        bench.enabled = False
        async with bench.running():
            await bench.publish()
            await asyncio.sleep(0.02)
            assert (bench.gating.view().state, bench.sampler.asked) == ("off", [])
            bench.enabled = True
            bench.gating.changed()
            await bench.until_judged()

    in_box(scenario)
