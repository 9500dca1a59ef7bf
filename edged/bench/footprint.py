"""Memory of the daemon and of the whole product, and the CPU time that they take while nothing happens."""

from __future__ import annotations

import asyncio

from edged.bench.figures import Figure
from edged.bench.processes import cpu_s, family, rss_bytes
from edged.bench.session import Session, at_rest, require_adapter

DAEMON_TARGET_MB = 90.0
ALL_TARGET_MB = 2500.0
IDLE_TARGET_PERCENT = 0.5
SETTLE_S = 5.0
IDLE_S = 20.0


async def measure(session: Session) -> list[Figure]:
    """After an update, so that the train worker is there too."""
    await require_adapter(session)
    await at_rest(session)
    session.show("coming to rest")
    await asyncio.sleep(SETTLE_S)
    session.show(f"idle for {IDLE_S:.0f} s")
    before = {pid: cpu_s(pid) for pid in family(session.child.pid)}
    await asyncio.sleep(IDLE_S)
    used = {pid: cpu_s(pid) - before.get(pid, 0.0) for pid in family(session.child.pid)}
    memory = {pid: rss_bytes(pid) for pid in family(session.child.pid)}
    daemon = session.child.pid
    return [
        _figure("daemon, resident", "MB", memory[daemon] / 1e6, DAEMON_TARGET_MB),
        _figure(f"all {len(memory)} processes, resident", "MB", sum(memory.values()) / 1e6, ALL_TARGET_MB),
        _figure("daemon, idle CPU", "% of a core", 100 * used[daemon] / IDLE_S, IDLE_TARGET_PERCENT),
        _figure("all processes, idle CPU", "% of a core", 100 * sum(used.values()) / IDLE_S, None),
    ]


def _figure(name: str, unit: str, value: float, target: float | None) -> Figure:
    return Figure(part="footprint", name=name, unit=unit, samples=(value,), target=target)
