"""Adapters from outside: what is taken, what is sent back, and what is left behind when it goes wrong."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adapters.folder import load_adapter_folder, write_adapter_folder
from adapters.llamacpp_format import save_gguf_adapter
from adapters.peft import save_peft
from edged.failure import JobRefused, WorkerBusy, WorkerLost
from edged.learn.importing import Importer
from edged.records import Adapter
from edged.refusal import Refused
from engine import protocol

InBox = Callable[[Callable[[Any], Awaitable[None]]], None]


async def nothing() -> None:
    """The serve worker is awake."""


def importer_of(
    box: Any, lora: protocol.LoraSettings | None = None, awake: Callable[[], Awaitable[None]] | None = None
) -> Importer:
    return Importer(
        folders=box.folders,
        lineage=box.store.lineage,
        trainer=box.trainer,
        prover=box.prover,
        router=box.stage,
        candidates=box.candidates,
        base=box.SHAPE,
        base_sha256=box.BASE_SHA256,
        base_name="small",
        lora=lora or box.LORA,
        is_stopping=lambda: box.is_stopping,
        awake=awake or nothing,
    )


async def bring(box: Any, folder: Path) -> Adapter:
    return await importer_of(box).bring(folder, box.OPERATOR)


def test_the_serve_worker_is_woken_before_an_adapter_is_proved(in_box: InBox, peft_folder: Path) -> None:
    async def steps(box: Any) -> None:
        box.stage.failures.append(WorkerLost("the serve worker is not running"))

        async def awake() -> None:
            box.stage.failures.clear()

        adapter = await importer_of(box, awake=awake).bring(peft_folder, box.OPERATOR)
        assert adapter.state == "published"

    in_box(steps)


async def refusal(box: Any, folder: Path) -> Refused:
    with pytest.raises(Refused) as caught:
        await bring(box, folder)
    return caught.value


@pytest.fixture
def peft_folder(tmp_path: Path, in_box: InBox) -> Path:
    """An adapter that fits this box, as PEFT writes it."""
    folder = tmp_path / "outside"
    folder.mkdir()

    async def write(box: Any) -> None:
        save_peft(folder, box.make_weights(70), "small")

    in_box(write)
    return folder


def test_a_good_adapter_is_published_and_live(in_box: InBox, peft_folder: Path, tmp_path: Path) -> None:
    async def scenario(box: Any) -> None:
        adapter = await bring(box, peft_folder)
        assert (adapter.version, adapter.state, adapter.origin, adapter.reason) == (
            1,
            "published",
            "imported",
            "by uid:0",
        )
        assert (box.store.lineage.live().version, box.stage.live) == (1, [1])
        assert adapter.folder is not None
        weights, manifest = load_adapter_folder(box.folders.adapters / adapter.folder, box.SHAPE)
        assert weights.sha256() == box.make_weights(70).sha256() == adapter.sha256
        assert (manifest.origin, manifest.parent, manifest.version) == ("imported", None, 1)
        assert (tmp_path / "CURRENT").read_text() == f"{adapter.folder}\n"
        assert list(box.folders.spool.iterdir()) == []

    in_box(scenario)


def test_an_adapter_that_the_gate_refuses_is_recorded_and_not_served(in_box: InBox, peft_folder: Path) -> None:
    async def scenario(box: Any) -> None:
        box.limits = dataclasses.replace(box.limits, norm_max=0.001)
        adapter = await bring(box, peft_folder)
        assert adapter.state == "refused"
        assert "gate.norm_max" in str(adapter.reason)
        assert adapter.metrics["gate/norm"] > 0.001
        assert (box.store.lineage.live().version, box.folders.versions(), box.stage.live) == (0, {}, [])

    in_box(scenario)


@pytest.mark.parametrize("missing", ["adapter_model.safetensors", "adapter_config.json", None])
def test_files_that_are_no_adapter_are_sent_back(in_box: InBox, peft_folder: Path, missing: str | None) -> None:
    if missing is not None:
        (peft_folder / missing).unlink()

    async def scenario(box: Any) -> None:
        refused = await refusal(box, peft_folder if missing else peft_folder / "not there")
        assert (refused.status, refused.code, refused.param) == (400, "bad_adapter", "folder")
        assert await box.store.lineage.newest_version() == 0

    in_box(scenario)


def test_an_adapter_full_of_nan_is_sent_back(in_box: InBox, peft_folder: Path) -> None:
    file = peft_folder / "adapter_model.safetensors"
    save_file({name: np.full_like(tensor, np.nan) for name, tensor in load_file(file).items()}, file)

    async def scenario(box: Any) -> None:
        refused = await refusal(box, peft_folder)
        assert (refused.status, refused.code) == (400, "bad_adapter")
        assert "NaN" in refused.message
        assert await box.store.lineage.newest_version() == 0

    in_box(scenario)


def test_what_is_live_says_what_can_be_imported_and_not_the_settings(in_box: InBox, tmp_path: Path) -> None:
    async def scenario(box: Any) -> None:
        update, job = await box.plan()
        assert (await box.updater.carry(update, job, None)).verdict == "published"
        importer = importer_of(box, protocol.LoraSettings(rank=3, alpha=4.0, layers=1))
        for rank in (2, 3):
            (tmp_path / f"rank{rank}").mkdir()
            save_peft(tmp_path / f"rank{rank}", box.make_weights(7, rank=rank), "small")
        with pytest.raises(Refused, match=r"rank 3 .*, v1, which is live, has rank 2") as caught:
            await importer.bring(tmp_path / "rank3", box.OPERATOR)
        assert caught.value.code == "other_profile"
        assert (await importer.bring(tmp_path / "rank2", box.OPERATOR)).state == "published"

    in_box(scenario)


def test_an_adapter_of_another_box_with_another_base_model_is_sent_back(in_box: InBox, tmp_path: Path) -> None:
    async def scenario(box: Any) -> None:
        folder = tmp_path / "other"
        write_adapter_folder(
            folder,
            box.make_weights(1),
            version=9,
            parent=None,
            base_sha256="c" * 64,
            base_model_name="small",
            origin="trained",
            created_at=1.0,
        )
        refused = await refusal(box, folder)
        assert (refused.status, refused.code) == (400, "bad_adapter")
        assert "cccccccc" in refused.message

    in_box(scenario)


def test_a_llama_cpp_adapter_file_is_taken_like_a_folder(in_box: InBox, tmp_path: Path) -> None:
    async def scenario(box: Any) -> None:
        file = tmp_path / "outside.gguf"
        save_gguf_adapter(file, box.make_weights(70), version=9, parent=None, base_sha256=box.BASE_SHA256)
        adapter = await bring(box, file)
        assert (adapter.state, adapter.sha256) == ("published", box.make_weights(70).sha256())
        assert adapter.folder is not None
        load_adapter_folder(box.folders.adapters / adapter.folder, box.SHAPE)

    in_box(scenario)


@pytest.mark.parametrize("damage", ["another base", "cut"])
def test_a_llama_cpp_adapter_file_that_is_none_of_this_base_is_sent_back(
    in_box: InBox, tmp_path: Path, damage: str
) -> None:
    async def scenario(box: Any) -> None:
        file = tmp_path / "outside.gguf"
        base_sha256 = "c" * 64 if damage == "another base" else box.BASE_SHA256
        save_gguf_adapter(file, box.make_weights(1), version=9, parent=None, base_sha256=base_sha256)
        if damage == "cut":
            file.write_bytes(file.read_bytes()[:-8])
        refused = await refusal(box, file)
        assert (refused.status, refused.code) == (400, "bad_adapter")
        assert await box.store.lineage.newest_version() == 0

    in_box(scenario)


@pytest.mark.parametrize("profile", [{"rank": 3}, {"layers": 2}])
def test_an_adapter_that_this_box_could_not_go_on_training_is_sent_back(
    in_box: InBox, tmp_path: Path, profile: dict[str, int]
) -> None:
    async def scenario(box: Any) -> None:
        folder = tmp_path / "other"
        folder.mkdir()
        save_peft(folder, box.make_weights(1, **profile), "small")
        refused = await refusal(box, folder)
        assert (refused.status, refused.code) == (400, "other_profile")
        assert "[lora]" in refused.message

    in_box(scenario)


def test_nothing_is_brought_in_while_a_version_is_pinned(in_box: InBox, peft_folder: Path) -> None:
    async def scenario(box: Any) -> None:
        await box.store.lineage.set_pinned(True, version=0, if_live=None, caller=box.OPERATOR)
        refused = await refusal(box, peft_folder)
        assert (refused.status, refused.code) == (409, "pinned")
        assert await box.store.lineage.newest_version() == 0

    in_box(scenario)


def test_an_import_that_expects_another_live_version_changes_nothing(in_box: InBox, peft_folder: Path) -> None:
    async def scenario(box: Any) -> None:
        with pytest.raises(Refused) as caught:
            await importer_of(box).bring(peft_folder, box.OPERATOR, if_live=3)
        assert (caught.value.status, caught.value.code) == (409, "live_changed")
        assert (await box.store.lineage.newest_version(), box.stage.staged) == (0, [])
        adapter = await importer_of(box).bring(peft_folder, box.OPERATOR, if_live=0)
        assert (adapter.state, box.store.lineage.live().version) == ("published", 1)

    in_box(scenario)


def test_a_version_that_is_pinned_during_the_judging_stays_live(in_box: InBox, peft_folder: Path) -> None:
    async def scenario(box: Any) -> None:
        stage = box.stage.stage

        async def stage_and_pin(*arguments: Any, **options: Any) -> protocol.Staged:
            await box.store.lineage.set_pinned(True, version=0, if_live=None, caller=box.OPERATOR)
            staged: protocol.Staged = await stage(*arguments, **options)
            return staged

        box.stage.stage = stage_and_pin
        adapter = await bring(box, peft_folder)
        assert adapter.state == "refused"
        assert "pinned" in str(adapter.reason)
        assert (box.folders.versions(), box.stage.live) == ({}, [])

    in_box(scenario)


def test_an_adapter_that_the_engine_cannot_load_is_refused_with_its_words(in_box: InBox, peft_folder: Path) -> None:
    async def scenario(box: Any) -> None:
        box.stage.failures.append(JobRefused("adapter_mismatch", "another model's"))
        adapter = await bring(box, peft_folder)
        assert (adapter.state, adapter.reason) == ("refused", "a worker refused it: another model's")

    in_box(scenario)


@pytest.mark.parametrize("with_fault", [True, False])
def test_an_adapter_that_cannot_be_judged_is_given_up_and_the_caller_told_to_come_back(
    in_box: InBox, peft_folder: Path, with_fault: bool
) -> None:
    async def scenario(box: Any) -> None:
        if with_fault:
            box.worker.fault = protocol.Fault(code="out_of_memory", message="no memory")
        else:
            box.stage.failures.append(WorkerLost("the serve worker died"))
        refused = await refusal(box, peft_folder)
        assert (refused.status, refused.code) == (503, "engine_unavailable")
        assert refused.retry_after_s is not None
        assert (await box.store.lineage.get(1)).state == "refused"
        assert list(box.folders.spool.iterdir()) == []

    in_box(scenario)


def test_a_stop_of_the_daemon_is_said_and_speaks_against_no_adapter(in_box: InBox, peft_folder: Path) -> None:
    async def scenario(box: Any) -> None:
        box.is_stopping = True
        box.stage.failures.append(WorkerLost("the train worker died"))
        refused = await refusal(box, peft_folder)
        assert (refused.status, refused.code) == (503, "shutting_down")
        assert (await box.store.lineage.get(1)).state == "candidate"
        assert list(box.folders.spool.iterdir()) == []

    in_box(scenario)


def test_what_is_live_can_change_while_an_import_waits_for_the_spare_context(in_box: InBox, peft_folder: Path) -> None:
    async def scenario(box: Any) -> None:
        await bring(box, peft_folder)
        box.stage.failures.extend([WorkerBusy("answers still run in the spare context")] * 1000)
        waiting = asyncio.create_task(bring(box, peft_folder))
        await box.until(lambda: len(box.stage.failures) < 1000)
        async with box.candidates:
            box.stage.failures.clear()
            await box.store.lineage.set_live(0, why="promoted", caller=box.OPERATOR, if_live=1, now=5.0)
        adapter = await waiting
        assert (adapter.version, adapter.state) == (2, "published")

    in_box(scenario)


def test_an_adapter_that_is_not_served_yet_is_live_all_the_same(in_box: InBox, peft_folder: Path) -> None:
    async def scenario(box: Any) -> None:
        box.stage.is_behind = True
        adapter = await bring(box, peft_folder)
        assert adapter.state == "published"
        assert box.store.lineage.live().version == 1

    in_box(scenario)


def test_an_import_waits_for_the_candidate_before_it(in_box: InBox, peft_folder: Path) -> None:
    async def scenario(box: Any) -> None:
        async with box.candidates:
            waiting = asyncio.create_task(bring(box, peft_folder))
            await asyncio.sleep(0.05)
            assert await box.store.lineage.newest_version() == 0
        assert (await waiting).state == "published"

    in_box(scenario)
