"""Sampling speed of the real serve worker, over the worker protocol: `python tests/bench/sampling.py MODEL.gguf`.

Starts `engine.worker serve` as the daemon does and measures decode speed at 1, 4 and 16 sequences, without and with a
random adapter (rank 8, top third of the blocks); then swaps under full load. Prints JSON. Imports nothing of the
daemon.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from adapters.folder import write_adapter_folder
from adapters.llamacpp_format import read_base_shape
from adapters.weights import AdapterWeights
from engine import protocol
from engine.protocol import AdapterRef, ChatMessage, Message, ProbeText, Sampling

PROMPTS = (
    "What is the capital of France?",
    "Explain what a hash table is.",
    "Give me a short recipe for pancakes.",
    "Why is the sky blue?",
    "How do I boil an egg?",
    "Name three uses of copper.",
    "What does a compiler do?",
    "Tell me about the moon.",
)
NEW_TOKENS = 64
REPEATS = 3
REPLY_TIMEOUT_S = 120.0
EPOCH = 1
NAME = "serve"


class Worker:
    """A serve worker and the daemon's end of its link."""

    def __init__(self, folder: Path, start: protocol.StartServe) -> None:
        endpoint = f"ipc://{folder}/link"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(endpoint)
        environment = os.environ | {
            protocol.ENV_ENDPOINT: endpoint,
            protocol.ENV_NAME: NAME,
            protocol.ENV_EPOCH: str(EPOCH),
            "EDGED_DAEMON_PID": str(os.getpid()),
            "EDGED_LOG_LEVEL": "WARNING",
        }
        self.process = subprocess.Popen([sys.executable, "-P", "-m", "engine.worker", "serve"], env=environment)
        self.expect(protocol.Hello)
        self.send(start)
        self.ready = self.expect(protocol.Ready)

    def send(self, message: Message) -> None:
        self._socket.send_multipart([f"{NAME}:{EPOCH}".encode(), protocol.encode(message, EPOCH)])

    def receive(self) -> Message:
        """The next message that is no Beat."""
        deadline = time.monotonic() + REPLY_TIMEOUT_S
        while time.monotonic() < deadline:
            if not self._socket.poll(1000):
                if self.process.poll() is not None:
                    raise RuntimeError(f"the serve worker ended with exit code {self.process.returncode}")
                continue
            _, frame = self._socket.recv_multipart()
            _, message = protocol.decode(frame)
            if isinstance(message, protocol.Fault):
                raise RuntimeError(f"{message.code}: {message.message}")
            if not isinstance(message, protocol.Beat | protocol.Decoding):
                return message
        raise TimeoutError(f"the serve worker said nothing for {REPLY_TIMEOUT_S:g} s")

    def expect(self, *kinds: type[Message]) -> Any:
        """The next message of these kinds; others are dropped."""
        while not isinstance(message := self.receive(), kinds):
            pass
        return message

    def close(self) -> None:
        self.send(protocol.Stop(within_s=1.0))
        self.process.wait(30)
        self._socket.close(linger=0)
        self._context.term()


def measure(model_path: str, *, threads: int = 0, swaps: int = 20) -> dict[str, Any]:
    """All figures of one model: tokens/s by sequences, with and without adapter, staging and swap times.

    Args:
        threads: 0 takes all cores.
        swaps: under load, to and fro between two adapters.
    """
    start = protocol.StartServe(
        model_path=model_path,
        adapter=AdapterRef(version=0, folder=None),
        slots=16,
        context_tokens=8192,
        threads=threads or len(os.sched_getaffinity(0)),
        probes=tuple(ProbeText(user=p, assistant="It depends on what you want to do.") for p in PROMPTS),
    )
    with tempfile.TemporaryDirectory() as name, _worker(Path(name), start) as worker:
        folders = [_write_random_adapter(Path(name) / f"v{version}", model_path, version) for version in (1, 2)]
        figures: dict[str, Any] = {"load_s": worker.ready.load_s, "base": _speeds(worker)}
        figures["stage_idle"] = _stage(worker, 1, folders[0])
        worker.send(protocol.Route(job_id="route", version=1))
        worker.expect(protocol.Routed)
        figures["adapter"] = _speeds(worker)
        figures["swap"] = _swap_under_load(worker, folders[1], swaps)
        figures["rss_bytes"] = _rss_bytes(worker.process.pid)
        figures["idle_cpu_frac"] = _idle_cpu_frac(worker.process.pid)
    return figures


