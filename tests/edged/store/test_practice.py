"""Practice answers on a real database: never a user's, judged and used once, gone with the user of their prompt."""

from __future__ import annotations

from typing import Any

import pytest

from edged.records import PublishedAdapter
from edged.refusal import Refused
from edged.store import practice
from edged.store.store import Store

BASE = "b" * 64
ANSWERS_TO = "v0-why"


async def ask_itself(store: Store, make_episode: Any, prompt_of: int | None, *, n: int = 2, name: str = "p") -> bool:
    answers = [make_episode(name, choice=choice, caller="practice") for choice in range(n)]
    return await store.practice.add_group(answers, prompt_of=prompt_of, answers_to=ANSWERS_TO)


def test_practice_answers_are_in_no_list_of_users_and_cannot_be_rated(
    in_store: Any, make_episode: Any, make_feedback: Any
) -> None:
    async def scenario(store: Store) -> None:
        asked = await store.episodes.add(make_episode("c1", user="ann"))
        assert await ask_itself(store, make_episode, asked)
        rows = await store.episodes.list(after=0, limit=10, version=None, rated=None)
        assert [(episode.id, episode.origin) for episode, _, _ in rows] == [(asked, "user")]
        rows = await store.episodes.list(after=0, limit=10, version=None, rated=None, origin="practice")
        assert [(episode.completion_id, episode.origin, episode.user) for episode, _, _ in rows] == [
            ("p", "practice", None),
            ("p", "practice", None),
        ]
        assert store.episodes.count() == 1
        with pytest.raises(Refused, match="no completion has the id 'p'"):
            await store.feedback.add(make_feedback("p", 1.0), idempotency_key=None)
        assert [prompt.prompt_of for prompt in await store.practice.prompts(10, BASE)] == [asked]

    in_store(scenario)
    assert in_store(counted) == 1


async def counted(store: Store) -> int:
    return store.episodes.count()


def test_prompts_are_those_of_users_each_once_the_last_first(in_store: Any, make_episode: Any) -> None:
    async def scenario(store: Store) -> None:
        await store.episodes.add(make_episode("c1", prompt_ids=(1, 2)))
        other = await store.episodes.add(make_episode("c2", prompt_ids=(3,), messages=None, prompt="Once", kind="text"))
        again = await store.episodes.add(make_episode("c3", prompt_ids=(1, 2)))
        await store.episodes.add(make_episode("c4", prompt_ids=(9,), base_sha256="c" * 64))
        found = await store.practice.prompts(10, BASE)
        assert [(prompt.prompt_of, prompt.prompt) for prompt in found] == [(again, None), (other, "Once")]
        assert [prompt.prompt_of for prompt in await store.practice.prompts(1, BASE)] == [again]
        assert (await store.practice.counts(BASE)).prompts == 2

    in_store(scenario)


def test_rewards_and_their_reasons_are_kept_and_counted_once(in_store: Any, make_episode: Any) -> None:
    async def scenario(store: Store) -> None:
        await store.practice.begin_round()
        await ask_itself(store, make_episode, None, n=3)
        ids = [episode.id for episode in await store.practice.unjudged(BASE)]
        rewards = [(ids[0], 0.5, None), (ids[1], None, "judge_timeout"), (ids[2], 1.0, "judge_clipped")]
        await store.practice.set_rewards(rewards, now=7.0)
        await store.practice.set_rewards([(ids[0], -1.0, None), (99, 1.0, None)], now=8.0)
        judged = await store.practice.judged(BASE)
        assert [(one.choice.episode_id, one.choice.rating, one.choice.rated_at) for one in judged] == [
            (ids[0], 0.5, 7.0),
            (ids[2], 1.0, 7.0),
        ]
        assert {one.answers_to for one in judged} == {ANSWERS_TO}
        await store.practice.skip([(ids[2], "equal_rewards"), (ids[1], "equal_rewards")])
        await store.practice.fail("prompt_refused")
        counts = await store.practice.counts(BASE)
        assert (counts.unjudged, counts.judged, counts.groups) == (0, 1, 1)
        assert (counts.rounds, counts.answers, counts.rewards) == (1, 3, 2)
        assert counts.reasons == {"judge_clipped": 1, "judge_timeout": 1, "prompt_refused": 1}
        assert counts.skipped == {"equal_rewards": 1}

    in_store(scenario)


