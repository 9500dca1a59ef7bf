"""The watch on a real store and real adapter files: what it rolls back, what it keeps, and what it leaves alone."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from pathlib import Path

import pytest

from edged.learn.watch import Rules
from edged.learn.watching import Watch
from edged.records import Episode, NewFeedback
from edged.store.store import Store
from edged.swap import STOPGAP
from tests.edged.desk import OPERATOR, Desk, at_desk, audited

BASE_SHA256 = "b" * 64
numbers = itertools.count(1)


def watch_of(desk: Desk, *, false_alarm: float = 0.01, ratings: int = 32, staleness: int = 8) -> Watch:
    return Watch(
        desk.store.anchors,
        desk.store.lineage,
        desk.store.audit,
        desk.swaps,
        rules=lambda: Rules(false_alarm=false_alarm, min_ratings=8, ratings=ratings),
        staleness=lambda: staleness,
        base_sha256=BASE_SHA256,
        announce=lambda name, data: desk.told.append((name, data)),
        on_change=lambda: None,
    )


async def answer(store: Store, version: int, *, base_sha256: str = BASE_SHA256) -> str:
    """An answer by `version`; its completion's id."""
    completion_id = f"chatcmpl-{next(numbers)}"
    episode = Episode(
        id=0,
        completion_id=completion_id,
        choice=0,
        created_at=1.0,
        kind="chat",
        model="m",
        base_sha256=base_sha256,
        version=version,
        messages=[],
        prompt=None,
        prompt_ids=(1,),
        completion_ids=(2,),
        logprobs=(-0.5,),
        raw_logprobs=(-0.5,),
        text="Yes.",
        finish_reason="stop",
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=0,
        max_tokens=None,
        user=None,
        metadata={},
        caller="uid:0",
    )
    await store.episodes.add(episode)
    return completion_id


async def rate(store: Store, version: int, *ratings: float, base_sha256: str = BASE_SHA256) -> list[str]:
    """A rated answer for each rating; the completions' ids."""
    ids = [await answer(store, version, base_sha256=base_sha256) for _ in ratings]
    await store.feedback.add_many([said(one, rating) for one, rating in zip(ids, ratings, strict=True)])
    return ids


def said(completion_id: str, rating: float) -> NewFeedback:
    return NewFeedback(
        completion_id=completion_id,
        choice=0,
        rating=rating,
        correction=None,
        reason=None,
        user=None,
        tags=(),
        source="user",
        caller="uid:0",
    )


