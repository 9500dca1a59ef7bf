"""Pairs and corrections on disk: their tokens, and what becomes of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import apsw

from edged.records import Caller, Episode, NewFeedback, Preference, WrittenCounts, WrittenText, WrittenTokens
from edged.store import schema
from edged.store.store import Store

BASE = "b" * 64
InStore = Callable[[Callable[[Store], Awaitable[Any]]], Any]
MakeEpisode = Callable[..., Episode]
MakeFeedback = Callable[..., NewFeedback]


async def prefer(store: Store, user: str | None = None) -> str:
    pair = Preference(
        id="",
        messages=[{"role": "user", "content": "Why?"}],
        chosen="Because.",
        rejected="No.",
        user=user,
        caller="uid:1000",
        created_at=5.0,
    )
    return (await store.feedback.prefer(pair)).id


async def tokenise(store: Store, *ids: int, base: str = BASE) -> None:
    for written_id in ids:
        await store.written.set_tokens(
            written_id, base_sha256=base, prompt_ids=(1, 2), chosen_ids=(7, 8), rejected_ids=(9,)
        )


async def finish(store: Store, ids: list[int], verdict: Any) -> int:
    update = await store.updates.create(
        parent_version=0,
        seed=1,
        new_episode_ids=[],
        replay_episode_ids=[],
        new_feedback_ids=[],
        new_written_ids=ids,
        now=9.0,
    )
    await store.updates.finish(
        update.id,
        verdict=verdict,
        reason="r",
        seconds={},
        metrics={},
        now=10.0,
        publish=None,
        caller=Caller(name="learner", scopes=frozenset()),
    )
    return update.id


def test_a_preference_waits_for_tokens_and_then_for_an_update(in_store: InStore) -> None:
    async def scenario(store: Store) -> None:
        await prefer(store)
        (text,) = await store.written.untokenised(10, BASE)
        assert text == WrittenText(
            id=1,
            kind="pair",
            messages=[{"role": "user", "content": "Why?"}],
            prompt_tokens=0,
            chosen="Because.",
            rejected="No.",
        )
        assert await store.written.unused_written(10, BASE) == []
        await tokenise(store, 1)
        assert await store.written.untokenised(10, BASE) == []
        (waiting,) = await store.written.unused_written(10, BASE)
        assert (waiting.id, waiting.kind, waiting.written_at, waiting.differs) == (1, "pair", 5.0, True)
        assert await store.written.tokens([3, 1]) == [
            WrittenTokens(id=1, kind="pair", prompt_ids=(1, 2), chosen_ids=(7, 8), rejected_ids=(9,))
        ]

    in_store(scenario)


def test_a_correction_keeps_the_engines_own_ids_of_prompt_and_answer(
    in_store: InStore, make_episode: MakeEpisode, make_feedback: MakeFeedback
) -> None:
    async def scenario(store: Store) -> None:
        await store.episodes.add(make_episode("c1"))
        await store.feedback.add(make_feedback("c1", -1.0, correction="So."), idempotency_key=None)
        (text,) = await store.written.untokenised(10, BASE)
        assert (text.messages, text.prompt_tokens, text.chosen, text.rejected) == (None, 3, "So.", None)
        await tokenise(store, 1)
        (tokens,) = await store.written.tokens([1])
        assert (tokens.prompt_ids, tokens.chosen_ids, tokens.rejected_ids) == ((1, 2, 3), (7, 8), (4, 5))

    in_store(scenario)


def test_a_correction_that_repeats_the_answer_has_nothing_to_compare(
    in_store: InStore, make_episode: MakeEpisode, make_feedback: MakeFeedback
) -> None:
    async def scenario(store: Store) -> None:
        await store.episodes.add(make_episode("c1", completion_ids=(7, 8)))
        await store.feedback.add(make_feedback("c1", None, correction="So."), idempotency_key=None)
        await tokenise(store, 1)
        assert [one.differs for one in await store.written.unused_written(10, BASE)] == [False]

    in_store(scenario)


def test_only_the_correction_that_counts_waits(
    in_store: InStore, make_episode: MakeEpisode, make_feedback: MakeFeedback
) -> None:
    async def scenario(store: Store) -> None:
        await store.episodes.add(make_episode("c1"))
        for text, user in (("So.", "ann"), ("Thus.", "bob")):
            feedback = make_feedback("c1", None, correction=text, user=user)
            await store.feedback.add(feedback, idempotency_key=None)
        await tokenise(store, 1, 2)
        assert [one.id for one in await store.written.unused_written(10, BASE)] == [2]
        await store.episodes.delete_user("bob", caller=Caller(name="uid:0", scopes=frozenset()))
        assert [one.id for one in await store.written.unused_written(10, BASE)] == [1]
        assert (await store.written.counts()).corrections_waiting == 1

    in_store(scenario)


def test_what_an_update_used_is_used_for_good_unless_it_was_skipped(in_store: InStore) -> None:
    async def scenario(store: Store) -> None:
        await prefer(store)
        await tokenise(store, 1)
        await finish(store, [1], "skipped")
        assert [one.id for one in await store.written.unused_written(10, BASE)] == [1]
        update_id = await finish(store, [1], "refused")
        assert await store.written.unused_written(10, BASE) == []
        assert [(one.id, one.used_by) for one in await store.written.used_written(10, BASE)] == [(1, update_id)]

    in_store(scenario)


def test_another_base_model_gives_a_pair_new_tokens_and_lets_a_correction_wait(
    in_store: InStore, make_episode: MakeEpisode, make_feedback: MakeFeedback
) -> None:
    async def scenario(store: Store) -> None:
        await prefer(store)
        await store.episodes.add(make_episode("c1"))
        await store.feedback.add(make_feedback("c1", None, correction="So."), idempotency_key=None)
        await tokenise(store, 1, 2)
        assert [text.id for text in await store.written.untokenised(10, "c" * 64)] == [1]
        await tokenise(store, 1, base="c" * 64)
        assert [one.id for one in await store.written.unused_written(10, "c" * 64)] == [1]
        assert [one.id for one in await store.written.unused_written(10, BASE)] == [2]

    in_store(scenario)


def test_dropped_ones_are_counted_by_reason(in_store: InStore) -> None:
    async def scenario(store: Store) -> None:
        for _ in range(3):
            await prefer(store)
        await tokenise(store, 2)
        await finish(store, [2], "refused")
        await store.written.drop_written([(1, "bad_template"), (2, "empty")])
        assert await store.written.counts() == WrittenCounts(pairs_waiting=1, pairs_used=1, dropped={"bad_template": 1})

    in_store(scenario)


def test_what_a_user_wrote_goes_with_the_user(
    in_store: InStore, make_episode: MakeEpisode, make_feedback: MakeFeedback
) -> None:
    async def scenario(store: Store) -> None:
        await prefer(store, "ann")
        await store.episodes.add(make_episode("c1"))
        await store.feedback.add(make_feedback("c1", None, correction="So.", user="ann"), idempotency_key=None)
        await tokenise(store, 1, 2)
        await store.episodes.delete_user("ann", caller=Caller(name="uid:0", scopes=frozenset()))
        assert await store.written.tokens([1, 2]) == []
        await prefer(store)
        assert [text.id for text in await store.written.untokenised(10, BASE)] == [3]  # ids are never used twice

    in_store(scenario)


def test_what_was_written_before_the_table_was_there_waits_too() -> None:
    connection = apsw.Connection(":memory:")
    connection.execute(schema._STEPS[0])
    connection.pragma("application_id", schema.APPLICATION_ID)
    connection.pragma("user_version", 1)
    connection.execute("INSERT INTO preferences VALUES ('p', '[]', 'a', 'b', NULL, 'uid:1', 1.0)")
    schema.migrate(connection)
    assert connection.execute("SELECT kind, preference_id, state FROM written").fetchall() == [("pair", "p", "fresh")]
