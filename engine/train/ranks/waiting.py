"""Calls that wait for other processes, made beside a thread that goes on looking after its own life."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from engine.train.lanes import WAIT_S

T = TypeVar("T")


def call_beside(call: Callable[[], T], tick: Callable[[], object]) -> T:
    """`call` in a thread of its own; its result, or its exception.

    Args:
        tick: called in this thread every WAIT_S meanwhile. If it raises, the call is left behind: its thread ends with
            what it waits for, or with the process.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:  # crosses to the caller's thread and is raised there
            failure.append(error)

    thread = threading.Thread(target=run, name="ranks", daemon=True)
    thread.start()
    thread.join(WAIT_S)
    while thread.is_alive():
        tick()
        thread.join(WAIT_S)
    if failure:
        raise failure[0]
    return outcome[0]