def test_a_version_that_people_like_less_is_rolled_back_and_why_is_kept(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.publish()
        await rate(desk.store, 1, *[1.0] * 20, *[-1.0] * 4)
        await desk.publish()
        watch = watch_of(desk)
        for _ in range(7):
            await rate(desk.store, 2, -1.0)
            await watch.consider()
        assert (desk.store.lineage.live().version, watch.view and watch.view.is_on) == (2, True)
        for _ in range(8):
            await rate(desk.store, 2, -1.0)
            await watch.consider()
        live = desk.store.lineage.live()
        assert (live.version, live.why, live.caller) == (1, "rolled_back", "watch")
        rolled_back = await desk.store.lineage.get(2)
        assert rolled_back.verdict == "rolled_back"
        assert (rolled_back.verdict_reason or "").startswith("version 2 was rated -1.00 on average over")
        assert live.reason == rolled_back.verdict_reason
        await watch.consider()
        assert watch.view is not None
        assert (watch.view.version, watch.view.is_on, watch.view.rollbacks) == (1, False, 1)

    at_desk(tmp_path, scenario)


def test_what_a_rollback_led_to_is_not_rolled_back_for_its_ratings(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        for _ in range(2):
            await desk.publish()
            await rate(desk.store, desk.store.lineage.live().version, *[1.0] * 30)
        await desk.operator.rollback(if_live=2, caller=OPERATOR)
        await rate(desk.store, 1, *[-1.0] * 60)
        await watch_of(desk).consider()
        assert desk.store.lineage.live().version == 1

    at_desk(tmp_path, scenario)


def test_a_version_that_stands_is_kept_and_no_longer_watched(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        await rate(desk.store, 0, *[1.0, -1.0] * 12)
        await desk.publish()
        await rate(desk.store, 1, *[1.0, -1.0] * 16)
        watch = watch_of(desk)
        await watch.consider()
        kept = await desk.store.lineage.get(1)
        assert (kept.verdict, kept.kept) == ("kept", False)
        assert desk.told[-1] == ("adapter", {"version": 1, "why": "kept", "reason": kept.verdict_reason})
        await rate(desk.store, 1, *[-1.0] * 60)
        await watch.consider()
        assert desk.store.lineage.live().version == 1

    at_desk(tmp_path, scenario)


def test_a_pinned_version_stays_and_what_did_not_happen_is_told_once(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        await rate(desk.store, 0, *[1.0] * 40)
        await desk.publish()
        await desk.operator.pin(1, True, if_live=1, caller=OPERATOR)
        await rate(desk.store, 1, *[-1.0] * 12)
        watch = watch_of(desk)
        for _ in range(3):
            await watch.consider()
        assert desk.store.lineage.live().version == 1
        assert watch.view is not None
        assert (watch.view.withheld, watch.view.is_on) == (1, True)
        assert (await audited(desk)).count("withhold rollback") == 1
        await desk.operator.pin(1, False, if_live=1, caller=OPERATOR)
        await watch.consider()
        assert desk.store.lineage.live().version == 0

    at_desk(tmp_path, scenario)


def test_only_ratings_on_this_base_since_it_went_live_count_and_the_newest_of_an_answer(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        await rate(desk.store, 0, *[1.0] * 40)
        await desk.publish()
        await rate(desk.store, 1, *[-1.0] * 5)
        await rate(desk.store, 1, *[-1.0] * 40, base_sha256="c" * 64)
        ids = await rate(desk.store, 1, *[-1.0] * 30)
        await desk.store.feedback.add_many([said(one, 1.0) for one in ids])
        watch = watch_of(desk, ratings=200)
        await watch.consider()
        assert watch.view is not None
        assert watch.view.finding is not None
        assert dict(watch.view.finding.live.counts) == {-1.0: 5, 1.0: 30}
        await desk.publish()
        await desk.operator.promote(1, if_live=2, caller=OPERATOR)
        await rate(desk.store, 1, 0.5)
        await watch.consider()
        assert dict(watch.view.finding.live.counts) == {0.5: 1}

    at_desk(tmp_path, scenario)


def test_versions_beyond_the_staleness_cap_are_no_reference_but_for_the_nearest(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        for version in range(4):
            await rate(desk.store, version, *[1.0] * 20)
            await desk.publish()
        for staleness, versions in ((0, (3,)), (2, (3, 2)), (8, (3, 2, 1, 0))):
            watch = watch_of(desk, staleness=staleness)
            await watch.consider()
            assert watch.view is not None
            assert watch.view.finding is not None
            assert watch.view.finding.reference is not None
            assert watch.view.finding.reference.versions == versions

    at_desk(tmp_path, scenario)


@pytest.mark.parametrize("how", ["off", "base", "stopgap"])
def test_what_nobody_asks_to_watch_is_not_watched(tmp_path: Path, how: str) -> None:
    async def scenario(desk: Desk) -> None:
        for _ in range(2):
            await rate(desk.store, desk.store.lineage.live().version, *[1.0] * 40)
            await desk.publish()
        if how == "base":
            await desk.operator.promote(0, if_live=2, caller=OPERATOR)
        elif how == "stopgap":
            stopgap = dataclasses.replace(OPERATOR, name=STOPGAP)
            await desk.store.lineage.set_live(1, why="promoted", caller=stopgap, if_live=2, now=2e9)
        live = desk.store.lineage.live().version
        await rate(desk.store, live, *[-1.0] * 30)
        watch = watch_of(desk, false_alarm=0.0 if how == "off" else 0.01)
        await watch.consider()
        assert desk.store.lineage.live().version == live
        assert watch.view is not None
        assert not watch.view.is_on

    at_desk(tmp_path, scenario)


def test_ratings_that_come_while_it_looks_are_looked_at(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        await rate(desk.store, 0, *[1.0] * 40)
        await desk.publish()
        watch = watch_of(desk)
        running = asyncio.create_task(watch.run())
        try:
            await rate(desk.store, 1, *[-1.0] * 12)
            watch.wake()
            async with asyncio.timeout(30):
                while desk.store.lineage.live().version != 0:
                    await asyncio.sleep(0.01)
        finally:
            running.cancel()

    at_desk(tmp_path, scenario)


def test_who_changes_what_is_live_meanwhile_wins(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        await rate(desk.store, 0, *[1.0] * 40)
        await desk.publish()
        await rate(desk.store, 1, *[-1.0] * 12)
        watch = watch_of(desk)
        async with desk.candidates:
            looking = asyncio.create_task(watch.consider())
            while watch.view is None:
                await asyncio.sleep(0.001)
            await desk.publish()
        await looking
        assert desk.store.lineage.live().version == 2
        assert (await desk.store.lineage.get(1)).verdict == "kept"

    at_desk(tmp_path, scenario)
