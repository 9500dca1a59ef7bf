"""What a switch from training to serving moves: an adapter here, the whole weights where they are merged.

The adapter's side is what the daemon reports of each update: the file that the server loads, the time to load it, and
the time in which nothing was decoded because of the routing. The other side is only the least that a merged model
costs: its weights, as the trainer holds them, written to a file once, flushed, and read again. That merging, converting
and starting a server on them come on top is not counted.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from edged.bench.figures import Figure
from edged.bench.session import BURST, Session, at_rest, burst, require_adapter

RATIO_TARGET = 0.01
FIRST_SEED = 9000
CHUNK_BYTES = 1 << 22


async def measure(session: Session) -> list[Figure]:
    """Figures of switches, as many as there are runs, and of as many moves of the weights between them."""
    await require_adapter(session)
    weights = list((session.folder / "cache").glob("base-*/*.safetensors"))
    loads_ms, sizes, moves_ms = [], [], []
    for run in range(session.runs):
        session.show(f"switch, {run + 1} of {session.runs}")
        done = await burst(session, seed=FIRST_SEED + run * BURST)
        if done.verdict == "published":
            loads_ms.append(done.metrics["gate/load_ms"] + done.metrics.get("swap_ms", 0.0))
            sizes.append(_served_bytes(session.folder, done.version))
        await at_rest(session)
        moves_ms.append(sum(moved_ms(path, session.folder) for path in weights))
    return figures_of(loads_ms, sizes, moves_ms, sum(path.stat().st_size for path in weights))


def _served_bytes(folder: Path, version: int) -> int:
    (adapter,) = (folder / "adapters").glob(f"v{version}-*/adapter.gguf")
    return adapter.stat().st_size


def moved_ms(path: Path, folder: Path) -> float:
    """Time to write the bytes of `path`, held in memory, to a file in `folder`, flush it, and read it again."""
    data = path.read_bytes()
    with tempfile.NamedTemporaryFile(dir=folder) as target:
        began = time.perf_counter()
        target.write(data)
        target.flush()
        os.fsync(target.fileno())
        target.seek(0)
        while target.read(CHUNK_BYTES):
            pass
        return (time.perf_counter() - began) * 1000


def figures_of(loads_ms: list[float], sizes: list[int], moves_ms: list[float], weights_bytes: int) -> list[Figure]:
    """Bytes and times of both, and the ratio of the bytes."""
    note = "" if loads_ms else "every candidate was refused"
    sizes_mb = tuple(size / 1e6 for size in sizes)
    return [
        Figure(part="switch", name="adapter: bytes loaded", unit="MB", samples=sizes_mb, note=note),
        Figure(part="switch", name="adapter: load and swap", unit="ms", samples=tuple(loads_ms), note=note),
        Figure(part="switch", name="whole weights: bytes moved", unit="MB", samples=(weights_bytes / 1e6,)),
        Figure(part="switch", name="whole weights: written and read once", unit="ms", samples=tuple(moves_ms)),
        Figure(
            part="switch",
            name="bytes, adapter / whole weights",
            unit="",
            samples=tuple(size / weights_bytes for size in sizes) if weights_bytes else (),
            target=RATIO_TARGET,
            note=note,
        ),
    ]
