"""Ratings: superseding, idempotency, and which of them wait for an update."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edged.records import Caller, Episode, Feedback, NewFeedback, Preference
from edged.refusal import Refused
from edged.store.store import Store
from edged.store.tally import Tally

InStore = Callable[..., Any]
MakeEpisode = Callable[..., Episode]
MakeFeedback = Callable[..., NewFeedback]


def refusal(outcome: object) -> tuple[int, str]:
    assert isinstance(outcome, Refused)
    return outcome.status, outcome.code


def test_feedback_comes_back_as_it_was(
    in_store: InStore, make_episode: MakeEpisode, make_feedback: MakeFeedback
) -> None:
    async def scenario(store: Store) -> None:
        await store.episodes.add(make_episode("c", choice=1))
        new = make_feedback(
            "c", -0.25, choice=1, correction="So.", reason="wrong", user="ann", tags=("a", "b"), source="page"
        )
        stored, is_new = await store.feedback.add(new, idempotency_key=None)
        assert is_new
        assert stored == Feedback(id=stored.id, created_at=stored.created_at, replaces=None, **dataclasses.asdict(new))
        assert await store.feedback.get(stored.id) == stored
        assert await store.feedback.get("fb-none") is None

    in_store(scenario)


def test_rating_again_supersedes_and_keeps_every_row(
    in_store: InStore, make_episode: MakeEpisode, make_feedback: MakeFeedback
) -> None:
    async def scenario(store: Store) -> None:
        await store.episodes.add(make_episode("c"))
        first, _ = await store.feedback.add(make_feedback("c", 1.0), idempotency_key=None)
        second, _ = await store.feedback.add(make_feedback("c", -1.0), idempotency_key=None)
        assert (first.replaces, second.replaces) == (None, first.id)
        assert store.feedback.counts() == (2, 1)
        assert [choice.rating for choice in await store.feedback.unused_rated(10)] == [-1.0]

    in_store(scenario)


@pytest.mark.parametrize("first", ["rating", "correction"])
def test_a_rating_and_a_correction_of_one_answer_both_count_whichever_comes_first(
    first: str, in_store: InStore, make_episode: MakeEpisode, make_feedback: MakeFeedback
) -> None:
    async def scenario(store: Store) -> None:
        await store.episodes.add(make_episode("c"))
        bodies = [make_feedback("c", -1.0), make_feedback("c", None, correction="So.")]
        for body in bodies if first == "rating" else reversed(bodies):
            stored, _ = await store.feedback.add(body, idempotency_key=None)
            assert stored.replaces is None
        assert store.feedback.counts() == (2, 1)
        assert [choice.rating for choice in await store.feedback.unused_rated(10)] == [-1.0]
        assert (await store.written.counts()).corrections_waiting == 1
        ((_, counting, _),) = await store.episodes.list(after=0, limit=10, version=None, rated=True)
        assert counting is not None
        assert (counting.rating, counting.correction) == (-1.0, "So.")

    in_store(scenario)


def test_a_row_with_both_replaces_the_newest_it_takes_something_of(
    in_store: InStore, make_episode: MakeEpisode, make_feedback: MakeFeedback
) -> None:
    async def scenario(store: Store) -> None:
        await store.episodes.add(make_episode("c"))
        rows = [
            (await store.feedback.add(make_feedback("c", rating, correction=correction), idempotency_key=None))[0]
            for rating, correction in ((1.0, None), (None, "a"), (0.5, "b"), (None, "c"), (-1.0, None))
        ]
        ids = [row.id for row in rows]
        assert [row.replaces for row in rows] == [None, None, ids[1], ids[2], ids[2]]
        assert (await store.written.counts()).corrections_waiting == 1
        ((_, counting, _),) = await store.episodes.list(after=0, limit=10, version=None, rated=True)
        assert counting is not None
        assert (counting.id, counting.rating, counting.correction) == (ids[4], -1.0, "c")

    in_store(scenario)


@pytest.mark.parametrize(("choice", "param"), [(1, "choice"), (0, "completion_id")])
def test_feedback_on_what_was_never_answered_is_refused(
    choice: int, param: str, in_store: InStore, make_episode: MakeEpisode, make_feedback: MakeFeedback
) -> None:
    async def scenario(store: Store) -> None:
        if choice:
            await store.episodes.add(make_episode("c"))
        with pytest.raises(Refused) as caught:
            await store.feedback.add(make_feedback("c", 1.0, choice=choice), idempotency_key="k")
        assert refusal(caught.value) == (404, "completion_not_found")
        assert caught.value.param == param
        assert store.feedback.counts() == (0, 0)

    in_store(scenario)


def test_the_same_key_and_body_gives_the_same_row(
    in_store: InStore, make_episode: MakeEpisode, make_feedback: MakeFeedback
) -> None:
    async def scenario(store: Store) -> None:
        await store.episodes.add(make_episode("c"))
        outcomes = await asyncio.gather(
            *[store.feedback.add(make_feedback("c", 1.0, tags=("t",)), idempotency_key="k") for _ in range(8)]
        )
        assert [is_new for _, is_new in outcomes] == [True] + [False] * 7
        assert len({stored.id for stored, _ in outcomes}) == 1
        assert store.feedback.counts() == (1, 1)

    in_store(scenario)


@pytest.mark.parametrize(
    "change",
    [
        {"rating": -1.0},
        {"rating": None},
        {"correction": "x"},
        {"reason": "x"},
        {"user": "x"},
        {"tags": ("x",)},
        {"source": "x"},
        {"completion_id": "d"},
        {"choice": 1},
    ],
)
def test_the_same_key_with_another_body_is_refused(
    change: dict[str, Any], in_store: InStore, make_episode: MakeEpisode, make_feedback: MakeFeedback
) -> None:
    async def scenario(store: Store) -> None:
        for completion_id, choice in (("c", 0), ("c", 1), ("d", 0)):
            await store.episodes.add(make_episode(completion_id, choice=choice))
        new = make_feedback("c", 1.0)
        await store.feedback.add(new, idempotency_key="k")
        with pytest.raises(Refused) as caught:
            await store.feedback.add(dataclasses.replace(new, **change), idempotency_key="k")
        assert refusal(caught.value) == (409, "idempotency_conflict")
        assert store.feedback.counts() == (1, 1)

    in_store(scenario)


def test_keys_of_different_callers_do_not_meet(
    in_store: InStore, make_episode: MakeEpisode, make_feedback: MakeFeedback
) -> None:
    async def scenario(store: Store) -> None:
        await store.episodes.add(make_episode("c"))
        for caller, rating in (("key:a", 1.0), ("key:b", -1.0)):
            _, is_new = await store.feedback.add(make_feedback("c", rating, caller=caller), idempotency_key="k")
            assert is_new

    in_store(scenario)


def test_a_batch_gives_one_result_for_each_item_in_order(
    in_store: InStore, make_episode: MakeEpisode, make_feedback: MakeFeedback
) -> None:
    async def scenario(store: Store) -> None:
        await store.episodes.add(make_episode("c"))
        items = [make_feedback("c", 1.0), make_feedback("none", 1.0), make_feedback("c", -1.0), make_feedback("c", 0.5)]
        outcomes = await store.feedback.add_many(items, idempotency_keys=["k", None, "k", None])
        stored, unknown, conflict, newest = outcomes
        assert refusal(unknown) == (404, "completion_not_found")
        assert refusal(conflict) == (409, "idempotency_conflict")
        assert isinstance(stored, tuple)
        assert isinstance(newest, tuple)
        (first, first_is_new), (last, last_is_new) = stored, newest
        assert (first_is_new, last_is_new, last.replaces) == (True, True, first.id)
        assert store.feedback.counts() == (2, 1)
        assert await store.feedback.add_many(items[:1], idempotency_keys=["k"]) == [(first, False)]
        assert await store.feedback.add_many([]) == []

    in_store(scenario)


def test_list_pages_oldest_first(in_store: InStore, make_episode: MakeEpisode, make_feedback: MakeFeedback) -> None:
    async def scenario(store: Store) -> None:
        for name in ("c", "d"):
            await store.episodes.add(make_episode(name))
        rows = [
            (await store.feedback.add(make_feedback("cd"[i % 2], i / 10), idempotency_key=None))[0] for i in range(5)
        ]
        assert await store.feedback.list(completion_id=None, after=None, limit=5) == (rows, False)
        assert await store.feedback.list(completion_id=None, after=rows[0].id, limit=2) == (rows[1:3], True)
        assert await store.feedback.list(completion_id="c", after=rows[0].id, limit=5) == ([rows[2], rows[4]], False)
        with pytest.raises(Refused) as caught:
            await store.feedback.list(completion_id=None, after="fb-none", limit=5)
        assert refusal(caught.value) == (404, "feedback_not_found")

    in_store(scenario)


def test_a_preference_gets_an_id_of_its_own_unless_it_has_one(in_store: InStore) -> None:
    pair = Preference(id="", messages=[], chosen="a", rejected="b", user=None, caller="uid:0", created_at=1.0)

    async def scenario(store: Store) -> None:
        stored = [await store.feedback.prefer(pair) for _ in range(2)]
        assert stored[0].id != stored[1].id
        assert dataclasses.replace(stored[0], id="") == pair
        named = dataclasses.replace(pair, id="pref-1")
        assert await store.feedback.prefer(named) == named

    in_store(scenario)


async def finish(store: Store, feedback_ids: list[str], verdict: Any, operator: Caller) -> int:
    """An update that used these ratings as new, with a verdict that publishes nothing; its id."""
    update = await store.updates.create(
        parent_version=0, seed=0, new_episode_ids=[], replay_episode_ids=[], new_feedback_ids=feedback_ids, now=1.0
    )
    await store.updates.finish(
        update.id, verdict=verdict, reason="r", seconds={}, metrics={}, now=2.0, publish=None, caller=operator
    )
    return update.id


def test_unused_ratings_come_oldest_first_and_used_ones_newest_first(
    in_store: InStore, make_episode: MakeEpisode, make_feedback: MakeFeedback, operator: Caller
) -> None:
    async def scenario(store: Store) -> None:
        for i in range(4):
            await store.episodes.add(make_episode(f"c{i}", version=i, logprobs=(-1.0, None if i == 3 else -1.0)))
        ids = [(await store.feedback.add(make_feedback(f"c{i}", 1), idempotency_key=None))[0].id for i in (2, 0, 1, 3)]
        unused = await store.feedback.unused_rated(10)
        assert [choice.feedback_id for choice in unused] == ids
        assert [choice.logprobs_complete for choice in unused] == [True, True, True, False]
        assert [choice.feedback_id for choice in await store.feedback.unused_rated(2)] == ids[:2]
        update_id = await finish(store, ids[:3], "refused", operator)
        assert [choice.feedback_id for choice in await store.feedback.unused_rated(10)] == ids[3:]
        used = await store.feedback.used_rated({1, 2}, 10)
        assert [(choice.version, choice.used_by) for choice in used] == [(1, update_id), (2, update_id)]
        assert len(await store.feedback.used_rated(None, 1)) == 1

    in_store(scenario)


def test_rating_a_trained_choice_again_changes_its_reward_and_does_not_bring_it_back(
    in_store: InStore, make_episode: MakeEpisode, make_feedback: MakeFeedback, operator: Caller
) -> None:
    async def scenario(store: Store) -> None:
        await store.episodes.add(make_episode("c"))
        row, _ = await store.feedback.add(make_feedback("c", 1.0), idempotency_key=None)
        await finish(store, [row.id], "failed", operator)
        await store.feedback.add(make_feedback("c", -1.0), idempotency_key=None)
        assert await store.feedback.unused_rated(10) == []
        assert [choice.rating for choice in await store.feedback.used_rated(None, 10)] == [-1.0]
        await store.feedback.add(make_feedback("c", None, correction="x"), idempotency_key=None)
        assert [choice.rating for choice in await store.feedback.used_rated(None, 10)] == [-1.0]

    in_store(scenario)


def test_a_rating_that_came_while_its_choice_was_trained_counts_as_used(
    in_store: InStore, make_episode: MakeEpisode, make_feedback: MakeFeedback, operator: Caller
) -> None:
    async def scenario(store: Store) -> None:
        await store.episodes.add(make_episode("c"))
        planned, _ = await store.feedback.add(make_feedback("c", 1.0), idempotency_key=None)
        await store.feedback.add(make_feedback("c", -1.0), idempotency_key=None)
        await finish(store, [planned.id], "refused", operator)
        assert await store.feedback.unused_rated(10) == []

    in_store(scenario)


def test_a_skipped_update_leaves_its_ratings_unused(
    in_store: InStore, make_episode: MakeEpisode, make_feedback: MakeFeedback, operator: Caller
) -> None:
    async def scenario(store: Store) -> None:
        await store.episodes.add(make_episode("c"))
        row, _ = await store.feedback.add(make_feedback("c", 1.0), idempotency_key=None)
        await finish(store, [row.id], "skipped", operator)
        assert [choice.feedback_id for choice in await store.feedback.unused_rated(10)] == [row.id]

    in_store(scenario)


def test_a_dropped_rating_is_counted_once_and_comes_back_only_by_rating_again(
    in_store: InStore, make_episode: MakeEpisode, make_feedback: MakeFeedback
) -> None:
    async def scenario(store: Store) -> None:
        await store.episodes.add(make_episode("c"))
        row, _ = await store.feedback.add(make_feedback("c", 1.0), idempotency_key=None)
        await store.feedback.drop([(row.id, "greedy"), (row.id, "stale"), ("fb-none", "stale")])
        assert await store.feedback.unused_rated(10) == []
        assert store.feedback.drop_counts() == {"greedy": 1}
        assert store.feedback.counts() == (1, 1)
        await store.feedback.add(make_feedback("c", None, correction="x"), idempotency_key=None)
        assert await store.feedback.unused_rated(10) == []
        again, _ = await store.feedback.add(make_feedback("c", 0.5), idempotency_key=None)
        assert [choice.feedback_id for choice in await store.feedback.unused_rated(10)] == [again.id]

    in_store(scenario)


_choice = st.integers(0, 3)
_step = st.one_of(
    st.tuples(
        st.just("rate"),
        _choice,
        st.sampled_from([(None, "x"), (-1.0, None), (0.5, "x"), (1.0, None)]),
        st.sampled_from([None, "k", "l"]),
    ),
    st.tuples(st.just("drop"), _choice),
    st.tuples(st.just("train"), st.sets(_choice), st.sampled_from(["refused", "failed", "skipped"])),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(_step, max_size=20))
@example(
    [
        ("rate", 0, (1.0, None), None),
        ("train", {0}, "refused"),
        ("rate", 0, (-1.0, None), None),
        ("rate", 1, (1.0, None), "k"),
        ("drop", 1),
        ("rate", 1, (None, "x"), None),
        ("rate", 1, (0.5, "x"), None),
        ("train", {0, 1}, "skipped"),
        ("rate", 1, (1.0, None), "k"),
        ("rate", 2, (1.0, None), "k"),
    ]
)
def test_any_sequence_of_ratings_drops_and_updates_agrees_with_a_plain_model(
    make_episode: MakeEpisode, make_feedback: MakeFeedback, operator: Caller, steps: list[Any]
) -> None:
    async def scenario(store: Store) -> None:
        newest: dict[int, Feedback] = {}  # by choice
        rated: dict[int, Feedback] = {}  # the newest with a rating
        corrected: dict[int, Feedback] = {}  # the newest with a correction
        keyed: dict[str, Feedback] = {}
        order: list[str] = []
        used: set[int] = set()
        dropped: set[str] = set()
        for i in range(4):
            await store.episodes.add(make_episode("c", choice=i))
        for step in steps:
            if step[0] == "rate":
                _, choice, (rating, correction), key = step
                new = make_feedback("c", rating, choice=choice, correction=correction)
                earlier = keyed.get(key)
                if earlier is not None and (earlier.choice, earlier.rating) != (choice, rating):
                    with pytest.raises(Refused):
                        await store.feedback.add(new, idempotency_key=key)
                    continue
                stored, is_new = await store.feedback.add(new, idempotency_key=key)
                if earlier is not None:
                    assert (stored, is_new) == (earlier, False)
                    continue
                assert is_new
                taken = [
                    rows[choice].id
                    for rows, has in ((rated, rating), (corrected, correction))
                    if has and choice in rows
                ]
                assert stored.replaces == max(taken, key=order.index, default=None)
                newest[choice] = stored
                if rating is not None:
                    rated[choice] = stored
                if correction is not None:
                    corrected[choice] = stored
                order.append(stored.id)
                if key is not None:
                    keyed[key] = stored
            elif step[0] == "drop":
                row = rated.get(step[1])
                if row is not None:
                    await store.feedback.drop([(row.id, "r")])
                    if step[1] not in used:
                        dropped.add(row.id)
            else:
                rows = [newest[choice].id for choice in step[1] if choice in newest]
                await finish(store, rows, step[2], operator)
                if step[2] != "skipped":
                    used |= {choice for choice in step[1] if choice in newest}
        by_age = sorted(rated, key=lambda choice: order.index(rated[choice].id))
        unused = [rated[choice].id for choice in by_age if choice not in used and rated[choice].id not in dropped]
        assert [row.feedback_id for row in await store.feedback.unused_rated(100)] == unused
        trained = [rated[choice].id for choice in reversed(by_age) if choice in used]
        assert [row.feedback_id for row in await store.feedback.used_rated(None, 100)] == trained
        assert store.feedback.counts() == (len(order), len(rated))
        assert store.feedback.drop_counts() == ({"r": len(dropped)} if dropped else {})
        assert (await store.written.counts()).corrections_waiting == len(corrected)

    async def opened(folder: str) -> None:
        ticks = itertools.count()
        path = Path(folder) / "edged.db"
        store = await Store.open(path, clock=lambda: float(next(ticks)))
        await scenario(store)
        counted = store.feedback.counts(), store.feedback.drop_counts(), store.episodes.count()
        await store.close()
        store = await Store.open(path)
        assert counted == (store.feedback.counts(), store.feedback.drop_counts(), store.episodes.count())
        await store.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(opened(folder))


def test_a_tally_can_take_over_another() -> None:
    tally = Tally(episodes=1, feedback=2, ratings=3, drops={})
    other = Tally(episodes=4, feedback=5, ratings=6, drops={"stale": 1})
    tally.replace(other)
    assert tally == other
