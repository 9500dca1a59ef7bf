"""Episodes come back exactly; scores, lists, and forgetting a user."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from edged.records import Caller, Episode, EpisodeScore, NewFeedback, Preference
from edged.store.errors import StoreError
from edged.store.store import Store

InStore = Callable[..., Any]


def score(episode_id: int, kl: float = 0.5) -> EpisodeScore:
    return EpisodeScore(episode_id=episode_id, reference_version=0, reference_logprob=None, kl=kl, engine_gap=0.125)


def test_an_episode_comes_back_as_it_was(in_store: InStore, make_episode: Callable[..., Episode]) -> None:
    chat = make_episode("chatcmpl-1", logprobs=(-0.5, None), metadata={"a": "ü"}, user="ann", max_tokens=9)
    chat = dataclasses.replace(chat, shaped_by="min_p logit_bias")
    text = make_episode(
        "cmpl-1", kind="text", messages=None, prompt="Once\0 upon", completion_ids=(), logprobs=(), raw_logprobs=()
    )
    surrogate = make_episode("chatcmpl-2", messages=[{"role": "user", "content": "\ud800"}])

    async def scenario(store: Store) -> None:
        ids = [await store.episodes.add(episode) for episode in (chat, text, surrogate)]
        expected = [dataclasses.replace(e, id=i) for e, i in zip((chat, text, surrogate), ids, strict=True)]
        assert await store.episodes.get(ids) == expected
        assert store.episodes.count() == 3

    in_store(scenario)


def test_get_keeps_the_order_asked_and_leaves_out_what_is_not_there(
    in_store: InStore, make_episode: Callable[..., Episode]
) -> None:
    async def scenario(store: Store) -> None:
        ids = [await store.episodes.add(make_episode(f"c{i}")) for i in range(3)]
        asked = [ids[2], 999, ids[0], ids[2]]
        assert [episode.id for episode in await store.episodes.get(asked)] == [ids[2], ids[0], ids[2]]

    in_store(scenario)


def test_the_same_choice_cannot_be_stored_twice(in_store: InStore, make_episode: Callable[..., Episode]) -> None:
    async def scenario(store: Store) -> None:
        await store.episodes.add(make_episode("c"))
        with pytest.raises(StoreError, match="UNIQUE"):
            await store.episodes.add(make_episode("c"))
        assert store.episodes.count() == 1

    in_store(scenario)


def test_list_pages_by_id_and_filters_by_version_and_rating(
    in_store: InStore, make_episode: Callable[..., Episode], make_feedback: Callable[..., NewFeedback]
) -> None:
    async def scenario(store: Store) -> None:
        ids = [await store.episodes.add(make_episode(f"c{i}", version=i % 2)) for i in range(4)]
        await store.feedback.add(make_feedback("c1", 1.0), idempotency_key=None)
        await store.feedback.add(make_feedback("c2", None, correction="Better."), idempotency_key=None)
        await store.episodes.set_scores([score(ids[3])])

        async def listed(**filters: Any) -> list[int]:
            arguments = {"after": 0, "limit": 10, "version": None, "rated": None, **filters}
            return [episode.id for episode, _, _ in await store.episodes.list(**arguments)]

        assert await listed() == ids
        assert await listed(after=ids[0], limit=2) == ids[1:3]
        assert await listed(version=1) == [ids[1], ids[3]]
        assert await listed(rated=True) == [ids[1]]
        assert await listed(rated=False) == [ids[0], ids[2], ids[3]]
        entries = await store.episodes.list(after=0, limit=10, version=None, rated=None)
        assert [feedback and feedback.correction for _, feedback, _ in entries] == [None, None, "Better.", None]
        assert [found for _, _, found in entries] == [None, None, None, score(ids[3])]

    in_store(scenario)


def test_unscored_gives_the_newest_first_until_they_are_scored(
    in_store: InStore, make_episode: Callable[..., Episode]
) -> None:
    async def scenario(store: Store) -> None:
        ids = [await store.episodes.add(make_episode(f"c{i}", version=i)) for i in range(4)]
        await store.episodes.add(make_episode("empty", version=9, completion_ids=(), logprobs=(), raw_logprobs=()))
        other = await store.episodes.add(make_episode("other", version=9, base_sha256="f" * 64))

        async def unscored(limit: int, versions: Collection[int] | None, base_sha256: str | None = None) -> list[int]:
            found = await store.episodes.unscored(limit, versions, base_sha256=base_sha256)
            return [episode.id for episode in found]

        assert await unscored(10, range(1, 10)) == [other, *ids[:0:-1]]
        assert await unscored(10, {1, 2, 3, 9}, base_sha256="b" * 64) == ids[:0:-1]
        assert await unscored(2, None) == [other, ids[3]]
        await store.episodes.set_scores([score(other), score(ids[3]), score(999)])
        await store.episodes.set_scores([score(ids[3], kl=0.75)])
        assert await unscored(10, None) == [ids[2], ids[1], ids[0]]
        ((_, _, newest),) = await store.episodes.list(after=ids[2], limit=1, version=None, rated=None)
        assert newest == score(ids[3], kl=0.75)

    in_store(scenario)


def test_ids_are_not_used_again_after_a_deletion(
    in_store: InStore, make_episode: Callable[..., Episode], operator: Caller
) -> None:
    async def scenario(store: Store) -> None:
        first = await store.episodes.add(make_episode("a", user="ann"))
        await store.episodes.delete_user("ann", caller=operator)
        assert await store.episodes.add(make_episode("b")) == first + 1

    in_store(scenario)


def test_delete_user_removes_everything_of_that_person_and_nothing_else(
    in_store: InStore,
    make_episode: Callable[..., Episode],
    make_feedback: Callable[..., NewFeedback],
    operator: Caller,
    tmp_path: Path,
) -> None:
    secret = "the-secret-of-ann"

    async def scenario(store: Store) -> None:
        await store.episodes.add(make_episode("hers", user="ann", text=secret))
        await store.episodes.add(make_episode("his", user="bob"))
        await store.feedback.add(make_feedback("hers", 1.0, user="bob"), idempotency_key=None)
        bob = [
            await store.feedback.add(make_feedback("his", rating, user="bob"), idempotency_key=None)
            for rating in (1, 0)
        ]
        ann, _ = await store.feedback.add(make_feedback("his", -1.0, user="ann", reason=secret), idempotency_key=None)
        last, _ = await store.feedback.add(make_feedback("his", 0.5, user="bob", correction="x"), idempotency_key=None)
        hers, _ = await store.feedback.add(make_feedback("his", None, user="ann", correction="y"), idempotency_key=None)
        assert (last.replaces, hers.replaces) == (ann.id, last.id)
        for user, text in (("ann", secret), ("bob", "bobs")):
            pair = Preference(id="", messages=[], chosen="a", rejected=text, user=user, caller="uid:0", created_at=1.0)
            await store.feedback.prefer(pair)
        await store.episodes.set_scores([score(1), score(2)])

        assert await store.episodes.delete_user("ann", caller=operator) == 1
        assert [episode.completion_id for episode in await store.episodes.get([1, 2])] == ["his"]
        rows, _ = await store.feedback.list(completion_id=None, after=None, limit=10)
        assert [row.id for row in rows] == [bob[0][0].id, bob[1][0].id, last.id]
        assert rows[2].replaces == bob[1][0].id
        assert (store.episodes.count(), store.feedback.counts()) == (1, (3, 1))
        assert [choice.feedback_id for choice in await store.feedback.unused_rated(10)] == [last.id]
        assert (await store.written.counts()).corrections_waiting == 1
        entry, *_ = await store.audit.list(10)
        assert (entry.action, entry.caller, entry.detail["episodes"]) == ("delete_user", operator.name, 1)
        assert "ann" not in str(entry.detail)

    in_store(scenario)
    left = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"bobs" in left
    assert secret.encode() not in left


def test_removed_words_are_in_no_file_of_a_database_that_stays_open(
    in_store: InStore,
    make_episode: Callable[..., Episode],
    make_feedback: Callable[..., NewFeedback],
    operator: Caller,
    tmp_path: Path,
) -> None:
    secret = "the-secret-of-ann"

    def files() -> bytes:
        return b"".join(file.read_bytes() for file in tmp_path.iterdir())

    async def scenario(store: Store) -> None:
        await store.episodes.add(make_episode("hers", user="ann", text=secret))
        await store.episodes.add(make_episode("his", user="bob", text="of-bob"))
        await store.feedback.add(make_feedback("his", -1.0, user="ann", reason=secret), idempotency_key=None)
        assert secret.encode() in files()
        await store.episodes.delete_user("ann", caller=operator)
        assert secret.encode() not in files()
        assert b"of-bob" in files()

    in_store(scenario)


def test_when_the_newest_rating_is_deleted_the_one_before_counts_again(
    in_store: InStore, make_episode: Callable[..., Episode], make_feedback: Callable[..., NewFeedback], operator: Caller
) -> None:
    async def scenario(store: Store) -> None:
        await store.episodes.add(make_episode("c"))
        await store.feedback.add(make_feedback("c", 1.0, user="bob"), idempotency_key=None)
        await store.feedback.add(make_feedback("c", -1.0, user="ann"), idempotency_key=None)
        assert await store.episodes.delete_user("ann", caller=operator) == 0
        assert [choice.rating for choice in await store.feedback.unused_rated(10)] == [1.0]
        await store.episodes.delete_user("bob", caller=operator)
        assert await store.feedback.unused_rated(10) == []
        assert store.feedback.counts() == (0, 0)

    in_store(scenario)
