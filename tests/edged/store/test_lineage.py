"""Versions, what is live, and who may change it when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from edged.records import Caller, PublishedAdapter
from edged.refusal import Refused
from edged.store.store import Store

InStore = Callable[..., Any]

PUBLISHED = PublishedAdapter(sha256="a" * 64, folder="v1-aaaaaaaa", metrics={"lora/norm": 2.0})


async def imported(store: Store, operator: Caller, *, publish: bool = True) -> int:
    candidate = await store.lineage.add_candidate(origin="imported", parent_version=0, caller=operator)
    if publish:
        files = PublishedAdapter(sha256="a" * 64, folder=f"v{candidate.version}-aaaaaaaa", metrics={})
        await store.lineage.publish(candidate.version, files, caller=operator)
    return candidate.version


async def refusal(awaitable: Any) -> tuple[int, str, str]:
    with pytest.raises(Refused) as caught:
        await awaitable
    return caught.value.status, caught.value.code, caught.value.message


def test_at_first_the_base_is_live(in_store: InStore) -> None:
    async def scenario(store: Store) -> None:
        live = store.lineage.live()
        assert (live.version, live.why, live.pinned) == (0, "base", False)
        (base,) = await store.lineage.list()
        assert (base.version, base.origin, base.state, base.kept) == (0, "base", "published", True)
        assert await store.lineage.history(10) == [live]

    in_store(scenario)


def test_a_published_candidate_is_live_and_its_files_are_known(in_store: InStore, operator: Caller) -> None:
    async def scenario(store: Store) -> None:
        candidate = await store.lineage.add_candidate(origin="imported", parent_version=0, caller=operator)
        assert (candidate.version, candidate.state, candidate.reason) == (1, "candidate", "by uid:0")
        assert (await refusal(_folder(store, 1)))[:2] == (404, "adapter_not_found")
        live = await store.lineage.publish(1, PUBLISHED, caller=operator)
        assert (live.version, live.why) == (1, "published")
        assert store.lineage.live() == live
        adapter = await store.lineage.get(1)
        assert (adapter.state, adapter.sha256, adapter.metrics) == ("published", "a" * 64, {"lora/norm": 2.0})
        assert store.lineage.folder(1) == "v1-aaaaaaaa"
        assert (await refusal(_folder(store, 0)))[:2] == (409, "no_files")
        assert (await refusal(store.lineage.publish(1, PUBLISHED, caller=operator)))[:2] == (409, "not_a_candidate")

    in_store(scenario)

    async def reopened(store: Store) -> None:
        assert store.lineage.live().version == 1
        assert store.lineage.folder(1) == "v1-aaaaaaaa"

    in_store(reopened)


async def _folder(store: Store, version: int) -> str:
    return store.lineage.folder(version)


def test_a_refused_candidate_uses_its_number_up_and_is_never_served(in_store: InStore, operator: Caller) -> None:
    async def scenario(store: Store) -> None:
        version = await imported(store, operator, publish=False)
        refused = await store.lineage.refuse(version, "not finite", metrics={"lora/norm": float("nan"), "x": 1.0})
        assert (refused.state, refused.reason, refused.metrics) == ("refused", "not finite", {"x": 1.0})
        assert await imported(store, operator, publish=False) == version + 1
        assert await store.lineage.newest_version() == version + 1

        def promote(number: int) -> Any:
            return store.lineage.set_live(number, why="promoted", caller=operator, if_live=None, now=1.0)

        assert await refusal(promote(version)) == (
            409,
            "adapter_refused",
            f"adapter {version} was refused (not finite) and cannot be served",
        )
        assert (await refusal(promote(version + 1)))[:2] == (409, "adapter_not_published")
        assert (await refusal(promote(99)))[:2] == (404, "adapter_not_found")
        assert (await refusal(store.lineage.refuse(0, "x")))[:2] == (409, "not_a_candidate")
        assert store.lineage.live().version == 0

    in_store(scenario)


def test_promote_and_rollback_append_to_the_history_and_to_the_audit(in_store: InStore, operator: Caller) -> None:
    async def scenario(store: Store) -> None:
        await imported(store, operator)
        await imported(store, operator)
        await store.lineage.set_live(1, why="rolled_back", caller=operator, if_live=2, now=50.0)
        live = await store.lineage.set_live(0, why="promoted", caller=operator, if_live=None, now=60.0)
        assert store.lineage.live() == live
        history = await store.lineage.history(3)
        assert [(row.version, row.why) for row in history] == [(0, "promoted"), (1, "rolled_back"), (2, "published")]
        audit = [(entry.action, entry.detail) for entry in await store.audit.list(2)]
        assert audit == [("promote", {"version": 0, "from": 1}), ("rollback", {"version": 1, "from": 2})]

    in_store(scenario)


def test_a_version_gets_its_verdict_when_it_is_rolled_back_or_trained_on(in_store: InStore, operator: Caller) -> None:
    async def scenario(store: Store) -> None:
        async def verdicts() -> list[tuple[str | None, str | None]]:
            return [(adapter.verdict, adapter.verdict_reason) for adapter in await store.lineage.list()]

        async def train() -> None:
            parent = store.lineage.live().version
            candidate = await store.lineage.add_candidate(origin="trained", parent_version=parent, caller=operator)
            files = PublishedAdapter(sha256="a" * 64, folder=f"v{candidate.version}-aaaaaaaa", metrics={})
            await store.lineage.publish(candidate.version, files, caller=operator)

        await train()
        await train()
        trained_on = [("kept", "version 1 was trained on top of it"), ("kept", "version 2 was trained on top of it")]
        assert await verdicts() == [*trained_on, (None, None)]
        assert (await store.lineage.hold(2, "it stood")).verdict == "kept"
        await store.lineage.set_live(
            1, why="rolled_back", caller=operator, if_live=2, now=5.0, reason="it repeats itself"
        )
        assert await verdicts() == [*trained_on, ("rolled_back", "it repeats itself")]
        assert store.lineage.live().reason == "it repeats itself"
        assert (await store.audit.list(1))[0].detail == {"version": 1, "from": 2, "reason": "it repeats itself"}
        await store.lineage.set_live(2, why="promoted", caller=operator, if_live=1, now=6.0)
        assert await verdicts() == [*trained_on, (None, None)]
        assert (await refusal(store.lineage.hold(1, "it stood")))[:2] == (409, "live_changed")

    in_store(scenario)


def test_if_live_lets_only_one_of_two_callers_win(in_store: InStore, operator: Caller) -> None:
    async def scenario(store: Store) -> None:
        await imported(store, operator)
        await imported(store, operator)
        await store.lineage.set_live(1, why="promoted", caller=operator, if_live=2, now=1.0)
        status, code, message = await refusal(
            store.lineage.set_live(0, why="promoted", caller=operator, if_live=2, now=2.0)
        )
        assert (status, code) == (409, "live_changed")
        assert "version 1 is live" in message
        candidate = await imported(store, operator, publish=False)
        for attempt in (
            store.lineage.publish(candidate, PUBLISHED, caller=operator, if_live=2),
            store.lineage.set_pinned(True, version=1, if_live=2, caller=operator),
            store.lineage.set_kept(True, version=1, if_live=2, caller=operator),
        ):
            assert (await refusal(attempt))[:2] == (409, "live_changed")
        with pytest.raises(Refused, match="version 1 is live"):
            store.lineage.expect(2)
        assert store.lineage.expect(1) == store.lineage.expect(None) == store.lineage.live()
        assert [entry.action for entry in await store.audit.list(10)] == ["import", "promote", "import", "import"]

    in_store(scenario)


def test_nothing_is_published_over_a_pinned_version(in_store: InStore, operator: Caller) -> None:
    async def scenario(store: Store) -> None:
        await imported(store, operator)
        before = store.lineage.live()
        pinned = await store.lineage.set_pinned(True, version=1, if_live=1, caller=operator)
        assert (pinned.pinned, pinned.since, pinned.version) == (True, before.since, 1)
        candidate = await imported(store, operator, publish=False)
        assert (await refusal(store.lineage.publish(candidate, PUBLISHED, caller=operator)))[:2] == (409, "pinned")
        assert (await store.lineage.get(candidate)).state == "candidate"
        assert (await refusal(store.lineage.set_pinned(False, version=0, if_live=None, caller=operator)))[
            1
        ] == "not_live"
        await store.lineage.set_pinned(False, version=1, if_live=None, caller=operator)
        assert (await store.lineage.publish(candidate, PUBLISHED, caller=operator)).version == candidate

    in_store(scenario)


def test_a_pin_stays_where_it_is_unless_it_is_moved_by_name(in_store: InStore, operator: Caller) -> None:
    async def scenario(store: Store) -> None:
        await imported(store, operator)
        await store.lineage.set_pinned(True, version=1, if_live=None, caller=operator)
        for why in ("promoted", "rolled_back"):
            change = store.lineage.set_live(0, why=why, caller=operator, if_live=None, now=1.0)
            assert await refusal(change) == (409, "pinned", "version 1 is pinned; unpin it before version 0 goes live")
        live = await store.lineage.set_live(0, why="promoted", caller=operator, if_live=None, now=1.0, pinned=True)
        assert (live.version, live.pinned) == (0, True)
        live = await store.lineage.set_live(1, why="promoted", caller=operator, if_live=None, now=2.0, pinned=False)
        assert not live.pinned

    in_store(scenario)

    async def reopened(store: Store) -> None:
        assert not store.lineage.live().pinned

    in_store(reopened)


def test_keep_is_a_mark_on_the_version(in_store: InStore, operator: Caller) -> None:
    async def scenario(store: Store) -> None:
        version = await imported(store, operator)
        assert (await store.lineage.set_kept(True, version=version, caller=operator)).kept
        assert (await store.lineage.get(version)).kept
        assert not (await store.lineage.set_kept(False, version=version, caller=operator)).kept
        assert (await refusal(store.lineage.set_kept(True, version=9, caller=operator)))[:2] == (
            404,
            "adapter_not_found",
        )
        assert (await refusal(store.lineage.set_kept(False, version=0, caller=operator)))[:2] == (409, "base_is_kept")

    in_store(scenario)


def test_a_version_number_is_never_given_twice(in_store: InStore, operator: Caller) -> None:
    async def scenario(store: Store) -> None:
        assert await imported(store, operator, publish=False) == 1
        await store._database.write(
            lambda connection: connection.execute("DELETE FROM adapters WHERE version = 1") and None
        )
        assert await imported(store, operator, publish=False) == 2

    in_store(scenario)


def test_metrics_are_laid_over_those_that_are_there(in_store: InStore, operator: Caller) -> None:
    async def scenario(store: Store) -> None:
        await store.lineage.add_candidate(origin="fleet", parent_version=None, caller=operator)
        await store.lineage.publish(1, PUBLISHED, caller=operator)
        await store.lineage.set_metrics(1, {"gate/canary_gap": 0.1, "kl/live": float("inf")})
        assert (await store.lineage.get(1)).metrics == {"lora/norm": 2.0, "gate/canary_gap": 0.1}

    in_store(scenario)


def test_versions_whose_folders_lie_on_the_disk_are_skipped(in_store: InStore, operator: Caller) -> None:
    async def scenario(store: Store) -> None:
        await store.lineage.skip_versions(6)
        await store.lineage.skip_versions(2)
        assert await imported(store, operator, publish=False) == 7

    in_store(scenario)
