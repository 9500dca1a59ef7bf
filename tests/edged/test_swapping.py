"""What judges do to the live version, on a real store and real adapter files; the workers are light.

What operators do with the same parts is in `test_control.py`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from edged.swap import DEEP_GATE, WATCH
from tests.edged.desk import OPERATOR, Desk, at_desk, refusal

WORSE = "version 2 was rated -0.50 on average over 12 answers, version 1 0.71 over 40"


def test_a_judge_rolls_the_live_version_back_for_a_reason_that_is_stored_and_told(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.publish()
        await desk.publish()
        live = await desk.swaps.roll_back(2, WORSE, caller=WATCH)
        assert (live.version, live.why, live.caller, live.reason) == (1, "rolled_back", "watch", WORSE)
        assert (desk.router.served, desk.learner.wakes) == ([1], 1)
        assert (tmp_path / "CURRENT").read_text().startswith("v1-")
        event = {"version": 1, "why": "rolled_back", "pinned": False, "from": 2, "reason": WORSE, "swap_ms": 1.0}
        assert desk.told == [("adapter", event)]
        (newest,) = await desk.store.audit.list(1)
        detail = {"version": 1, "from": 2, "reason": WORSE}
        assert (newest.caller, newest.action, newest.detail) == ("watch", "rollback", detail)
        rolled_back = await desk.store.lineage.get(2)
        assert (rolled_back.verdict, rolled_back.verdict_reason) == ("rolled_back", WORSE)

    at_desk(tmp_path, scenario)


def test_a_judge_that_comes_late_changes_nothing(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        for _ in range(3):
            await desk.publish()
        refused = await refusal(desk.swaps.roll_back(2, WORSE, caller=WATCH))
        assert (refused.status, refused.code) == (409, "live_changed")
        assert (desk.store.lineage.live().version, desk.router.served) == (3, [])
        kept = await desk.store.lineage.get(2)
        assert (kept.verdict, kept.verdict_reason) == ("kept", "version 3 took its place")

    at_desk(tmp_path, scenario)


def test_of_two_judges_at_once_one_rolls_back(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        for _ in range(3):
            await desk.publish()
        judges = (desk.swaps.roll_back(3, WORSE, caller=WATCH), desk.swaps.roll_back(3, "it repeats", caller=DEEP_GATE))
        outcomes = await asyncio.gather(*judges, return_exceptions=True)
        assert getattr(outcomes[0], "version", None) == 2
        assert getattr(outcomes[1], "code", None) == "live_changed"
        assert desk.store.lineage.live().version == 2

    at_desk(tmp_path, scenario)


def test_a_pinned_version_is_not_rolled_back_by_itself(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.publish()
        await desk.operator.pin(1, True, if_live=1, caller=OPERATOR)
        refused = await refusal(desk.swaps.roll_back(1, WORSE, caller=WATCH))
        assert (refused.code, refused.message) == ("pinned", f"version 1 is pinned, and stays live although {WORSE}")
        assert desk.store.lineage.live().version == 1

    at_desk(tmp_path, scenario)


def test_what_was_rolled_back_by_itself_is_not_gone_back_to_until_somebody_promotes_it(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        for _ in range(2):
            await desk.publish()
        await desk.operator.promote(1, if_live=2, caller=OPERATOR)
        await desk.operator.promote(2, if_live=1, caller=OPERATOR)
        await desk.swaps.roll_back(2, WORSE, caller=WATCH)
        assert await desk.swaps.last_good() == 0
        await desk.operator.promote(2, if_live=1, caller=OPERATOR)
        assert (await desk.store.lineage.get(2)).verdict is None
        await desk.publish()
        assert await desk.swaps.last_good() == 2

    at_desk(tmp_path, scenario)


def test_a_judge_waits_for_the_candidate_that_is_being_proved(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.publish()
        async with desk.candidates:
            waiting = asyncio.create_task(desk.swaps.roll_back(1, WORSE, caller=WATCH))
            await asyncio.sleep(0.02)
            assert desk.store.lineage.live().version == 1
        assert (await waiting).version == 0

    at_desk(tmp_path, scenario)


def test_the_base_is_never_rolled_back_and_only_judges_judge(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        refused = await refusal(desk.swaps.roll_back(0, WORSE, caller=WATCH))
        assert refused.code == "nothing_before"
        with pytest.raises(ValueError, match="uid:0 does not roll back by itself"):
            await desk.swaps.roll_back(0, WORSE, caller=OPERATOR)

    at_desk(tmp_path, scenario)
