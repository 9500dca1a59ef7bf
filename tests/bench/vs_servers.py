"""This server against llama.cpp's own and llama-cpp-python's: `python tests/bench/vs_servers.py [--runs 3]`.

Same model file, same library, same adapter, same questions, same threads; 1, 4, 16 and 64 clients that stream, without
and with the adapter. Each server samples as it does by default at temperature 0.7 (edged from the whole vocabulary,
with the log-probability of every token recorded; llama.cpp from the 40 likeliest). All are up at once, sides take
turns, figures are medians; ratios are edged / llama.cpp. llama-cpp-python's server answers one request at a time and is
left out where that would only be a queue (`--all` asks it too).

The adapter is noise of a small norm, imported through edged's gate: what it says does not matter to the time it takes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
from contest import describe_machine
from peer_servers import ensure_llama_server, ensure_python_server
from places import MODEL, cache_folder, model_file

from adapters.llamacpp_format import read_base_shape
from adapters.peft import save_peft
from adapters.weights import AdapterWeights
from edged.bench.load import Loaded, chat_bodies, run_load
from edged.bench.processes import family, rss_bytes
from edged.bench.serve import ANSWERS, CLIENTS, PROMPTS, TOKENS
from edged.bench.session import TEMPERATURE
from edged.cli.child import running, socket_of
from edged.cli.connect import Client, Peer, open_async_http

EDGED, LLAMA, PYTHON = "edged", "llama.cpp", "llama-cpp-python"
AT_LEAST = {1: 0.97, 4: 1.0, 16: 1.0, 64: 1.1}
SIGMA = 0.005
READY_TIMEOUT_S = 600.0
ONE_AT_A_TIME = (1, 4)  # clients that a server without batching is asked with
SEQUENCE_TOKENS = 512  # of context for each slot


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server. adapt: put the adapter on (True) or take it off. pids: its processes now."""

    name: str
    open: Callable[[], httpx.AsyncClient]
    adapt: Callable[[bool], None]
    pids: Callable[[], list[int]]


@contextlib.contextmanager
def edged(work: Path, adapter: Path, slots: int, threads: int) -> Iterator[Server]:
    """The daemon, with `adapter` imported."""
    folder, config = work / "state", work / "edged.toml"
    config.write_text(
        f"[serve]\nslots = {slots}\ncontext_tokens = {slots * SEQUENCE_TOKENS}\nthreads = {threads}\n"
        "[learn]\nidle_class = false\n"
    )
    peer = Peer(socket=socket_of(folder))
    arguments = ["--config", str(config), "--model", MODEL, "--listen", f"unix:{peer.socket}"]
    with running(arguments, folder) as child:
        child.await_ready(peer)
        client = Client(peer, timeout_s=READY_TIMEOUT_S)
        brought = client.post("/v1/adapters/import", {"folder": str(adapter)})
        if brought["state"] != "published":
            raise SystemExit(f"the gate refused the adapter: {brought['reason']}")

        def adapt(wanted: bool) -> None:
            client.post(f"/v1/adapters/{brought['version'] if wanted else 0}/promote", {})

        yield Server(name=EDGED, open=lambda: open_async_http(peer), adapt=adapt, pids=lambda: family(child.pid))


@contextlib.contextmanager
def peer_process(
    name: str, command: list[str], port: int, adapt: Callable[[bool], None], log: Path
) -> Iterator[Server]:
    """A peer on a loopback port, ended with the block."""
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            _await_ready(name, port, process, log)

            def open_client() -> httpx.AsyncClient:
                limits = httpx.Limits(max_connections=None)
                return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600.0, limits=limits)

            yield Server(name=name, open=open_client, adapt=adapt, pids=lambda: family(process.pid))
        finally:
            process.terminate()


def _await_ready(name: str, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up_at = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < give_up_at and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"{name} does not answer: {log.read_text()[-2000:]}")


def llama_server(
    work: Path, binary: Path, adapter: Path, slots: int, threads: int
) -> contextlib.AbstractContextManager[Server]:
    """llama.cpp's server, whose adapter is put on and off by its scale: one of scale 0 is not computed."""
    port = free_port()
    command = [
        *(str(binary), "--model", str(model_file()), "--host", "127.0.0.1", "--port", str(port)),
        *("--parallel", str(slots), "--ctx-size", str(slots * SEQUENCE_TOKENS), "--threads", str(threads)),
        *("--lora", str(adapter), "--no-webui"),
    ]

    def adapt(wanted: bool) -> None:
        scales = [{"id": 0, "scale": float(wanted)}]
        httpx.post(f"http://127.0.0.1:{port}/lora-adapters", json=scales, timeout=60).raise_for_status()

    return peer_process(LLAMA, command, port, adapt, work / "llama-server.log")


