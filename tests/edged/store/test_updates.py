"""The life of an update in the store, and the one transaction that ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from edged.records import Caller, Episode, NewFeedback, PublishedAdapter, Update, Verdict
from edged.refusal import Refused
from edged.store.errors import StoreError
from edged.store.store import Store

InStore = Callable[..., Any]

PUBLISHED = PublishedAdapter(sha256="a" * 64, folder="v1-aaaaaaaa", metrics={"lora/norm": 2.0})


async def planned(store: Store, feedback_ids: list[str] | None = None, parent_version: int = 0) -> Update:
    return await store.updates.create(
        parent_version=parent_version,
        seed=11,
        new_episode_ids=[1, 2],
        replay_episode_ids=[3],
        new_feedback_ids=feedback_ids or [],
        now=10.0,
    )


async def finish(
    store: Store, update_id: int, verdict: Verdict, operator: Caller, publish: PublishedAdapter | None = None
) -> Update:
    return await store.updates.finish(
        update_id,
        verdict=verdict,
        reason=None if publish else "too far",
        seconds={"train": 1.5},
        metrics={"policy/approx_kl": 0.1, "ppo/broken": float("nan")},
        now=20.0,
        publish=publish,
        caller=operator,
    )


def test_planning_takes_an_id_and_a_version_with_a_candidate(in_store: InStore) -> None:
    async def scenario(store: Store) -> None:
        update = await planned(store)
        assert (update.id, update.version, update.parent_version, update.state) == (1, 1, 0, "planned")
        assert (update.attempts, update.seed, update.verdict) == (0, 11, None)
        assert (update.new_episode_ids, update.replay_episode_ids) == ((1, 2), (3,))
        adapter = await store.lineage.get(1)
        assert (adapter.state, adapter.origin, adapter.parent_version) == ("candidate", "trained", 0)
        others = await asyncio.gather(*[planned(store) for _ in range(5)])
        assert [(other.id, other.version) for other in others] == [(i, i) for i in range(2, 7)]
        with pytest.raises(Refused, match="no adapter has the version 99"):
            await planned(store, parent_version=99)

    in_store(scenario)


def test_unfinished_updates_survive_a_restart_with_state_and_attempts(in_store: InStore, operator: Caller) -> None:
    async def scenario(store: Store) -> None:
        first, second = await planned(store), await planned(store)
        await store.updates.set_state(first.id, "training", attempts=2)
        await store.updates.set_state(first.id, "gating")
        await finish(store, second.id, "failed", operator)

    in_store(scenario)

    async def reopened(store: Store) -> None:
        (update,) = await store.updates.unfinished()
        assert (update.id, update.state, update.attempts) == (1, "gating", 2)
        assert store.updates.count_finished() == 1
        assert store.updates.latest_finished() == (await store.updates.list(1))[0]

    in_store(reopened)


def test_publishing_changes_update_adapter_live_version_and_ratings_together(
    in_store: InStore, operator: Caller, make_episode: Callable[..., Episode], make_feedback: Callable[..., NewFeedback]
) -> None:
    async def scenario(store: Store) -> None:
        await store.episodes.add(make_episode("c"))
        row, _ = await store.feedback.add(make_feedback("c", 1.0), idempotency_key=None)
        update = await planned(store, [row.id])
        finished = await finish(store, update.id, "published", operator, PUBLISHED)
        assert (finished.state, finished.verdict, finished.finished_at) == ("finished", "published", 20.0)
        assert (finished.seconds, finished.metrics) == ({"train": 1.5}, {"policy/approx_kl": 0.1})
        live = store.lineage.live()
        assert (live.version, live.since, live.why, live.caller) == (1, 20.0, "published", operator.name)
        assert (await store.lineage.get(1)).state == "published"
        assert store.lineage.folder(1) == PUBLISHED.folder
        assert [choice.used_by for choice in await store.feedback.used_rated(None, 10)] == [update.id]
        assert (store.updates.count_finished(), store.updates.latest_finished()) == (1, finished)

    in_store(scenario)


@pytest.mark.parametrize("verdict", ["refused", "failed", "skipped"])
def test_any_other_verdict_refuses_the_candidate_and_leaves_the_live_version(
    verdict: Verdict, in_store: InStore, operator: Caller
) -> None:
    async def scenario(store: Store) -> None:
        update = await planned(store)
        await finish(store, update.id, verdict, operator)
        adapter = await store.lineage.get(update.version)
        assert (adapter.state, adapter.reason) == ("refused", "too far")
        assert store.lineage.live().version == 0

    in_store(scenario)


def test_an_update_is_finished_once(in_store: InStore, operator: Caller) -> None:
    async def scenario(store: Store) -> None:
        update = await planned(store)
        await finish(store, update.id, "refused", operator)
        for attempt in (
            finish(store, update.id, "published", operator, PUBLISHED),
            finish(store, 99, "refused", operator),
            store.updates.set_state(update.id, "training"),
        ):
            with pytest.raises(StoreError, match="does not exist or is finished already"):
                await attempt
        assert store.updates.count_finished() == 1
        assert store.lineage.live().version == 0

    in_store(scenario)


def test_a_verdict_that_does_not_fit_its_files_is_an_error(in_store: InStore, operator: Caller) -> None:
    async def scenario(store: Store) -> None:
        update = await planned(store)
        for verdict, publish in (("published", None), ("refused", PUBLISHED)):
            with pytest.raises(StoreError, match="do not fit together"):
                await finish(store, update.id, verdict, operator, publish)  # type: ignore[arg-type]
        with pytest.raises(StoreError, match="only a verdict"):
            await store.updates.set_state(update.id, "finished")

    in_store(scenario)


def test_a_publication_that_is_refused_leaves_the_update_unfinished(in_store: InStore, operator: Caller) -> None:
    async def scenario(store: Store) -> None:
        update, late = await planned(store), await planned(store)
        await store.lineage.set_pinned(True, version=0, if_live=None, caller=operator)
        with pytest.raises(Refused) as caught:
            await finish(store, update.id, "published", operator, PUBLISHED)
        assert caught.value.code == "pinned"
        await store.lineage.set_pinned(False, version=0, if_live=None, caller=operator)
        await finish(store, update.id, "published", operator, PUBLISHED)
        with pytest.raises(Refused) as caught:
            await finish(store, late.id, "published", operator, PUBLISHED)
        assert caught.value.code == "live_changed"
        assert [unfinished.id for unfinished in await store.updates.unfinished()] == [late.id]

    in_store(scenario)


def test_figures_known_after_the_verdict_are_laid_over_the_others(in_store: InStore, operator: Caller) -> None:
    async def scenario(store: Store) -> None:
        update = await planned(store)
        await finish(store, update.id, "refused", operator)
        measured = await store.updates.measured(update.id, {"swap": 0.25}, {"swap_ms": 3.0, "bad": float("inf")})
        assert measured.seconds == {"train": 1.5, "swap": 0.25}
        assert measured.metrics == {"policy/approx_kl": 0.1, "swap_ms": 3.0}
        assert store.updates.latest_finished() == measured

    in_store(scenario)


def test_list_gives_the_newest_first(in_store: InStore) -> None:
    async def scenario(store: Store) -> None:
        for _ in range(3):
            await planned(store)
        assert [update.id for update in await store.updates.list(2)] == [3, 2]

    in_store(scenario)


def test_answers_that_updates_could_not_use_are_counted_by_reason_and_over_restarts(
    in_store: InStore, operator: Caller
) -> None:
    async def scenario(store: Store) -> None:
        for metrics in (
            {"dropped/engine_mismatch": 2.0, "reward/mean": 0.5},
            {"dropped/engine_mismatch": 1.0, "dropped/ppo_group_of_one": 4.0},
        ):
            update = await planned(store)
            await store.updates.finish(
                update.id,
                verdict="failed",
                reason="batch_empty",
                seconds={},
                metrics=metrics,
                now=20.0,
                publish=None,
                caller=operator,
            )
        assert store.updates.left_out() == {"engine_mismatch": 3, "ppo_group_of_one": 4}

    async def again(store: Store) -> None:
        assert store.updates.left_out() == {"engine_mismatch": 3, "ppo_group_of_one": 4}

    in_store(scenario)
    in_store(again)
