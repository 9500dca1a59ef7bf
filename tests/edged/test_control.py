"""What an operator can do, on a real store and real adapter files; the workers are light."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from edged.control import PAUSED_FILE
from tests.edged.desk import OPERATOR, SHAPE, Desk, at_desk, audited, make_weights, refusal

# ---------------------------------------------------------------------------------------------------- what is live


def test_promoting_makes_a_version_live_and_serves_it(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        first, second = await desk.publish(), await desk.publish()
        live = await desk.operator.promote(first, if_live=second, caller=OPERATOR)
        assert (live.version, live.why, live.caller) == (1, "promoted", "uid:0")
        folder = desk.operator.adapter_folder(first)
        assert desk.router.served == [1]
        assert (tmp_path / "CURRENT").read_text() == f"{folder.name}\n"
        assert desk.told == [("adapter", {"version": 1, "why": "promoted", "pinned": False, "from": 2, "swap_ms": 1.0})]
        assert desk.learner.wakes == 1
        assert (await audited(desk))[0] == "promote"

    at_desk(tmp_path, scenario)


def test_promoting_the_base_serves_it_without_a_folder(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.publish()
        await desk.operator.promote(0, if_live=None, caller=OPERATOR)
        assert desk.router.served == [0]
        assert (tmp_path / "CURRENT").read_text() == "base\n"

    at_desk(tmp_path, scenario)


def test_a_change_that_expects_another_live_version_changes_nothing(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.publish()
        for call in (
            desk.operator.promote(0, if_live=7, caller=OPERATOR),
            desk.operator.rollback(if_live=7, caller=OPERATOR),
            desk.operator.pin(1, True, if_live=7, caller=OPERATOR),
            desk.operator.pin(0, True, if_live=7, caller=OPERATOR),
            desk.operator.keep(1, True, if_live=7, caller=OPERATOR),
        ):
            refused = await refusal(call)
            assert (refused.status, refused.code) == (409, "live_changed")
        live = desk.store.lineage.live()
        assert (live.version, live.pinned, desk.router.served) == (1, False, [])

    at_desk(tmp_path, scenario)


def test_a_version_whose_files_are_gone_is_not_promoted(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.publish()
        await desk.publish()
        desk.operator.adapter_folder(1).rename(tmp_path / "gone")
        refused = await refusal(desk.operator.promote(1, if_live=None, caller=OPERATOR))
        assert (refused.status, refused.code) == (409, "no_files")
        assert desk.store.lineage.live().version == 2

    at_desk(tmp_path, scenario)


@pytest.mark.parametrize("damage", ["damaged", "foreign"])
def test_a_version_that_cannot_be_served_is_not_promoted_and_a_rollback_passes_it_over(
    tmp_path: Path, damage: str
) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.publish()
        await desk.publish(base_sha256=("c" if damage == "foreign" else "b") * 64)
        if damage == "damaged":
            (desk.operator.adapter_folder(2) / "adapter.gguf").write_bytes(b"half")
        await desk.publish()
        refused = await refusal(desk.operator.promote(2, if_live=None, caller=OPERATOR))
        assert (refused.status, refused.code) == (409, "not_servable")
        assert ("cccccccc" if damage == "foreign" else "adapter.gguf") in refused.message
        assert (await desk.operator.rollback(if_live=3, caller=OPERATOR)).version == 1

    at_desk(tmp_path, scenario)


def test_who_promotes_what_the_engine_will_not_serve_is_told_what_is_live_instead(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        for _ in range(2):
            await desk.publish()
        desk.router.instead = 0
        refused = await refusal(desk.operator.promote(1, if_live=None, caller=OPERATOR))
        assert (refused.status, refused.code) == (409, "not_servable")
        assert "version 0 is live" in refused.message

    at_desk(tmp_path, scenario)


def test_an_unknown_version_is_not_found(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        for call in (
            desk.operator.promote(9, if_live=None, caller=OPERATOR),
            desk.operator.pin(9, True, if_live=None, caller=OPERATOR),
            desk.operator.keep(9, True, caller=OPERATOR),
            desk.operator.diff(9, 9),
        ):
            refused = await refusal(call)
            assert (refused.status, refused.code) == (404, "adapter_not_found")

    at_desk(tmp_path, scenario)


def test_a_serve_worker_that_is_behind_does_not_stop_a_promotion(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        first = await desk.publish()
        await desk.publish()
        desk.router.is_behind = True
        assert (await desk.operator.promote(first, if_live=None, caller=OPERATOR)).version == first
        assert desk.told == [("adapter", {"version": first, "why": "promoted", "pinned": False, "from": 2})]

    at_desk(tmp_path, scenario)


def test_rolling_back_goes_to_the_version_before_and_then_further(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        for _ in range(3):
            await desk.publish()
        for expected in (2, 1, 0):
            live = await desk.operator.rollback(if_live=None, caller=OPERATOR)
            assert (live.version, live.why) == (expected, "rolled_back")
        refused = await refusal(desk.operator.rollback(if_live=None, caller=OPERATOR))
        assert (refused.status, refused.code) == (409, "nothing_before")
        assert desk.router.served == [2, 1, 0]

    at_desk(tmp_path, scenario)


def test_rolling_back_passes_over_versions_whose_files_are_gone(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        for _ in range(3):
            await desk.publish()
        desk.operator.adapter_folder(2).rename(tmp_path / "gone")
        assert (await desk.operator.rollback(if_live=3, caller=OPERATOR)).version == 1

    at_desk(tmp_path, scenario)


def test_a_change_waits_for_the_candidate_that_is_being_proved(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.publish()
        async with desk.candidates:
            waiting = asyncio.create_task(desk.operator.rollback(if_live=None, caller=OPERATOR))
            await asyncio.sleep(0.02)
            assert desk.store.lineage.live().version == 1
        assert (await waiting).version == 0

    at_desk(tmp_path, scenario)


def test_pinning_the_live_version_keeps_it(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.publish()
        live = await desk.operator.pin(1, True, if_live=1, caller=OPERATOR)
        assert (live.version, live.pinned, desk.router.served) == (1, True, [])
        live = await desk.operator.pin(1, False, if_live=None, caller=OPERATOR)
        assert not live.pinned
        assert (await audited(desk))[:2] == ["unpin", "pin"]
        assert desk.learner.wakes == 2

    at_desk(tmp_path, scenario)


def test_pinning_another_version_promotes_it_first(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.publish()
        live = await desk.operator.pin(0, True, if_live=1, caller=OPERATOR)
        assert (live.version, live.pinned, desk.router.served) == (0, True, [0])
        assert (await audited(desk))[:2] == ["pin", "promote"]

    at_desk(tmp_path, scenario)


def test_a_pinned_version_is_served_until_it_is_unpinned(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        for _ in range(3):
            await desk.publish()
        await desk.operator.pin(2, True, if_live=None, caller=OPERATOR)
        desk.router.served.clear()
        for change in (
            desk.operator.rollback(if_live=None, caller=OPERATOR),
            desk.operator.promote(3, if_live=2, caller=OPERATOR),
            desk.operator.promote(0, if_live=None, caller=OPERATOR),
        ):
            refused = await refusal(change)
            assert (refused.status, refused.code) == (409, "pinned")
            assert "version 2 is pinned; unpin it before" in refused.message
        live = desk.store.lineage.live()
        assert (live.version, live.pinned, desk.router.served) == (2, True, [])
        await desk.operator.pin(2, False, if_live=None, caller=OPERATOR)
        live = await desk.operator.rollback(if_live=None, caller=OPERATOR)
        assert (live.version, live.pinned) == (3, False)

    at_desk(tmp_path, scenario)


def test_who_pins_another_version_moves_the_pin(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        for _ in range(2):
            await desk.publish()
        await desk.operator.pin(2, True, if_live=None, caller=OPERATOR)
        live = await desk.operator.pin(1, True, if_live=2, caller=OPERATOR)
        assert (live.version, live.pinned, desk.router.served[-1]) == (1, True, 1)
        refused = await refusal(desk.operator.rollback(if_live=None, caller=OPERATOR))
        assert refused.code == "pinned"

    at_desk(tmp_path, scenario)


def test_unpinning_a_version_that_is_not_live_changes_nothing(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.publish()
        refused = await refusal(desk.operator.pin(0, False, if_live=None, caller=OPERATOR))
        assert (refused.status, refused.code) == (409, "not_live")

    at_desk(tmp_path, scenario)


# ------------------------------------------------------------------------------------------------------------ rest


@pytest.mark.parametrize("change", ["pause", "resume"])
def test_a_switch_that_cannot_be_written_down_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    async def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def scenario(desk: Desk) -> None:
        if change == "resume":
            await desk.operator.pause(caller=OPERATOR)
        before = (PAUSED_FILE in os.listdir(tmp_path), list(desk.learner.paused))
        monkeypatch.setattr(desk.store.audit, "add", full)
        with pytest.raises(OSError, match="No space"):
            await getattr(desk.operator, change)(caller=OPERATOR)
        assert (PAUSED_FILE in os.listdir(tmp_path), desk.learner.paused) == before

    at_desk(tmp_path, scenario)


def test_a_pause_outlives_the_daemon(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.operator.pause(caller=OPERATOR)
        assert (tmp_path / PAUSED_FILE).exists()
        await desk.operator.resume(caller=OPERATOR)
        await desk.operator.resume(caller=OPERATOR)
        assert not (tmp_path / PAUSED_FILE).exists()
        assert desk.learner.paused == [True, False, False]
        assert (await audited(desk))[-2:] == ["resume", "pause"]

    at_desk(tmp_path, scenario)


def test_asking_for_an_update_is_audited_if_there_will_be_one(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        assert await desk.operator.train(caller=OPERATOR) == {"accepted": True, "reason": "16 new ratings"}
        desk.learner.answer = (False, "no new ratings")
        assert await desk.operator.train(caller=OPERATOR) == {"accepted": False, "reason": "no new ratings"}
        assert await audited(desk) == ["train"]

    at_desk(tmp_path, scenario)


def test_two_versions_are_compared_module_by_module(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        first, second = await desk.publish(), await desk.publish()
        found = await desk.operator.diff(first, second)
        assert found["norm"] == pytest.approx(make_weights(1).norm())
        assert found["other_norm"] == pytest.approx(make_weights(2).norm())
        assert found["distance"] ** 2 == pytest.approx(sum(value**2 for value in found["modules"].values()))
        assert set(found["modules"]) == set(SHAPE.top_modules(1))
        assert (await desk.operator.diff(first, first))["distance"] == pytest.approx(0.0, abs=1e-3)

    at_desk(tmp_path, scenario)


def test_the_base_is_as_far_away_as_an_adapter_has_effect(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        first = await desk.publish()
        for pair in ((0, first), (first, 0)):
            found = await desk.operator.diff(*pair)
            assert found["distance"] == pytest.approx(max(found["norm"], found["other_norm"]))
            assert min(found["norm"], found["other_norm"]) == 0.0
            assert found["cosine"] is None
        refused = await refusal(desk.operator.diff(0, 0))
        assert (refused.status, refused.code) == (400, "nothing_to_compare")

    at_desk(tmp_path, scenario)


def test_an_import_is_announced_with_what_became_of_it(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.operator.import_adapter("/somewhere", if_live=4, caller=OPERATOR)
        assert desk.imported == [(Path("/somewhere"), 4)]
        assert desk.told == [("adapter", {"version": 0, "why": "published", "reason": None})]

    at_desk(tmp_path, scenario)
