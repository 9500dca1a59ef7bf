"""Practice on a real store, with a real learner and updater; the sampler, the judge and the workers are light."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from edged.failure import JobRefused
from edged.learn import practising
from edged.learn.judging import Judgement
from edged.learn.practice import Rules
from edged.learn.practising import PracticeSettings, Practising, read_prompts
from edged.records import Episode, PracticePrompt
from engine import protocol

NUMBERS = itertools.count(1)  # over restarts

Reward = Callable[[protocol.JudgeItem], tuple[float | None, str | None]]


class Gone(Exception):
    """What the light sampler raises when it is interrupted."""


class LightSampler:
    """Answers at once, or not at all while `holds`. The answers to one prompt differ in length."""

    def __init__(self, version: Callable[[], int]) -> None:
        self.version = version
        self.asked: list[PracticePrompt] = []
        self.holds = False
        self.refuses = ""
        self.waiting: list[asyncio.Future[None]] = []
        self.interruptions = 0

    async def sample(self, prompt: PracticePrompt, *, n: int, max_tokens: int, seed: int) -> list[Episode]:
        self.asked.append(prompt)
        if self.refuses and self.refuses in str(prompt.messages):
            raise JobRefused("context_length_exceeded", "the prompt is too long")
        if self.holds:
            self.waiting.append(asyncio.get_running_loop().create_future())
            await self.waiting[-1]
        await asyncio.sleep(0)
        completion_id = f"practice-{next(NUMBERS)}"
        return [self.answer(prompt, completion_id, choice) for choice in range(n)]

    def interrupt(self) -> None:
        self.interruptions += 1
        for future in self.waiting:
            if not future.done():
                future.set_exception(Gone())

    def answer(self, prompt: PracticePrompt, completion_id: str, choice: int) -> Episode:
        return Episode(
            id=0,
            completion_id=completion_id,
            choice=choice,
            created_at=1.0,
            kind="chat",
            model="small",
            base_sha256="b" * 64,
            version=self.version(),
            messages=prompt.messages,
            prompt=prompt.prompt,
            prompt_ids=tuple(str(prompt.messages).encode()),
            completion_ids=(4,) * (choice + 1),
            logprobs=(-0.5,) * (choice + 1),
            raw_logprobs=(-0.5,) * (choice + 1),
            text="a" * (choice + 1),
            finish_reason="stop",
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            seed=1,
            max_tokens=8,
            user=None,
            metadata={},
            caller="practice",
            origin="practice",
        )


class LightJudge:
    """Likes short answers, or whatever `reward` says."""

    def __init__(self) -> None:
        self.reward: Reward = lambda item: (1.0 - len(item.answer) / 4, None)
        self.why_not: str | None = None
        self.judged: list[int] = []
        self.counts: collections.Counter[str] = collections.Counter()

    async def prepare(self) -> str | None:
        self.counts["prepared"] += 1
        return self.why_not

    async def judge(self, items: Sequence[protocol.JudgeItem]) -> list[Judgement]:
        self.judged += [item.episode_id for item in items]
        return [
            Judgement(episode_id=item.episode_id, reward=reward, reason=reason)
            for item in items
            for reward, reason in [self.reward(item)]
        ]

    def rated(self) -> None:
        self.counts["rated"] += 1

    def rest(self) -> None:
        self.counts["rested"] += 1


class Gym:
    """Practice on a box. Idle from the start; one update, then it waits for a person."""

    def __init__(self, box: Any) -> None:
        self.box = box
        self.sampler = LightSampler(lambda: int(box.store.lineage.live().version))
        self.judge = LightJudge()
        self.blocked = ""
        self.prompts_file = ""
        self.idle_s = 0.0
        self.updates_max = 1
        self.practising = Practising(
            settings=self._settings,
            blocked=lambda: self.blocked,
            book=box.store.practice,
            sampler=self.sampler,
            interrupted=Gone,
            judge=self.judge,
            trainer=box.learner,
            base_sha256=box.BASE_SHA256,
            on_change=lambda: None,
        )

    def _settings(self) -> PracticeSettings:
        return PracticeSettings(
            rules=Rules(off="", idle_s=self.idle_s, round_prompts=2, updates_max=self.updates_max),
            group_size=2,
            max_tokens=8,
            prompts_file=self.prompts_file,
            at_once=8,
            seed=1,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.practising.run()), group.create_task(self.box.learner.run())]
            yield
            for task in tasks:
                task.cancel()

    async def ask(self, *questions: str, **changes: Any) -> None:
        """What users have asked."""
        for question in questions:
            messages = [{"role": "user", "content": question}]
            await self.box.answer(messages=messages, prompt_ids=tuple(question.encode()), **changes)

    async def until(self, state: str) -> None:
        await self.box.until(lambda: self.practising.view().state == state)

    async def trouble(self) -> str:
        """What holds practice."""
        await self.box.until(lambda: "tried again" in self.practising.view().why)
        return self.practising.view().why


def test_an_idle_box_asks_itself_what_users_asked_and_publishes_what_it_learned(in_box: Any) -> None:
    async def scenario(box: Any) -> None:
        gym = Gym(box)
        await gym.ask("Why?", "How?", "When?")
        async with gym.running():
            await gym.until("limit")
        assert len({str(prompt.messages) for prompt in gym.sampler.asked}) == 2
        (update,) = box.finished
        assert (update.origin, update.verdict, update.version) == ("practice", "published", 1)
        assert (len(update.new_episode_ids), update.replay_episode_ids) == (4, ())
        counts = gym.practising.view().counts
        assert (counts.rounds, counts.answers, counts.rewards, counts.updates, counts.in_a_row) == (1, 4, 4, 1, 1)
        assert (counts.unjudged, counts.judged) == (0, 0)
        assert box.store.episodes.count() == 3
        assert "seconds" not in counts.reasons
        assert "rating_to_live" not in update.seconds

    async def after_a_restart(box: Any) -> None:
        gym = Gym(box)
        async with gym.running():
            await gym.until("limit")
        assert gym.sampler.asked == []

    in_box(scenario)
    in_box(after_a_restart)


def test_the_job_of_practice_has_the_judges_rewards_in_groups_of_prompt_and_version(in_box: Any) -> None:
    async def scenario(box: Any) -> None:
        gym = Gym(box)
        box.objectives = {"grpo": 1.0}
        await gym.ask("Why?", "How?")
        box.worker.behaviours.append("hang")
        async with gym.running():
            await box.until(lambda: bool(box.worker.trained))
            (update,) = await box.store.updates.unfinished()
            job = box.folders.read_job(update.id)
        assert sorted((one.reward, one.replay) for one in job.episodes) == [(0.5, False)] * 2 + [(0.75, False)] * 2
        groups = collections.Counter(one.group for one in job.episodes)
        assert sorted(groups.values()) == [2, 2]
        assert all(group.startswith("v0-") for group in groups)

    in_box(scenario)


def test_a_request_of_a_user_ends_sampling_at_once_and_the_round_goes_on_when_the_box_is_idle_again(
    in_box: Any,
) -> None:
    async def scenario(box: Any) -> None:
        gym = Gym(box)
        gym.sampler.holds = True
        await gym.ask("Why?", "How?")
        async with gym.running():
            await box.until(lambda: len(gym.sampler.waiting) == 2)
            gym.practising.users(1)
            assert gym.sampler.interruptions == 1
            await box.until(lambda: gym.practising.view().why == "people are served")
            assert (await box.store.practice.counts(box.BASE_SHA256)).answers == 0
            gym.sampler.holds = False
            gym.practising.users(0)
            await gym.until("limit")
        assert [update.verdict for update in box.finished] == ["published"]

    in_box(scenario)


def test_groups_of_equal_rewards_are_skipped_and_counted(in_box: Any) -> None:
    async def scenario(box: Any) -> None:
        gym = Gym(box)
        gym.updates_max = 8
        box.objectives = {"rloo": 1.0}
        gym.judge.reward = lambda item: (0.5, None)
        await gym.ask("Why?")
        async with gym.running():
            await box.until(lambda: gym.practising.view().counts.skipped.get("equal_rewards", 0) >= 4)
        assert box.finished == []

    in_box(scenario)


def test_a_judge_that_rewards_nothing_is_left_alone_with_its_reasons_counted_until_somebody_rates(in_box: Any) -> None:
    async def scenario(box: Any) -> None:
        gym = Gym(box)
        gym.judge.reward = lambda item: (None, "judge_timeout")
        await gym.ask("Why?", "How?")
        async with gym.running():
            assert "judge_timeout" in await gym.trouble()
            assert gym.practising.view().counts.reasons == {"judge_timeout": 4}
            assert gym.judge.counts["rested"] == 1
            gym.judge.reward = lambda item: (len(item.answer) / 4, None)
            gym.practising.rated()
            await gym.until("limit")
        assert gym.judge.counts["rated"] == 1
        assert len(box.finished) == 1

    in_box(scenario)


def test_nothing_is_sampled_for_a_judge_that_cannot_judge(in_box: Any) -> None:
    async def scenario(box: Any) -> None:
        gym = Gym(box)
        gym.judge.why_not = "10 rated answers; it is fitted from 32 on"
        await gym.ask("Why?")
        async with gym.running():
            assert (await gym.trouble()).startswith("10 rated answers; it is fitted from 32 on")
        assert gym.sampler.asked == []

    in_box(scenario)


def test_ratings_go_first_and_are_not_mixed_with_rewards(in_box: Any) -> None:
    async def scenario(box: Any) -> None:
        gym = Gym(box)
        await gym.ask("Why?")
        await box.rate(*[1.0, -1.0] * 8)
        async with gym.running():
            await box.until(lambda: len(box.finished) == 2)
        assert sorted(update.origin for update in box.finished) == ["practice", "ratings"]
        of_ratings = next(update for update in box.finished if update.origin == "ratings")
        rated = {episode.id for episode in await box.store.episodes.get(of_ratings.new_episode_ids)}
        assert len(rated) == 16
        asked = await box.store.episodes.get(of_ratings.new_episode_ids)
        assert {episode.origin for episode in asked} == {"user"}

    in_box(scenario)


def test_nothing_begins_while_the_rest_of_the_box_needs_it(in_box: Any) -> None:
    async def scenario(box: Any) -> None:
        gym = Gym(box)
        gym.blocked = "the learner is paused (paused by the operator)"
        await gym.ask("Why?")
        async with gym.running():
            await box.until(lambda: gym.practising.view().why == gym.blocked)
            gym.blocked = ""
            gym.practising.changed()
            await gym.until("limit")

    in_box(scenario)


def test_answers_that_wait_for_the_judge_or_for_an_update_are_taken_up_by_the_next_start(in_box: Any) -> None:
    async def scenario(box: Any) -> None:
        gym = Gym(box)
        await gym.ask("Why?", "How?")
        gym.judge.judge = lambda items: asyncio.Event().wait()  # type: ignore[assignment, return-value]
        async with gym.running():
            await gym.until("judging")

    async def after_a_kill(box: Any) -> None:
        gym = Gym(box)
        async with gym.running():
            await gym.until("limit")
        assert gym.sampler.asked == []
        assert len(gym.judge.judged) == 4
        assert [update.verdict for update in box.finished] == ["published"]

    in_box(scenario)
    in_box(after_a_kill)


def test_an_update_that_cannot_be_made_leaves_the_answers_to_a_later_one(in_box: Any) -> None:
    async def scenario(box: Any) -> None:
        gym = Gym(box)
        box.worker.fault = protocol.Fault(code="model_unreadable", message="no such file")
        await gym.ask("Why?")
        async with gym.running():
            assert "no update could be made" in await gym.trouble()
        assert [update.verdict for update in box.finished] == ["skipped"]
        assert gym.practising.view().counts.judged == 2

    in_box(scenario)


def test_prompts_of_a_user_who_is_removed_leave_no_answer_and_no_update(in_box: Any) -> None:
    async def scenario(box: Any) -> None:
        gym = Gym(box)
        gym.sampler.holds = True
        await gym.ask("Why?", user="ann")
        async with gym.running():
            await box.until(lambda: len(gym.sampler.waiting) == 1)
            await box.store.episodes.delete_user("ann", caller=box.OPERATOR)
            gym.practising.removed()
            gym.sampler.waiting[0].set_result(None)
            await box.until(lambda: gym.practising.view().why == "there are no prompts yet")
        assert gym.practising.view().counts.answers == 0
        assert gym.judge.judged == []

    in_box(scenario)


def test_what_is_no_file_of_prompts_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"):
        read_prompts(pipe)
    with pytest.raises(OSError, match="not a regular file"):
        read_prompts(tmp_path)
    with large.open("wb") as file:
        file.truncate(practising.PROMPTS_FILE_BYTES + 1)
    with pytest.raises(OSError, match="at most"):
        read_prompts(large)


def test_a_prompt_that_stands_in_the_operators_file_too_is_practised_once_a_round(in_box: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("Why?\n")

    async def scenario(box: Any) -> None:
        gym = Gym(box)
        gym.prompts_file = str(file)
        messages = [{"role": "user", "content": "Why?"}]
        await box.answer(messages=messages, prompt_ids=tuple(str(messages).encode()))
        async with gym.running():
            await gym.until("limit")
        assert gym.practising.view().counts.rounds == 1

    in_box(scenario)


def test_prompts_of_the_operators_file_are_enough_and_one_that_is_refused_is_counted(
    in_box: Any, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("What is a cat?\n\n  What is a dog?  \nWhat is a cat?\n")
    assert read_prompts(file) == ("What is a cat?", "What is a dog?")

    async def scenario(box: Any) -> None:
        gym = Gym(box)
        gym.prompts_file = str(file)
        gym.sampler.refuses = "dog"
        async with gym.running():
            await box.until(lambda: gym.practising.view().counts.reasons.get("prompt_refused", 0) >= 1)
            gym.sampler.refuses = ""
            await gym.until("limit")
        assert [update.origin for update in box.finished] == ["practice"]

    async def without_the_file(box: Any) -> None:
        gym = Gym(box)
        gym.updates_max = 2
        gym.prompts_file = str(tmp_path / "gone.txt")
        async with gym.running():
            assert "practice.prompts_file cannot be read" in await gym.trouble()
        assert gym.practising.view().counts.reasons["prompts_file"] == 1

    in_box(scenario)
    in_box(without_the_file)
