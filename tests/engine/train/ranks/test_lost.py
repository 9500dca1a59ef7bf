"""Processes of an update that are killed or stopped in the middle: the job is lost, the train worker is not."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import msgpack
import pytest

from engine.protocol import StartTrain, to_map
from engine.train.job import JobFailed
from engine.train.ranks.leader import Leader
from tests.engine.train.conftest import MakeEpisodes
from tests.engine.train.ranks.conftest import CUT, SHARED, start_message, train
from tests.engine.train.tiny import make_job, silent, write_job

GONE_WITHIN_S = 30.0


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def wait_until_gone(pids: Iterable[int]) -> None:
    """Until all of their threads have ended: a process is a zombie before, and its parent is not told yet."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([descriptor], [], [], GONE_WITHIN_S)[0]
        finally:
            os.close(descriptor)


def send_at(leader: Leader, stage: str, sign: signal.Signals, sent: list[int]) -> Callable[..., None]:
    """A tick that sends `sign` to the other processes at the first mention of `stage`."""

    def tick(now: str, *_: int) -> None:
        if now == stage and not sent:
            sent.extend(leader.pids)
            for pid in leader.pids:
                os.kill(pid, sign)

    return tick


@pytest.fixture
def start(tiny_folder: Path, tmp_path: Path) -> StartTrain:
    (tmp_path / "cache").mkdir()
    return start_message(tiny_folder, tmp_path / "cache")


def test_a_rank_killed_in_the_middle_costs_the_job_and_the_next_one_gets_fresh_ones(
    start: StartTrain, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    leader = Leader(start)
    job = make_job(sample_episodes(8), plan=SHARED)
    killed: list[int] = []
    with pytest.raises(JobFailed, match="rank 1|between ranks") as caught:
        leader.train(write_job(tmp_path / "job", job), send_at(leader, "optimise", signal.SIGKILL, killed))
    assert caught.value.code == "rank_lost"
    assert killed
    assert leader.pids == ()
    assert not (tmp_path / "job" / "out").exists()
    result = leader.train(tmp_path / "job", silent)
    assert leader.pids != tuple(killed)
    assert result.metrics == train(Leader(start), tmp_path / "whole", job).metrics
    (second,) = leader.pids
    os.kill(second, signal.SIGKILL)  # between two jobs: costs neither
    wait_until_gone((second,))
    assert train(leader, tmp_path / "third", job).metrics == result.metrics
    assert leader.pids != (second,)
    (second,) = leader.pids
    leader.close()
    assert not is_running(second)


def test_a_rank_that_hangs_in_the_middle_costs_the_job_and_is_ended(
    start: StartTrain, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    leader = Leader(start, silent_after_s=8.0)
    stopped: list[int] = []
    with pytest.raises(JobFailed, match="gives no sign") as caught:
        leader.train(
            write_job(tmp_path / "job", make_job(sample_episodes(8), plan=CUT)),
            send_at(leader, "optimise", signal.SIGSTOP, stopped),
        )
    assert caught.value.code == "rank_lost"
    assert stopped
    assert not any(map(is_running, stopped))


TRAIN_WORKER = """
import sys, time
from pathlib import Path
import msgpack
from engine.protocol import StartTrain, from_map
from engine.train.ranks.leader import Leader
leader = Leader(from_map(StartTrain, msgpack.unpackb(Path(sys.argv[1]).read_bytes())))
def tell(*_):
    if leader.pids:
        print(*leader.pids, flush=True)
        time.sleep(1000)
leader.train(Path(sys.argv[2]), tell)
"""


def test_the_ranks_end_with_a_train_worker_that_is_killed(
    start: StartTrain, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    folder = write_job(tmp_path / "job", make_job(sample_episodes(8), plan=SHARED))
    (tmp_path / "start.msgpack").write_bytes(msgpack.packb(to_map(start)))
    command = [sys.executable, "-c", TRAIN_WORKER, str(tmp_path / "start.msgpack"), str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as worker:
        assert worker.stdout is not None
        ranks = [int(word) for word in worker.stdout.readline().split()]
        assert ranks
        assert all(map(is_running, ranks))
        worker.kill()
    wait_until_gone(ranks)