def python_server(work: Path, python: Path, threads: int) -> contextlib.AbstractContextManager[Server]:
    """llama-cpp-python's server, without the adapter: it takes one at its start only."""
    port = free_port()
    command = [
        *(str(python), "-m", "llama_cpp.server", "--model", str(model_file()), "--host", "127.0.0.1"),
        *("--port", str(port), "--n_ctx", str(2 * SEQUENCE_TOKENS), "--n_threads", str(threads)),
        *("--interrupt_requests", "false"),  # or a new request would end the one that runs
    ]
    return peer_process(PYTHON, command, port, lambda wanted: None, work / "python-server.log")


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_adapter(folder: Path) -> Path:
    """A PEFT folder of noise on the top third of the blocks."""
    base, chance = read_base_shape(model_file()), np.random.default_rng(0)
    matrices = {}
    for module in base.top_modules(base.n_layers // 3):
        n_out, n_in = base.module_shape(module)
        a, b = (chance.normal(0, SIGMA, shape).astype(np.float32) for shape in ((8, n_in), (n_out, 8)))
        matrices[module] = (a, b)
    folder.mkdir()
    save_peft(folder, AdapterWeights(base=base, rank=8, alpha=16.0, matrices=matrices), MODEL)
    return folder


async def measure(server: Server, clients: int, seed: int) -> Loaded:
    """One run of the load."""
    prompts = itertools.islice(itertools.cycle(PROMPTS), ANSWERS[clients])
    bodies = chat_bodies(prompts, max_tokens=TOKENS, seed=seed, temperature=TEMPERATURE)
    async with server.open() as http:
        return await run_load(http, bodies, clients)


def contest(servers: list[Server], clients: int, with_adapter: bool, runs: int) -> dict[str, list[Loaded]]:
    """Server -> its loads, in turns after one short warm-up each."""
    found: dict[str, list[Loaded]] = {server.name: [] for server in servers}
    for server in servers:
        server.adapt(with_adapter)
        asyncio.run(measure(server, 1, seed=1))
    for run in range(runs):
        for server in servers:
            what = f"{clients} clients, {'with' if with_adapter else 'without'} adapter, {server.name}"
            print(f"run {run + 1} of {runs}: {what}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
            found[server.name].append(asyncio.run(measure(server, clients, seed=1000 * (run + 1))))
    return found


def show(clients: int, with_adapter: bool, found: dict[str, list[Loaded]]) -> bool:
    """Print medians and the ratio; whether it is met."""
    print(f"\n{clients} client{'s' if clients > 1 else ''}, {'with' if with_adapter else 'without'} adapter")
    print(f"{'':18} {'tokens/s':>9} {'(runs)':>16}  first token p50/p95/p99 ms   between tokens p50/p95/p99 ms")
    median: dict[str, float] = {}
    for name, loads in found.items():
        rates = [load.tokens_per_s for load in loads]
        median[name] = statistics.median(rates)
        first, between = (
            [statistics.median(v) for v in zip(*(f(x).values() for x in loads), strict=True)]
            for f in (Loaded.first_ms, Loaded.between_ms)
        )
        spread = f"({min(rates):.0f} .. {max(rates):.0f})"
        print(
            f"{name:18} {median[name]:9.1f} {spread:>16}  "
            f"{' / '.join(f'{v:.0f}' for v in first):28} {' / '.join(f'{v:.1f}' for v in between)}"
        )
    ratio, at_least = median[EDGED] / median[LLAMA], AT_LEAST[clients]
    print(f"edged / llama.cpp: {ratio:.2f}  (>= {at_least}: {'met' if ratio >= at_least else 'MISSED'})")
    return ratio >= at_least


def main() -> int:
    """Run it; 1 if a ratio is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--clients", type=int, nargs="*", default=list(CLIENTS), choices=CLIENTS)
    parser.add_argument("--all", action="store_true", help="ask llama-cpp-python's server with 16 and 64 clients too")
    options = parser.parse_args()
    cache, threads = cache_folder(), len(os.sched_getaffinity(0))
    print(describe_machine())
    with tempfile.TemporaryDirectory(prefix="vs-servers-") as name, contextlib.ExitStack() as stack:
        work = Path(name)
        ours = stack.enter_context(edged(work, make_adapter(work / "noise"), options.slots, threads))
        served = next((work / "state" / "adapters").glob("v*/adapter.gguf"))
        llama = stack.enter_context(llama_server(work, ensure_llama_server(cache), served, options.slots, threads))
        other = stack.enter_context(python_server(work, ensure_python_server(cache), threads))
        is_met = True
        for with_adapter, clients in itertools.product((False, True), options.clients):
            asked = [ours, llama]
            if not with_adapter and (options.all or clients in ONE_AT_A_TIME):
                asked.append(other)
            is_met &= show(clients, with_adapter, contest(asked, clients, with_adapter, options.runs))
        memory = {server.name: sum(rss_bytes(pid) for pid in server.pids()) / 1e6 for server in (ours, llama, other)}
        print("\nresident, all processes: " + ", ".join(f"{who} {mb:.0f} MB" for who, mb in memory.items()))
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