def test_a_finished_update_uses_its_answers_and_a_skipped_one_leaves_them(
    in_store: Any, make_episode: Any, make_feedback: Any, operator: Any
) -> None:
    async def scenario(store: Store) -> None:
        await store.episodes.add(make_episode("c1"))
        await store.feedback.add(make_feedback("c1", 1.0), idempotency_key=None)
        await ask_itself(store, make_episode, None)
        ids = [episode.id for episode in await store.practice.unjudged(BASE)]
        await store.practice.set_rewards([(number, 0.5, None) for number in ids], now=7.0)
        for verdict, waiting, in_a_row in (("skipped", 2, 0), ("published", 0, 1)):
            live = store.lineage.live().version
            update = await store.updates.create(
                parent_version=live,
                seed=1,
                new_episode_ids=ids,
                replay_episode_ids=[],
                new_feedback_ids=[],
                now=9.0,
                origin="practice",
            )
            assert update.origin == "practice"
            finished = await store.updates.finish(
                update.id,
                verdict=verdict,
                reason="",
                seconds={},
                metrics={},
                now=10.0,
                publish=PublishedAdapter(folder="v", sha256="a", metrics={}) if verdict == "published" else None,
                caller=operator,
            )
            assert finished.origin == "practice"
            counts = await store.practice.counts(BASE)
            assert (counts.judged, counts.updates, counts.in_a_row) == (waiting, in_a_row, in_a_row)
        await store.feedback.add(make_feedback("c1", -1.0), idempotency_key=None)
        counts = await store.practice.counts(BASE)
        assert (counts.updates, counts.in_a_row) == (1, 0)

    in_store(scenario)


def test_what_a_user_asked_takes_the_answers_of_practice_with_it(
    in_store: Any, make_episode: Any, operator: Any
) -> None:
    async def scenario(store: Store) -> None:
        hers = await store.episodes.add(make_episode("c1", user="ann"))
        his = await store.episodes.add(make_episode("c2", user="bob"))
        await ask_itself(store, make_episode, hers, name="of hers")
        await ask_itself(store, make_episode, his, name="of his")
        await ask_itself(store, make_episode, None, name="of the file")
        assert await store.episodes.delete_user("ann", caller=operator) == 1
        left = {episode.completion_id for episode in await store.practice.unjudged(BASE)}
        assert left == {"of his", "of the file"}
        assert not await ask_itself(store, make_episode, hers, name="too late")
        assert (await store.practice.counts(BASE)).unjudged == 4
        assert store.episodes.count() == 1

    in_store(scenario)


def test_finished_answers_are_kept_for_a_while_and_their_counts_for_ever(
    in_store: Any, make_episode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(practice, "FINISHED_KEPT", 2)

    async def scenario(store: Store) -> None:
        await ask_itself(store, make_episode, None, n=4)
        ids = [episode.id for episode in await store.practice.unjudged(BASE)]
        await store.practice.set_rewards([(number, None, "judge_raised") for number in ids[:3]], now=1.0)
        await store.practice.begin_round()
        left = await store.episodes.list(after=0, limit=9, version=None, rated=None, origin="practice")
        assert [episode.id for episode, _, _ in left] == ids[1:]
        counts = await store.practice.counts(BASE)
        assert (counts.answers, counts.unjudged, counts.reasons) == (4, 1, {"judge_raised": 3})

    in_store(scenario)


def test_a_fitted_judge_gets_everything_that_is_rated_whatever_updates_make_of_it(
    in_store: Any, make_episode: Any, make_feedback: Any
) -> None:
    async def scenario(store: Store) -> None:
        for name, rating, changes in (
            ("c1", 1.0, {}),
            ("c2", -1.0, {"temperature": 0.0}),
            ("c3", 1.0, {"base_sha256": "c" * 64}),
            ("c4", 1.0, {"completion_ids": (), "logprobs": (), "raw_logprobs": ()}),
            ("c5", None, {}),
        ):
            await store.episodes.add(make_episode(name, **changes))
            await store.feedback.add(make_feedback(name, rating, correction="Well."), idempotency_key=None)
        await store.feedback.add(make_feedback("c1", 0.25), idempotency_key=None)
        found = await store.practice.rated_answers(10, BASE)
        assert [(answer.rating, answer.prompt_ids, answer.completion_ids) for answer in found] == [
            (0.25, (1, 2, 3), (4, 5)),
            (-1.0, (1, 2, 3), (4, 5)),
        ]

    in_store(scenario)