def _write_random_adapter(folder: Path, model_path: str, version: int) -> str:
    base = read_base_shape(Path(model_path))
    rng = np.random.default_rng(version)
    matrices = {}
    for module in base.top_modules(base.n_layers // 3):
        n_out, n_in = base.module_shape(module)
        a = rng.standard_normal((8, n_in), dtype=np.float32) * np.float32(0.02)
        b = rng.standard_normal((n_out, 8), dtype=np.float32) * np.float32(0.002)
        matrices[module] = (a, b)
    weights = AdapterWeights(base=base, rank=8, alpha=16.0, matrices=matrices)
    write_adapter_folder(
        folder,
        weights,
        version=version,
        parent=None,
        base_sha256="0" * 64,
        base_model_name="bench",
        origin="imported",
        created_at=0.0,
    )
    return str(folder)


@contextlib.contextmanager
def _worker(folder: Path, start: protocol.StartServe) -> Iterator[Worker]:
    worker = Worker(folder, start)
    try:
        yield worker
    finally:
        worker.close()


def _generate(request_id: str, number: int, *, max_tokens: int = NEW_TOKENS) -> protocol.Generate:
    return protocol.Generate(
        request_id=request_id,
        messages=(ChatMessage(role="user", content=f"{PROMPTS[number % len(PROMPTS)]} ({number})"),),
        prompt=None,
        n=1,
        sampling=Sampling(max_tokens=max_tokens, seed=number),
    )


def _speeds(worker: Worker) -> dict[str, dict[str, float]]:
    """By number of sequences: tokens/s of decoding alone and with the prefill, medians of REPEATS runs."""
    return {str(n): _speed(worker, n) for n in (1, 4, 16)}


def _speed(worker: Worker, n: int) -> dict[str, float]:
    whole, decode, first = [], [], []
    for repeat in range(REPEATS):
        began = time.perf_counter()
        for i in range(n):
            worker.send(_generate(f"speed-{n}-{repeat}-{i}", repeat * 16 + i))
        done: list[protocol.RequestDone] = []
        first_token_s = 0.0
        while len(done) < n:
            message = worker.expect(protocol.Chunk, protocol.RequestDone)
            first_token_s = first_token_s or time.perf_counter() - began
            if isinstance(message, protocol.RequestDone):
                done.append(message)
        whole.append(sum(d.completion_tokens for d in done) / (time.perf_counter() - began))
        decode.append(statistics.median(d.completion_tokens / d.decode_s for d in done) * n)
        first.append(first_token_s)
    return {
        "tokens_per_s": statistics.median(whole),
        "decode_tokens_per_s": statistics.median(decode),
        "first_token_s": statistics.median(first),
    }


def _stage(worker: Worker, version: int, folder: str) -> dict[str, float]:
    staged = _stage_and_wait(worker, version, folder)
    return {"load_ms": staged.load_ms, "prove_ms": staged.prove_ms, "longest_gap_ms": staged.longest_gap_ms}


def _stage_and_wait(worker: Worker, version: int, folder: str) -> protocol.Staged:
    worker.send(
        protocol.Stage(
            job_id=f"stage-{version}",
            adapter=AdapterRef(version=version, folder=folder),
            fluency_prompts=PROMPTS[:4],
            fluency_tokens=24,
            seed=1,
        )
    )
    answer = worker.expect(protocol.Staged, protocol.StageFailed)
    if isinstance(answer, protocol.StageFailed):
        raise RuntimeError(f"{answer.code}: {answer.message}")
    assert isinstance(answer, protocol.Staged)
    return answer


def _swap_under_load(worker: Worker, folder: str, swaps: int) -> dict[str, Any]:
    """Route to and fro between two versions while 16 requests run; every request must end with the version it began on.

    gap_ms: the longest time between two messages of running answers around a swap.
    """
    _stage_and_wait(worker, 2, folder)
    versions: dict[str, int] = {}
    swap_ms: list[float] = []
    finished = failed = 0
    numbers = iter(range(10**6))
    running: set[str] = set()
    gaps: list[float] = []
    live, last_chunk = 1, time.perf_counter()
    while len(swap_ms) < swaps or running:
        while len(running) < 16 and len(swap_ms) < swaps:
            request_id = f"load-{next(numbers)}"
            running.add(request_id)
            worker.send(_generate(request_id, len(versions), max_tokens=16))
        match worker.receive():
            case protocol.Begun() as begun:
                versions[begun.request_id] = begun.version
            case protocol.RequestDone() as done:
                running.discard(done.request_id)
                finished += 1
                if finished % 3 == 0 and len(swap_ms) < swaps:
                    live = 3 - live
                    worker.send(protocol.Route(job_id=f"swap-{finished}", version=live))
            case protocol.RequestFailed() as fail:
                running.discard(fail.request_id)
                failed += 1
            case protocol.Routed() as routed:
                swap_ms.append(routed.swap_ms)
            case protocol.Chunk():
                gaps.append((time.perf_counter() - last_chunk) * 1000)
                last_chunk = time.perf_counter()
    return {
        "swaps": len(swap_ms),
        "swap_ms_max": max(swap_ms),
        "gap_ms_max": max(gaps),
        "finished": finished,
        "failed": failed,
        "versions": sorted(set(versions.values())),
    }


def _rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _idle_cpu_frac(pid: int, seconds: float = 5.0) -> float:
    """Share of one core that the worker uses while nothing is asked."""
    time.sleep(1.0)
    before = _cpu_s(pid)
    time.sleep(seconds)
    return (_cpu_s(pid) - before) / seconds


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Sampling speed of the serve worker")
    parser.add_argument("model", help="path of the GGUF model")
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.model, threads=arguments.threads), indent=2))
