"""Memory that runs out in the middle of an update: smaller micro-batches, told and kept; and where that does not help.

The allocator is torch's own and so is its error: a product of a micro-batch asks it for more than there is.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from engine.protocol import TrainPlan
from engine.train import forward, optimise
from engine.train.batch import Selection
from engine.train.job import JobFailed, load_job, run_job
from engine.train.scorer import Scorer
from engine.train.shortage import halved, is_out_of_memory
from tests.engine.train.conftest import MakeEpisodes
from tests.engine.train.tiny import BASE_SHA256, hash_tree, make_job, silent, write_job

TOO_MUCH = 1 << 50  # numbers: more than any machine's address space has room for


def refuse_above(monkeypatch: pytest.MonkeyPatch, most_tokens: int) -> list[int]:
    """Let the allocator fail for micro-batches of more tokens; their sizes in the list that is given back."""
    sizes: list[int] = []

    def states(rollouts: list[forward.Rollout], *rest: object) -> torch.Tensor:
        sizes.append(sum(one.trunk.shape[0] for one in rollouts))
        if sizes[-1] > most_tokens:
            torch.empty(TOO_MUCH)
        return forward.completion_states(rollouts, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(optimise, "completion_states", states)
    return sizes


def test_an_update_that_runs_out_of_memory_is_done_with_smaller_micro_batches_from_its_start(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(sample_episodes(12))
    folder = write_job(tmp_path / "short", job)
    with monkeypatch.context() as patch:
        sizes = refuse_above(patch, 24)
        result = run_job(folder, scorer, BASE_SHA256, silent)
    plan = load_job(folder).plan
    assert max(sizes) > 24
    assert result.metrics["oom/halvings"] == plan.halvings > 0
    assert next(iter(result.seconds)) == "lost", "what was thrown away is told apart from what was used"
    assert plan.micro_batch_tokens == TrainPlan().micro_batch_tokens >> plan.halvings
    again = write_job(tmp_path / "again", dataclasses.replace(job, plan=plan))
    assert run_job(again, scorer, BASE_SHA256, silent).metrics == result.metrics
    assert hash_tree(again / "out" / "adapter") == hash_tree(folder / "out" / "adapter")


def test_an_answer_that_does_not_fit_alone_ends_the_job_with_out_of_memory(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    episodes = sample_episodes(8)
    shortest = min(len(one.episode.prompt_ids) + len(one.episode.completion_ids) for one in episodes)
    folder = write_job(tmp_path / "job", make_job(episodes))
    refuse_above(monkeypatch, 1)
    with pytest.raises(JobFailed) as caught:
        run_job(folder, scorer, BASE_SHA256, silent)
    assert caught.value.code == "out_of_memory"
    assert load_job(folder).plan.micro_batch_tokens == shortest
    assert [path.name for path in folder.iterdir()] == ["job.msgpack"]


def test_only_failed_allocations_count_as_memory_that_ran_out() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(TOO_MUCH)
    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_micro_batches_are_halved_down_to_the_shortest_answer(sample_episodes: MakeEpisodes) -> None:
    selection = Selection(sampled=tuple(sample_episodes(6)))
    plan: TrainPlan | None = TrainPlan(micro_batch_tokens=100)
    tokens = []
    while plan is not None:
        tokens.append(plan.micro_batch_tokens)
        plan = halved(plan, selection)
    lengths = [len(one.episode.prompt_ids) + len(one.episode.completion_ids) for one in selection.sampled]
    assert tokens[:3] == [100, 50, 25]
    assert tokens[-1] == min(lengths)
