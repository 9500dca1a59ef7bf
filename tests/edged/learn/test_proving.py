"""Gathering the evidence on a candidate: what is staged, what is remembered, and what a bad file leads to."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from adapters import manifest
from adapters.llamacpp_format import save_gguf_adapter
from edged.failure import JobRefused, WorkerLost
from engine import protocol

InBox = Callable[[Callable[[Any], Awaitable[None]]], None]
BASE = protocol.AdapterRef(version=0, folder=None)


async def candidate_of(box: Any) -> tuple[protocol.AdapterRef, protocol.TrainResult]:
    """A trained candidate, and what the trainer said of it."""
    update, job = await box.plan()
    result = box.write_out(box.folders.job(update.id), job)
    await box.trainer.start()
    return protocol.AdapterRef(version=1, folder=str(box.folders.candidate(update.id, 1))), result


def test_a_good_candidate_is_accepted_and_stands_staged_last(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        candidate, result = await candidate_of(box)
        judgement = await box.prover.prove(candidate, BASE, result)
        assert judgement.accepted, judgement.reason
        assert box.stage.staged == [0, 1]
        assert judgement.metrics["gate/norm"] == pytest.approx(box.make_weights(1).norm())
        assert judgement.metrics["gate/kl_live"] == 0.1
        assert judgement.metrics["gate/longest_gap_ms"] == 3.0

    in_box(scenario)


def test_the_answers_are_scored_under_the_base_with_ids_that_no_episode_has(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        candidate, result = await candidate_of(box)
        await box.prover.prove(candidate, BASE, result)
        for score in box.worker.scored:
            assert score.reference == BASE
            assert [episode.episode_id for episode in score.episodes] == [-1, -2]
            assert all(episode.adapter == BASE for episode in score.episodes)
            assert all(episode.logprobs == (None, None, None) for episode in score.episodes)

    in_box(scenario)


def test_the_fluency_of_a_version_is_measured_once(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        candidate, result = await candidate_of(box)
        await box.prover.prove(candidate, BASE, result)
        await box.prover.prove(candidate, BASE, result)
        assert box.stage.staged == [0, 1, 1]

    in_box(scenario)

    async def after_a_restart(box: Any) -> None:
        metrics = (await box.store.lineage.get(0)).metrics
        assert metrics["fluency/logprob"] == -1.5
        assert metrics["fluency/mean_tokens"] == 3.0

    in_box(after_a_restart)


@pytest.mark.parametrize("changes", [{"fluency_prompts": ("When?", "How?")}, {"fluency_tokens": 9}])
def test_fluency_that_was_measured_otherwise_is_measured_again(in_box: InBox, changes: dict[str, Any]) -> None:
    async def scenario(box: Any) -> None:
        candidate, result = await candidate_of(box)
        await box.prover.prove(candidate, BASE, result)
        for name, value in changes.items():
            setattr(box, name, value)
        await box.prover.prove(candidate, BASE, result)
        assert box.stage.staged == [0, 1, 0, 1]

    in_box(scenario)


def test_an_adapter_without_a_prediction_is_judged_by_the_rest(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        candidate, _ = await candidate_of(box)
        judgement = await box.prover.prove(candidate, BASE, None)
        assert judgement.accepted
        assert "gate/canary_gap" not in judgement.metrics

    in_box(scenario)


def test_a_server_that_ignores_the_adapter_is_refused(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        candidate, result = await candidate_of(box)
        box.stage.canary = box.LIVE_CANARY
        judgement = await box.prover.prove(candidate, BASE, result)
        assert not judgement.accepted
        assert "gate.canary_gap_max" in judgement.reason

    in_box(scenario)


def test_a_candidate_that_answers_with_nothing_is_refused_and_nothing_is_scored_for_it(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        candidate, result = await candidate_of(box)
        await box.prover.prove(candidate, BASE, result)  # measures the base while it has words
        box.stage.texts = False
        n_scored = len(box.worker.scored)
        judgement = await box.prover.prove(candidate, BASE, result)
        assert not judgement.accepted
        assert "100% of its answers to the fixed prompts are empty" in judgement.reason
        assert len(box.worker.scored) == n_scored

    in_box(scenario)


@pytest.mark.parametrize("damage", ["adapter_model.safetensors", "manifest.json"])
def test_a_candidate_with_a_damaged_file_is_refused_before_it_is_staged(in_box: InBox, damage: str) -> None:
    async def scenario(box: Any) -> None:
        candidate, result = await candidate_of(box)
        assert candidate.folder is not None
        file = Path(candidate.folder) / damage
        file.write_bytes(file.read_bytes()[:-9])
        judgement = await box.prover.prove(candidate, BASE, result)
        assert not judgement.accepted
        assert damage in judgement.reason
        assert box.stage.staged == []

    in_box(scenario)


def test_what_the_workers_cannot_do_is_told_to_the_caller(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        candidate, result = await candidate_of(box)
        box.stage.failures.append(JobRefused("adapter_mismatch", "another model's"))
        with pytest.raises(JobRefused, match="another model's"):
            await box.prover.prove(candidate, BASE, result)
        box.worker.is_ready = False
        with pytest.raises(WorkerLost, match="train worker is not running"):
            await box.prover.prove(candidate, BASE, result)

    in_box(scenario)


def test_a_served_file_that_is_not_what_was_trained_is_refused(in_box: InBox) -> None:
    async def scenario(box: Any) -> None:
        candidate, result = await candidate_of(box)
        folder = Path(str(candidate.folder))
        weights = dataclasses.replace(box.make_weights(1), alpha=box.make_weights(1).alpha * 4)
        (folder / "adapter.gguf").unlink()
        save_gguf_adapter(folder / "adapter.gguf", weights, version=1, parent=0, base_sha256=box.BASE_SHA256)
        written = manifest.parse_manifest((folder / manifest.MANIFEST_FILE).read_bytes())
        (folder / manifest.MANIFEST_FILE).unlink()
        anew = dataclasses.replace(written, files=manifest.describe_files(folder))
        (folder / manifest.MANIFEST_FILE).write_bytes(manifest.manifest_bytes(anew))
        judgement = await box.prover.prove(candidate, BASE, result)
        assert not judgement.accepted
        assert "is another adapter than the one that was trained" in judgement.reason
        assert box.stage.staged == []

    in_box(scenario)
