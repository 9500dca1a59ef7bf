"""A whole cycle through a real daemon, as a side of a comparison: 16 answers, 16 ratings, update, gate, swap.

The daemon is started once, on the packaged model, and warms up with one cycle; a run is one more cycle. Time counts
from the first question to the first answer of the new adapter, or to the verdict if the gate refuses; memory is the sum
of the peaks of all the daemon's processes since they started.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

from contest import Side, peak_rss_bytes, read_joules
from places import MODEL

from edged.bench.processes import family
from edged.bench.session import BURST, Burst, Session, at_rest, rate_burst, sample_burst
from edged.cli.child import DaemonChild, running, socket_of
from edged.cli.connect import Peer, open_async_http

NAME = "edged"


@contextlib.contextmanager
def running_cycles(work: Path, *, layers: int, epochs: int, minibatches: int) -> Iterator[Side]:
    """The side, whose daemon is up and warm. layers: as of `[lora]`, 0 for all."""
    folder, config = work / "state", work / "edged.toml"
    # The idle class would measure what else the machine does; replay would train on more than the peer does.
    config.write_text(
        f"[lora]\nlayers = {json.dumps(layers or 'all')}\n"
        f"[learn]\nepochs = {epochs}\nminibatches = {minibatches}\nreplay_ratio = 0.0\nidle_class = false\n"
    )
    socket = socket_of(folder)
    arguments = ["--config", str(config), "--model", MODEL, "--listen", f"unix:{socket}"]
    with running(arguments, folder) as child:
        child.await_ready(Peer(socket=socket))
        seeds = itertools.count(100, BURST)
        asyncio.run(_cycle(child, Peer(socket=socket), next(seeds)))
        yield Side(name=NAME, run=lambda: asyncio.run(_cycle(child, Peer(socket=socket), next(seeds))))


async def _cycle(child: DaemonChild, peer: Peer, seed: int) -> dict[str, float]:
    async with open_async_http(peer) as http:
        session = Session(child=child, http=http, folder=child.state_folder, runs=1, show=lambda _: None)
        await at_rest(session)
        joules, began = read_joules(), time.monotonic()
        completions = await sample_burst(session, seed)
        sampled_s = time.monotonic() - began
        done = await rate_burst(session, completions)
    figures = {
        "cycle_s": sampled_s + done.seconds,
        "sample_s": sampled_s,
        "live_s": done.seconds,
        "is_published": float(done.verdict == "published"),
        "tokens": float(sum(completion["usage"]["completion_tokens"] for completion in completions)),
        "peak_rss_mb": sum(peak_rss_bytes(pid) for pid in family(child.pid)) / 1e6,
        **_told(done),
    }
    after = read_joules()
    return figures if joules is None or after is None or after < joules else figures | {"cycle_j": after - joules}


def _told(done: Burst) -> dict[str, float]:
    """The daemon's own figures of the update: seconds of its stages, and the bytes that it wrote."""
    stages = {f"{stage.replace('/', '_')}_s": seconds for stage, seconds in done.stages.items()}
    return stages | {"bytes_written": done.metrics["bytes/written"]}
