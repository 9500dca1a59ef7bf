"""One update from its plan to its verdict, and what becomes of it when it is cut off at any point."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from edged.failure import JobRefused, WorkerBusy, WorkerDown, WorkerFault, WorkerLost
from edged.learn import updating
from edged.learn.folders import bytes_under
from edged.learn.laps import parts_of
from edged.learn.updating import PutOff
from edged.records import Update
from engine import protocol

InBox = Callable[[Callable[[Any], Awaitable[None]]], None]
MANY = 100_000
BUSY = WorkerBusy("answers still run in the spare context")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updating, "TRAINING_PAUSE_S", 0.0)
    monkeypatch.setattr(updating, "PROVING_PAUSE_S", 0.0)


async def carry(box: Any, rated_at: float | None = None) -> Update:
    """Plan an update and carry it to its verdict."""
    update, job = await box.plan()
    finished: Update = await box.updater.carry(update, job, rated_at)
    return finished


def test_a_good_update_is_published_live_and_served(in_box: InBox, tmp_path: Path) -> None:
    async def scenario(box: Any) -> None:
        finished = await carry(box)
        assert (finished.verdict, finished.reason, finished.version) == ("published", "all checks passed", 1)
        assert box.store.lineage.live().version == 1
        assert (box.stage.staged, box.stage.live) == ([0, 1], [1])
        assert (tmp_path / "CURRENT").read_text() == f"{box.store.lineage.folder(1)}\n"
        assert box.folders.versions()[1].name == box.store.lineage.folder(1)
        assert box.folders.checkpoint(1) is not None
        assert await box.unused() == 0

    in_box(scenario)


def test_a_published_update_tells_where_its_time_went(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        finished = await carry(box, rated_at=1.0)
        seconds = finished.seconds
        stages = {"start", "train", "wait", "gate", "publish", "swap"}
        assert set(seconds) == stages | {"queue", "total", "rating_to_live", "train/epochs", "train/wait"}
        assert sum(seconds[stage] for stage in stages) == pytest.approx(seconds["total"], abs=1e-9)
        assert seconds["train/epochs"] + seconds["train/wait"] == pytest.approx(seconds["train"], abs=1e-9)
        assert seconds["queue"] + seconds["total"] == pytest.approx(seconds["rating_to_live"], abs=1e-9)
        assert finished.metrics["busy/cores"] == 0.75
        assert finished.metrics["swap_ms"] == 1.5
        assert finished.metrics["reward/mean"] == 0.25
        assert finished.metrics["dropped/no_logprobs"] == 1.0
        assert finished.metrics["bytes/written"] > 1000
        adapter = await box.store.lineage.get(1)
        assert adapter.metrics["kl/live"] == 0.1
        assert adapter.metrics["fluency/logprob"] == -1.5

    in_box(scenario)


def test_the_learner_is_told_every_stage(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        await carry(box)
        assert box.stages == [(1, "training"), (1, "gating")]
        assert [progress.stage for progress in box.progress] == ["epochs"]

    in_box(scenario)


@pytest.mark.parametrize("behaviours", [["train"], ["refuse"], ["die", "die"]])
def test_no_job_folder_is_left_after_a_verdict(in_box: InBox, behaviours: list[str]) -> None:
    async def scenario(box: Any) -> None:
        box.worker.behaviours.extend(behaviours)
        await carry(box)
        assert list(box.folders.spool.iterdir()) == []

    in_box(scenario)


def test_a_trainer_that_dies_is_given_the_same_job_again(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.worker.behaviours.extend(["die", "die"])
        finished = await carry(box)
        assert (finished.verdict, finished.attempts) == ("published", 2)
        assert finished.seconds["lost"] > 0.0
        parts = parts_of(finished.seconds)
        assert sum(parts.values()) == pytest.approx(finished.seconds["total"], abs=1e-9)
        assert box.worker.trained == ["update-1"] * 3

    in_box(scenario)


def test_a_trainer_that_dies_every_time_puts_the_update_off(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.worker.behaviours.extend(["die"] * 3)
        with pytest.raises(updating.PutOff, match="the trainer died every time: 3 attempts") as put_off:
            await carry(box)
        assert put_off.value.deaths == 3
        (unfinished,) = await box.store.updates.unfinished()
        assert unfinished.attempts == 3
        assert (await box.unused(), box.store.lineage.live().version) == (2, 0)

    in_box(scenario)


def test_a_trainer_that_dies_after_its_work_was_done_is_not_asked_again(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.worker.behaviours.append("die_when_done")
        finished = await carry(box)
        assert finished.verdict == "published"
        assert box.worker.trained == ["update-1"]

    in_box(scenario)


def test_a_job_that_the_trainer_refuses_fails_with_its_reason(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.worker.behaviours.append("refuse")
        finished = await carry(box)
        assert (finished.verdict, finished.reason) == ("failed", "not_finite: the loss is NaN")
        assert box.worker.trained == ["update-1"]

    in_box(scenario)


def test_t_is_3_answers_that_a_failed_update_could_not_use_are_counted_by_reason(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.worker.behaviours.append("empty")
        finished = await carry(box)
        assert (finished.verdict, finished.metrics) == ("failed", {"dropped/engine_mismatch": 2.0})
        assert box.store.updates.left_out() == {"engine_mismatch": 2}

    in_box(scenario)


def test_a_trainer_whose_machine_lacks_something_for_a_moment_is_asked_again(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.worker.behaviours.extend(["disk_full", "disk_full"])
        assert (await carry(box)).verdict == "published"
        assert box.worker.trained == ["update-1"] * 3

    in_box(scenario)


def test_an_update_that_the_machine_cannot_make_is_put_off_and_uses_no_rating(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.worker.behaviours.extend(["disk_full"] * 3)
        with pytest.raises(PutOff, match="is the disk full"):
            await carry(box)
        assert [update.id for update in await box.store.updates.unfinished()] == [1]
        assert await box.unused() == 2

    in_box(scenario)


def test_a_trainer_that_cannot_run_leaves_the_update_unfinished(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.worker.fault = protocol.Fault(code="model_unreadable", message="truncated")
        with pytest.raises(WorkerFault):
            await carry(box)
        assert [update.id for update in await box.store.updates.unfinished()] == [1]

    in_box(scenario)


def test_a_candidate_that_the_gate_refuses_is_never_served(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.worker.metrics = {"kl/live": 0.75}
        finished = await carry(box)
        assert finished.verdict == "refused"
        assert "gate.live_kl_max" in str(finished.reason)
        assert finished.metrics["gate/kl_live"] == 0.75
        assert (box.stage.live, box.folders.versions(), box.store.lineage.live().version) == ([], {}, 0)
        assert (await box.store.lineage.get(1)).reason == finished.reason
        assert await box.unused() == 0

    in_box(scenario)


def test_a_candidate_that_a_worker_refuses_is_refused_with_its_words(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.stage.failures.append(JobRefused("not_finite", "logits are NaN"))
        finished = await carry(box)
        assert (finished.verdict, finished.reason) == ("refused", "a worker refused it: logits are NaN")

    in_box(scenario)


def test_a_candidate_that_the_engine_could_not_prove_for_a_moment_is_tried_again(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.stage.failures.extend([JobRefused("engine_error", "llama_decode returned -1")] * 2)
        assert (await carry(box)).verdict == "published"

    in_box(scenario)


def test_a_candidate_that_the_engine_cannot_prove_is_put_off_and_uses_no_rating(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.stage.failures.extend([JobRefused("engine_error", "llama_decode returned -1")] * 3)
        with pytest.raises(PutOff, match="it could not be proved: llama_decode"):
            await carry(box)
        assert await box.unused() == 2

    in_box(scenario)


def test_a_candidate_under_which_a_worker_dies_is_tried_again(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.stage.failures.extend([WorkerLost("the serve worker died")] * 2)
        assert (await carry(box)).verdict == "published"

    in_box(scenario)


def test_a_candidate_under_which_a_worker_dies_every_time_is_refused(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.stage.failures.extend([WorkerLost("the serve worker died")] * 3)
        finished = await carry(box)
        assert (finished.verdict, finished.reason) == (
            "refused",
            "a worker died under it every time it was tried",
        )

    in_box(scenario)


def test_a_serve_worker_that_is_still_starting_does_not_speak_against_the_candidate(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.stage.failures.extend([WorkerDown("the serve worker is not running")] * 20)
        assert (await carry(box)).verdict == "published"

    in_box(scenario)


def test_an_update_without_a_serve_worker_is_skipped_and_its_ratings_wait(
    in_box: InBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updating, "PROVING_WAIT_S", 0.0)

    async def scenario(box: Any) -> None:
        box.stage.failures.append(WorkerDown("the serve worker is not running"))
        finished = await carry(box)
        assert (finished.verdict, finished.reason) == (
            "skipped",
            "it could not be proved: the serve worker is not running",
        )
        assert await box.unused() == 2
        assert list(box.folders.spool.iterdir()) == []

    in_box(scenario)


@pytest.mark.parametrize("pin", [True, False])
def test_an_update_whose_parent_is_no_longer_live_is_skipped_and_its_files_go(in_box: InBox, pin: bool) -> None:
    async def scenario(box: Any) -> None:
        await carry(box)
        update, job = await box.plan()
        lineage = box.store.lineage
        if pin:
            await lineage.set_pinned(True, version=1, if_live=None, caller=box.OPERATOR)
        else:
            await lineage.set_live(0, why="rolled_back", caller=box.OPERATOR, if_live=None, now=50.0)
        finished = await box.updater.carry(update, job, None)
        assert finished.verdict == "skipped"
        assert ("is pinned" if pin else "version 0 is live, not 1") in str(finished.reason)
        assert (list(box.folders.versions()), box.folders.checkpoint(2)) == ([1], None)
        assert box.stage.live == [1]
        assert await box.unused() == 2

    in_box(scenario)


def test_a_version_that_is_not_served_yet_is_live_all_the_same(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.stage.is_behind = True
        finished = await carry(box)
        assert finished.verdict == "published"
        assert box.store.lineage.live().version == 1
        assert "swap_ms" not in finished.metrics
        assert "swap" not in finished.seconds

    in_box(scenario)


def test_a_serve_worker_that_is_not_free_costs_a_candidate_nothing_and_keeps_nobody_out(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        box.stage.failures.extend([BUSY] * MANY)
        carried = asyncio.create_task(carry(box))
        await box.until(lambda: len(box.stage.failures) < MANY)
        async with box.candidates:  # an operator gets in between two attempts
            assert box.stage.failures
            box.stage.failures.clear()
        assert (await carried).verdict == "published"

    in_box(scenario)


def test_an_update_whose_parent_stops_being_live_while_it_waits_is_not_judged(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        await carry(box)
        box.stage.failures.extend([BUSY] * MANY)
        carried = asyncio.create_task(carry(box))
        await box.until(lambda: len(box.stage.failures) < MANY)
        async with box.candidates:
            box.stage.failures.clear()
            await box.store.lineage.set_live(0, why="promoted", caller=box.OPERATOR, if_live=1, now=5.0)
        finished = await carried
        assert (finished.verdict, await box.unused()) == ("skipped", 2)
        assert "version 0 is live, not 1" in str(finished.reason)

    in_box(scenario)


def test_candidates_are_proved_one_at_a_time(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        seen: list[bool] = []
        stage = box.stage.stage

        async def watched(*arguments: Any, **options: Any) -> protocol.Staged:
            seen.append(box.candidates.locked())
            staged: protocol.Staged = await stage(*arguments, **options)
            return staged

        box.stage.stage = watched
        await carry(box)
        assert seen == [True, True]
        assert not box.candidates.locked()

    in_box(scenario)


# --------------------------------------------------------------------------------------------------- after a kill


async def take_up(box: Any) -> Update:
    """Carry the unfinished update, as a start after a kill does."""
    (update,) = await box.store.updates.unfinished()
    finished: Update = await box.updater.carry(update, box.folders.read_job(update.id), None)
    return finished


def test_killed_before_training_the_job_is_trained(in_box: InBox) -> None:
    async def killed(box: Any) -> None:
        await box.plan()

    async def restarted(box: Any) -> None:
        assert (await take_up(box)).verdict == "published"
        assert box.worker.trained == ["update-1"]

    in_box(killed)
    in_box(restarted)


def test_killed_while_training_the_same_job_is_trained_again(in_box: InBox) -> None:
    async def killed(box: Any) -> None:
        update, _ = await box.plan()
        await box.store.updates.set_state(update.id, "training", attempts=1)
        (box.folders.job(update.id) / "out.tmp").mkdir()

    async def restarted(box: Any) -> None:
        out = box.folders.job(1) / "out.tmp"
        out.rmdir()  # the trainer begins with an empty out.tmp
        finished = await take_up(box)
        assert (finished.verdict, finished.attempts) == ("published", 1)

    in_box(killed)
    in_box(restarted)


def test_killed_after_training_nothing_is_trained_again(in_box: InBox) -> None:
    async def killed(box: Any) -> None:
        update, job = await box.plan()
        await box.store.updates.set_state(update.id, "gating", attempts=1)
        box.write_out(box.folders.job(update.id), job)

    async def restarted(box: Any) -> None:
        assert (await take_up(box)).verdict == "published"
        assert box.worker.trained == []
        assert box.stage.live == [1]

    in_box(killed)
    in_box(restarted)


def test_killed_between_the_files_and_the_verdict_it_is_proved_and_published(in_box: InBox) -> None:
    async def killed(box: Any) -> None:
        update, job = await box.plan()
        box.write_out(box.folders.job(update.id), job)
        box.folders.publish(box.folders.candidate(update.id, update.version), None, update.version)

    async def restarted(box: Any) -> None:
        written = bytes_under(box.folders.job(1) / protocol.OUT_FOLDER) + bytes_under(box.folders.versions()[1])
        (box.folders.adapters / "v0-00000000").mkdir()
        (box.folders.adapters / "v0-00000000" / "of another version").write_bytes(b"x" * 1_000_000)
        finished = await take_up(box)
        assert finished.verdict == "published"
        assert finished.metrics["bytes/written"] == written
        assert (box.store.lineage.live().version, box.stage.live) == (1, [1])
        assert box.folders.checkpoint(1) is not None

    in_box(killed)
    in_box(restarted)


def test_killed_after_the_verdict_nothing_is_left_to_do(in_box: InBox) -> None:
    async def killed(box: Any) -> None:
        await carry(box)
        box.folders.job(1).mkdir()

    async def restarted(box: Any) -> None:
        assert await box.store.updates.unfinished() == []
        assert list(box.folders.spool.iterdir()) == []
        assert box.store.lineage.live().version == 1

    in_box(killed)
    in_box(restarted)


def test_an_update_that_was_tried_too_often_before_the_kill_is_put_off(in_box: InBox) -> None:
    async def killed(box: Any) -> None:
        update, _ = await box.plan()
        await box.store.updates.set_state(update.id, "training", attempts=3)

    async def restarted(box: Any) -> None:
        with pytest.raises(updating.PutOff, match="the trainer died every time"):
            await take_up(box)
        assert box.worker.trained == []

    in_box(killed)
    in_box(restarted)


@pytest.mark.parametrize("damage", [b"\x80", None])
def test_a_result_that_cannot_be_read_is_trained_again(in_box: InBox, damage: bytes | None) -> None:
    async def scenario(box: Any) -> None:
        update, job = await box.plan()
        box.write_out(box.folders.job(update.id), job)
        result = box.folders.job(update.id) / protocol.OUT_FOLDER / protocol.RESULT_FILE
        if damage is None:
            result.unlink()
        else:
            result.write_bytes(damage)
        finished = await box.updater.carry(update, job, None)
        assert finished.verdict == "published"
        assert box.worker.trained == ["update-1"]

    in_box(scenario)


def test_a_candidate_whose_files_were_damaged_is_refused(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        update, job = await box.plan()
        box.write_out(box.folders.job(update.id), job)
        (box.folders.candidate(update.id, 1) / "adapter.gguf").write_bytes(b"half")
        finished = await box.updater.carry(update, job, None)
        assert finished.verdict == "refused"
        assert "adapter.gguf" in str(finished.reason)

    in_box(scenario)
