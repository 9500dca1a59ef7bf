"""Stored completions: which of the recorded answers are shown, in what order, and what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest

from edged.records import ShownCalls
from edged.refusal import Refused


async def store_some(store: Any, make_episode: Any) -> None:
    """a to e by two callers; b is not stored, c has two choices, d was cancelled in its second choice."""
    await store.episodes.add(make_episode("a", metadata={"shop": "1", "till": "x"}), store=True)
    await store.episodes.add(make_episode("b"))
    await store.episodes.add(make_episode("c", choice=1, text="Second.", metadata={"shop": "1"}), store=True)
    await store.episodes.add(make_episode("c", choice=0, text="First.", metadata={"shop": "1"}), store=True)
    await store.episodes.add(make_episode("d", choice=0), store=True)
    await store.episodes.add(make_episode("d", choice=1, finish_reason="cancelled"), store=True)
    await store.episodes.add(make_episode("e", caller="key:app", model="other", metadata={"shop": "2"}), store=True)


async def page(store: Any, **changes: Any) -> tuple[list[str], bool]:
    asked: dict[str, Any] = {
        "caller": None, "after": None, "limit": 20, "newest_first": False, "model": None, "metadata": {},
    }  # fmt: skip
    found, has_more = await store.completions.page(**{**asked, **changes})
    return [choices[0].episode.completion_id for choices in found], has_more


def test_what_was_asked_for_with_store_is_shown_in_the_order_of_its_recording(in_store: Any, make_episode: Any) -> None:
    async def scenario(store: Any) -> None:
        await store_some(store, make_episode)
        assert await page(store) == (["a", "c", "e"], False)
        assert await page(store, newest_first=True) == (["e", "c", "a"], False)
        assert await page(store, limit=2) == (["a", "c"], True)
        assert await page(store, after="c") == (["e"], False)
        assert await page(store, after="c", newest_first=True, limit=1) == (["a"], False)

    in_store(scenario)


def test_pages_are_of_a_caller_a_model_and_all_pairs_of_metadata(in_store: Any, make_episode: Any) -> None:
    async def scenario(store: Any) -> None:
        await store_some(store, make_episode)
        assert await page(store, caller="key:app") == (["e"], False)
        assert await page(store, model="other") == (["e"], False)
        assert await page(store, metadata={"shop": "1"}) == (["a", "c"], False)
        assert await page(store, metadata={"shop": "1", "till": "x"}) == (["a"], False)
        assert await page(store, metadata={"shop": '1" OR 1'}) == ([], False)

    in_store(scenario)


def test_a_page_behind_what_is_not_there_is_refused(in_store: Any, make_episode: Any) -> None:
    async def scenario(store: Any) -> None:
        await store_some(store, make_episode)
        for unknown in ("b", "nothing"):
            with pytest.raises(Refused) as caught:
                await page(store, after=unknown)
            assert (caught.value.status, caught.value.param) == (404, "after")
        with pytest.raises(Refused, match="completion"):
            await page(store, after="e", caller="uid:1000")

    in_store(scenario)


def test_a_completion_is_its_choices_in_order(in_store: Any, make_episode: Any) -> None:
    async def scenario(store: Any) -> None:
        await store_some(store, make_episode)
        assert [choice.episode.text for choice in await store.completions.get("c", caller=None)] == [
            "First.",
            "Second.",
        ]
        for hidden in ("b", "d", "nothing"):
            assert await store.completions.get(hidden, caller=None) == []
        assert await store.completions.get("c", caller="key:app") == []
        assert len(await store.completions.get("e", caller="key:app")) == 1

    in_store(scenario)


def test_metadata_is_changed_on_every_choice_and_survives(in_store: Any, make_episode: Any) -> None:
    async def change(store: Any) -> None:
        await store_some(store, make_episode)
        await store.completions.set_metadata("c", {"mark": "good"})

    async def look(store: Any) -> None:
        assert [choice.episode.metadata for choice in await store.completions.get("c", caller=None)] == [
            {"mark": "good"}
        ] * 2
        assert await page(store, metadata={"mark": "good"}) == (["c"], False)

    in_store(change)
    in_store(look)


def test_deleting_takes_the_episodes_and_what_was_said_of_them(
    in_store: Any, make_episode: Any, make_feedback: Any, operator: Any, tmp_path: Any
) -> None:
    async def scenario(store: Any) -> None:
        await store_some(store, make_episode)
        for choice in (0, 1):
            feedback = make_feedback("c", 1.0, choice=choice, correction="Zanzibar is better.")
            await store.feedback.add(feedback, idempotency_key=None)
        assert await store.completions.delete("c", caller=operator) == 2
        assert await page(store) == (["a", "e"], False)
        assert store.feedback.counts() == (0, 0)
        assert store.episodes.count() == 5
        assert (await store.audit.list(1))[0].detail == {"completion_id": "c", "episodes": 2}
        assert not any(b"Zanzibar" in file.read_bytes() for file in tmp_path.iterdir())

    in_store(scenario)


def test_a_user_who_is_removed_takes_stored_completions_along(in_store: Any, make_episode: Any, operator: Any) -> None:
    async def scenario(store: Any) -> None:
        await store.episodes.add(make_episode("a", user="ann"), store=True)
        await store.episodes.add(make_episode("b", user="bob"), store=True)
        await store.episodes.delete_user("ann", caller=operator)
        assert await page(store) == (["b"], False)

    in_store(scenario)


def test_an_answer_that_calls_tools_comes_back_as_it_was_shown(in_store: Any, make_episode: Any) -> None:
    shown = ShownCalls(text="Let me see.", calls=({"id": "call_1", "type": "function", "function": {"name": "f"}},))

    async def scenario(store: Any) -> None:
        raw = "Let me see.<tool_call>"
        await store.episodes.add(make_episode("a", text=raw), store=True, shown=shown)
        await store.episodes.add(make_episode("a", choice=1), store=True)
        calls, plain = await store.completions.get("a", caller=None)
        assert (calls.shown, calls.episode.text) == (shown, raw)
        assert plain.shown is None

    in_store(scenario)
