"""Collection on a real store and real adapter files: what goes, what stays, and what a crash in between leaves."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from edged.learn import collecting
from edged.learn.collecting import Collector
from edged.learn.collection import Rules
from edged.learn.folders import Folders
from edged.swap import WATCH
from tests.edged.desk import OPERATOR, Desk, at_desk, audited, refusal


def collector_of(
    desk: Desk,
    *,
    keep_versions: int = 0,
    staleness: int = 0,
    references: Iterable[int] = (0,),
    min_free_bytes: int = 0,
    free_bytes: int = 10**9,
) -> Collector:
    return Collector(
        desk.store.lineage,
        Folders(desk.root, "b" * 64),
        rules=lambda: Rules(keep_versions=keep_versions, min_free_bytes=min_free_bytes),
        staleness=lambda: staleness,
        references=lambda: references,
        last_good=desk.swaps.last_good,
        candidates=desk.candidates,
        announce=lambda name, data: desk.told.append((name, data)),
        on_change=lambda: None,
        free_bytes=lambda path: free_bytes,
    )


def on_disk(desk: Desk) -> set[int]:
    return set(Folders(desk.root, "b" * 64).versions())


async def publish(desk: Desk, number: int) -> None:
    for _ in range(number):
        await desk.publish()


def test_what_is_not_in_use_goes_and_its_row_says_so(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        await publish(desk, 7)
        await desk.operator.keep(2, True, caller=OPERATOR)
        collector = collector_of(desk, references=(0, 3))
        await collector.consider()
        assert on_disk(desk) == {2, 3, 6, 7}
        rows = {row.version: row for row in await desk.store.lineage.list()}
        assert [version for version, row in rows.items() if row.collected_at is not None] == [1, 4, 5]
        assert all(rows[version].folder is None for version in (1, 4, 5))
        assert [event[1]["version"] for event in desk.told if event[1]["why"] == "collected"] == [1, 4, 5]
        assert (await audited(desk))[:3] == ["collect"] * 3
        assert collector.view is not None
        assert (collector.view.on_disk, collector.view.collected, collector.view.why) == (4, 3, "")
        refused = await refusal(desk.operator.promote(5, if_live=7, caller=OPERATOR))
        assert (refused.status, refused.code) == (409, "no_files")
        assert (await desk.operator.rollback(if_live=7, caller=OPERATOR)).version == 6

    at_desk(tmp_path, scenario)


def test_what_a_rollback_leads_to_and_what_may_be_trained_on_stay(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        await publish(desk, 6)
        await desk.swaps.roll_back(6, "it repeats itself", caller=WATCH)
        await collector_of(desk).consider()
        assert on_disk(desk) == {4, 5, 6}  # live is 5, a rollback leads to 4, and answers of 5 and later are trained on
        await desk.publish()
        await collector_of(desk, staleness=8).consider()
        assert on_disk(desk) == {4, 5, 6, 7}

    at_desk(tmp_path, scenario)


def test_a_short_disk_is_told_of_when_nothing_else_can_go(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        await publish(desk, 5)
        roomy = collector_of(desk, keep_versions=9)
        await roomy.consider()
        assert on_disk(desk) == {1, 2, 3, 4, 5}
        short = collector_of(desk, keep_versions=9, min_free_bytes=10**9, free_bytes=10**6)
        await short.consider()
        assert on_disk(desk) == {4, 5}
        assert short.view is not None
        assert short.view.why.startswith("the disk has 1 MB left, and all adapters but those in use are removed")

    at_desk(tmp_path, scenario)


def test_what_an_unfinished_update_starts_from_is_not_let_go(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        await publish(desk, 3)
        await desk.store.updates.create(
            parent_version=1, seed=0, new_episode_ids=[], replay_episode_ids=[], new_feedback_ids=[], now=1.0
        )
        for version, code in ((1, "in_use"), (3, "in_use"), (0, "no_files"), (9, "adapter_not_found")):
            assert (await refusal(desk.store.lineage.collect(version, caller=OPERATOR))).code == code
        await desk.store.lineage.set_kept(True, version=2, caller=OPERATOR)
        assert (await refusal(desk.store.lineage.collect(2, caller=OPERATOR))).code == "in_use"

    at_desk(tmp_path, scenario)


def test_a_folder_that_a_crash_left_behind_goes_at_the_next_start_and_is_not_served_before(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        await publish(desk, 3)
        await desk.store.lineage.collect(1, caller=OPERATOR)
        assert on_disk(desk) == {1, 2, 3}
        assert (await refusal(desk.operator.promote(1, if_live=3, caller=OPERATOR))).code == "no_files"
        folders = Folders(desk.root, "b" * 64)
        for _ in range(2):
            collecting.finish(await desk.store.lineage.list(), folders)
            assert on_disk(desk) == {2, 3}

    at_desk(tmp_path, scenario)


@pytest.mark.parametrize("gone", [1, 2])
def test_a_version_whose_files_somebody_removed_is_nobody_s_business(tmp_path: Path, gone: int) -> None:
    async def scenario(desk: Desk) -> None:
        await publish(desk, 4)
        Folders(desk.root, "b" * 64).withdraw(gone)
        await collector_of(desk).consider()
        assert on_disk(desk) == {3, 4}
        assert (await desk.store.lineage.get(gone)).collected_at is None

    at_desk(tmp_path, scenario)
