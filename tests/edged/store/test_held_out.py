"""Prompts that no update has learned from, on a real database."""

from __future__ import annotations

from typing import Any

from edged.store.store import Store

BASE = "b" * 64


async def prompts(store: Store, limit: int = 10, tokens_max: int = 100) -> list[int | None]:
    return [one.prompt_of for one in await store.held_out.prompts(limit, BASE, tokens_max=tokens_max)]


def test_prompts_of_users_are_held_out_until_an_update_uses_an_answer_to_them(
    in_store: Any, make_episode: Any, make_feedback: Any, operator: Any
) -> None:
    async def scenario(store: Store) -> None:
        rated = await store.episodes.add(make_episode("c1", prompt_ids=(1,)))
        free = await store.episodes.add(make_episode("c2", prompt_ids=(2,)))
        again = await store.episodes.add(make_episode("c3", prompt_ids=(1,)))
        await store.episodes.add(make_episode("c4", prompt_ids=(3,), base_sha256="c" * 64))
        await store.episodes.add(make_episode("c5", prompt_ids=tuple(range(101))))
        assert await prompts(store) == [again, free]
        assert await prompts(store, limit=1) == [again]
        assert await prompts(store, tokens_max=101) == [again + 2, again, free]
        feedback, _ = await store.feedback.add(make_feedback("c1", 1.0), idempotency_key=None)
        update = await store.updates.create(
            parent_version=0,
            seed=1,
            new_episode_ids=[rated],
            replay_episode_ids=[],
            new_feedback_ids=[feedback.id],
            now=1.0,
        )
        assert await prompts(store) == [again, free]
        await store.updates.finish(
            update.id,
            verdict="refused",
            reason="no",
            seconds={},
            metrics={},
            now=2.0,
            publish=None,
            caller=operator,
        )
        assert await prompts(store) == [free]

    in_store(scenario)


def test_what_the_box_asked_itself_is_none_and_a_prompt_keeps_its_words(in_store: Any, make_episode: Any) -> None:
    async def scenario(store: Store) -> None:
        await store.practice.add_group([make_episode("p", prompt_ids=(5,))], prompt_of=None, answers_to="v0-why")
        assert await prompts(store) == []
        await store.episodes.add(make_episode("c1", prompt_ids=(6,), messages=None, prompt="Once", kind="text"))
        (found,) = await store.held_out.prompts(10, BASE, tokens_max=9)
        assert (found.messages, found.prompt) == (None, "Once")

    in_store(scenario)
