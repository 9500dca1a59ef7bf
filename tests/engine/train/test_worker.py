"""The train worker as a real process, over a real socket: its life, its answers, and a kill in the middle of a job."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from engine.protocol import (
    ENV_ENDPOINT,
    ENV_EPOCH,
    ENV_NAME,
    EXIT_FAULT,
    Beat,
    Fault,
    Hello,
    Message,
    Pace,
    Progress,
    Ready,
    Score,
    Scored,
    StartTrain,
    Stop,
    Train,
    Trained,
    TrainFailed,
    TrainPlan,
    decode,
    encode,
)
from tests.engine.train.conftest import MakeEpisodes
from tests.engine.train.tiny import BASE, BASE_SHA256, LORA, PPO, hash_tree, make_job, write_job

EPOCH = 7
HANG_S = 120.0


class Daemon:
    """The daemon's end of the link, and the worker that it started."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        endpoint = f"ipc://{folder}/link"
        self._socket.bind(endpoint)
        self._peer = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine.worker", "train"],
            env={**os.environ, ENV_ENDPOINT: endpoint, ENV_NAME: "train", ENV_EPOCH: str(EPOCH)},
        )

    def send(self, message: Message) -> None:
        self._socket.send_multipart([self._peer, encode(message, EPOCH)])

    def receive(self, *kinds: type[Message]) -> Message:
        """The next message of one of `kinds`; beats and progress are passed over unless asked for."""
        while True:
            assert self._socket.poll(HANG_S * 1000), "the worker is silent"
            self._peer, data = self._socket.recv_multipart()
            epoch, message = decode(data)
            assert epoch == EPOCH
            if isinstance(message, kinds):
                return message
            assert isinstance(message, Beat | Progress), message

    def start(self, model: Path, cache: Path) -> None:
        hello = self.receive(Hello)
        assert isinstance(hello, Hello)
        assert (hello.role, hello.pid) == ("train", self.process.pid)
        self.send(
            StartTrain(
                model_path=str(model),
                base_sha256=BASE_SHA256,
                cache_folder=str(cache),
                lora=LORA,
                threads=2,
                dtype="float32",
                device="cpu",
                idle_class=False,  # on a busy machine the idle class would make these tests wait for minutes
            )
        )

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(HANG_S)
        self._context.destroy(linger=0)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path)
    yield made
    made.close()


def test_a_worker_scores_trains_reports_failures_and_stops(
    daemon: Daemon, tiny_folder: Path, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    daemon.start(tiny_folder, tmp_path / "cache")
    daemon.receive(Ready)
    episodes = sample_episodes(10)
    daemon.send(Score(job_id="s", episodes=tuple(rated.episode for rated in episodes), reference=BASE))
    scored = daemon.receive(Scored)
    assert isinstance(scored, Scored)
    assert [score.episode_id for score in scored.scores] == [rated.episode.episode_id for rated in episodes]
    assert all(score.kl == 0.0 for score in scored.scores)

    folder = write_job(tmp_path / "job", make_job(episodes))
    daemon.send(Pace(share=0.5))  # it rests between pieces of work, and comes to its end
    daemon.send(Train(job_id="t", folder=str(folder)))
    progress = daemon.receive(Progress)
    assert isinstance(progress, Progress)
    assert progress.total > 0
    trained = daemon.receive(Trained)
    assert isinstance(trained, Trained)
    assert trained.result.version == 1
    assert (folder / "out" / "adapter" / "adapter.gguf").exists()

    split = TrainPlan(mode="split", devices=("cpu", "cpu"), critic=(1,), reference=(1,))
    by_two = write_job(tmp_path / "by_two", make_job(episodes, plan=split))
    daemon.send(Train(job_id="t2", folder=str(by_two)))
    again = daemon.receive(Trained)
    assert isinstance(again, Trained)
    assert again.result.metrics == trained.result.metrics
    daemon.send(Score(job_id="s2", episodes=tuple(rated.episode for rated in episodes), reference=BASE))
    by_both = daemon.receive(Scored)
    assert isinstance(by_both, Scored)
    assert by_both.scores == scored.scores

    empty = write_job(tmp_path / "empty", make_job([dataclasses.replace(episodes[0], reward=float("inf"))]))
    daemon.send(Train(job_id="e", folder=str(empty)))
    failed = daemon.receive(TrainFailed)
    assert isinstance(failed, TrainFailed)
    assert (failed.code, failed.details) == ("batch_empty", {"reward_not_finite": 1})

    daemon.send(Stop(within_s=5.0))
    assert daemon.process.wait(HANG_S) == 0


def test_a_model_that_cannot_be_loaded_is_a_fault(daemon: Daemon, tmp_path: Path) -> None:
    daemon.start(tmp_path / "no-model.gguf", tmp_path / "cache")
    fault = daemon.receive(Fault)
    assert isinstance(fault, Fault)
    assert fault.code == "model_unreadable"
    assert daemon.process.wait(HANG_S) == EXIT_FAULT


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_t_res_1_an_update_that_is_cut_off_leaves_a_job_that_gives_the_same_bytes(
    end: str, tiny_folder: Path, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    long = make_job(sample_episodes(24), ppo=dataclasses.replace(PPO, epochs=6, minibatches=6))
    cut = write_job(tmp_path / "cut", long)
    whole = Path(shutil.copytree(cut, tmp_path / "whole"))
    for attempt, folder in (("first", cut), ("again", cut), ("uncut", whole)):
        (tmp_path / attempt).mkdir()
        daemon = Daemon(tmp_path / attempt)
        try:
            daemon.start(tiny_folder, tmp_path / "cache")
            daemon.receive(Ready)
            daemon.send(Train(job_id=attempt, folder=str(folder)))
            if attempt == "first":
                daemon.receive(Progress)
                daemon.receive(Progress)
                if end == "kill":
                    daemon.process.send_signal(signal.SIGKILL)
                    daemon.process.wait(HANG_S)
                else:
                    daemon.send(Stop(within_s=5.0))
                    assert daemon.process.wait(HANG_S) == 0
                assert not (folder / "out").exists()
            else:
                daemon.receive(Trained)
        finally:
            daemon.close()
    trees = [hash_tree(folder / "out") for folder in (cut, whole)]
    for tree in trees:
        del tree["result.msgpack"]  # holds the seconds it took
    assert trees[0] == trees[1]


def test_the_idle_class_holds_for_threads_started_afterwards() -> None:
    code = (
        "import os, threading\n"
        "from engine.train.worker import enter_idle_class\n"
        "enter_idle_class()\n"
        "thread = threading.Thread(target=lambda: print(os.sched_getscheduler(0) == os.SCHED_IDLE))\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANG_S)
    assert run.stdout.strip() == "True"
