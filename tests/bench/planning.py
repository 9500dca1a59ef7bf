"""What planning a decode step costs: `python tests/bench/planning.py`. No model and no engine, CPU time of pure Python.

A full context with 16 and with 64 answers, 400 prompt tokens each of which 150 are common, and requests that wait: once
all slots are taken, once a slot is free and the next request waits for cells, so that it is looked at in every step.
Prints microseconds a step as JSON.
"""

from __future__ import annotations

import json
import random
import time

from engine.generate.scheduler import Piece, Scheduler

N_PROMPT, N_COMMON, ROOM = 400, 150, 400
STEPS = 300
N_VOCAB = 49_152


def measure(slots: int, *, is_blocked: bool) -> float:
    """Microseconds of CPU time to plan a step in which `slots` answers get a token each.

    Args:
        is_blocked: the context has no cells for the last slot.
    """
    drawn = random.Random(slots)
    common = tuple(drawn.randrange(N_VOCAB) for _ in range(N_COMMON))
    cells = slots * (N_PROMPT + ROOM) + (-ROOM if is_blocked else N_COMMON)
    shared = (slots - 2 if is_blocked else slots - 1) * N_COMMON
    scheduler = Scheduler(slots=slots, n_sequences=slots + 8, pool_tokens=cells - shared)
    for number in range(slots + 20):
        own = tuple(drawn.randrange(N_VOCAB) for _ in range(N_PROMPT - N_COMMON))
        scheduler.submit(Piece(number, common + own, N_PROMPT - 1, ROOM, user=f"user {number % 5}"))
    active = slots - 1 if is_blocked else slots
    while len(rows := scheduler.plan(512).rows) < active:
        for row in rows:
            scheduler.append(row.key, drawn.randrange(N_VOCAB))
    spent_s = 0.0
    for _ in range(STEPS):
        for row in rows:
            scheduler.append(row.key, drawn.randrange(N_VOCAB))
        began = time.process_time()
        rows = scheduler.plan(32).rows
        spent_s += time.process_time() - began
        assert len(rows) == active
    return 1e6 * spent_s / STEPS


if __name__ == "__main__":
    print(
        json.dumps(
            {
                f"{slots} slots": {
                    "all taken": round(measure(slots, is_blocked=False)),
                    "waiting for cells": round(measure(slots, is_blocked=True)),
                }
                for slots in (16, 64)
            },
            indent=2,
        )
    )
