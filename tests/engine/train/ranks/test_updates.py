"""Updates by two, three and four processes against the same update by one: the same bytes, whoever did what.

Tests are ordered by plan, because processes are started anew for each of them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from engine.protocol import EpisodeTokens, PreferredPair, Score, TrainJob, TrainPlan, TrainResult
from engine.train.job import JobFailed
from engine.train.ranks.leader import Leader
from engine.train.scorer import Scorer
from tests.engine.train.conftest import MakeEpisodes
from tests.engine.train.ranks.conftest import CUT, FOUR_APART, SHARED, SPLIT, train
from tests.engine.train.tiny import BASE, PPO, hash_tree, make_job, publish_lora, random_lora

PLANS = {"split": SPLIT, "sharded by three": CUT, "two actors and two others": FOUR_APART, "two actors": SHARED}
TOKENS = 32  # of a micro-batch: several to a rank
MIX = {"ppo": 1.0, "kto": 0.5, "dpo": 0.3, "sft": 0.1}


def mixed_job(episodes: MakeEpisodes, scorer: Scorer, tmp_path: Path, critic: str) -> TrainJob:
    """All that can be in a job: a parent that is not the reference, pairs, a correction, both sorts of critic."""
    tmp_path.mkdir()
    parent = publish_lora(tmp_path / "v1", random_lora(scorer.base), 1)
    rated = episodes(10, adapter=parent)
    first, second, third = (one.episode for one in episodes(3, seed=5))
    written = dataclasses.replace(second, episode_id=-1, logprobs=(None,) * len(second.completion_ids))
    return make_job(
        rated,
        parent=parent,
        version=2,
        objectives=MIX,
        pairs=(PreferredPair(chosen=first, rejected=third),),
        corrections=(written,),
        ppo=dataclasses.replace(PPO, critic=critic, critic_warmup_steps=2, kl_in="reward"),
    )


def on_plan(job: TrainJob, plan: TrainPlan) -> TrainJob:
    return dataclasses.replace(job, plan=dataclasses.replace(plan, micro_batch_tokens=TOKENS))


def same(result: TrainResult, other: TrainResult) -> bool:
    """But for the seconds."""
    return dataclasses.replace(result, seconds={}, usage={}) == dataclasses.replace(other, seconds={}, usage={})


@pytest.mark.parametrize("name", PLANS)
def test_an_update_by_several_processes_gives_the_bytes_of_one(
    leader: Leader, scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path, name: str
) -> None:
    for critic in ("head", "lora"):
        job = mixed_job(sample_episodes, scorer, tmp_path / critic, critic)
        result = train(leader, tmp_path / critic / "several", on_plan(job, PLANS[name]))
        assert len(leader.pids) == len(PLANS[name].devices) - 1
        alone = Leader(leader.start)
        expected = train(alone, tmp_path / critic / "one", on_plan(job, TrainPlan()))
        assert result.metrics == expected.metrics
        assert same(result, expected)
        assert result.usage["bytes/between_ranks"] > 0 == expected.usage["bytes/between_ranks"]
        assert 0.0 < result.usage["busy/lanes"] <= 1.0
        outputs = [hash_tree(tmp_path / critic / run / "out") for run in ("several", "one")]
        for output in outputs:
            del output["result.msgpack"]  # holds seconds
        assert outputs[0] == outputs[1]


def test_what_was_scored_ahead_by_several_is_what_one_would_have_scored(
    leader: Leader, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    episodes: tuple[EpisodeTokens, ...] = tuple(one.episode for one in sample_episodes(7))
    job = make_job(sample_episodes(7), plan=dataclasses.replace(SHARED, micro_batch_tokens=TOKENS))
    train(leader, tmp_path / "first", job)
    message = Score(job_id="score-1", episodes=episodes, reference=BASE)
    assert len(leader.pids) == 1
    assert leader.score(message, lambda: None) == Leader(leader.start).score(message, lambda: None)
    before = leader.pids
    again = train(leader, tmp_path / "again", job)
    assert leader.pids == before, "the processes stay for the next job"
    assert same(again, train(Leader(leader.start), tmp_path / "one", on_plan(job, TrainPlan())))


def test_a_job_that_cannot_be_learned_from_fails_in_all_processes_and_they_stay(
    leader: Leader, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    train(leader, tmp_path / "first", make_job(sample_episodes(4), plan=SHARED))
    before = leader.pids
    equal = [dataclasses.replace(one, reward=1.0) for one in sample_episodes(4)]
    with pytest.raises(JobFailed) as caught:
        train(leader, tmp_path / "equal", make_job(equal, objectives={"kto": 1.0}, plan=SHARED))
    assert caught.value.code == "batch_empty"
    wild = dataclasses.replace(PPO, learning_rate=1e30, epochs=4)
    with pytest.raises(JobFailed) as caught:
        train(leader, tmp_path / "wild", make_job(sample_episodes(6), ppo=wild, plan=SHARED))
    assert caught.value.code == "not_finite"
    train(leader, tmp_path / "last", make_job(sample_episodes(4), plan=SHARED))
    assert leader.pids == before


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"critic": (2,)}, "rising ranks below 2"),
        ({"actor": (1,)}, "expected rank 0 first"),
        ({"mode": "sharded"}, "used by all of its 2 ranks"),
        ({"devices": ("cuda:0", "cuda:1")}, "its first rank is on cuda:0, this trainer on cpu"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(
    leader: Leader, sample_episodes: MakeEpisodes, tmp_path: Path, change: dict[str, object], complaint: str
) -> None:
    plan = dataclasses.replace(SPLIT, **change)  # type: ignore[arg-type]
    with pytest.raises(JobFailed, match=complaint) as caught:
        train(leader, tmp_path / "job", make_job(sample_episodes(4), plan=plan))
    assert caught.value.code == "bad_job"
