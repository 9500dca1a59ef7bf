"""Reward functions of an operator: a good one, and everything that can be wrong with one."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

FOREVER_S = 600.0


class Mute(Exception):
    """Cannot be told."""

    def __str__(self) -> str:
        raise ValueError("no words")


def short(batch: list[dict[str, Any]]) -> list[float]:
    """Shorter is better."""
    return [1.0 - len(item["answer"]) / 10 for item in batch]


def by_order(batch: list[dict[str, Any]]) -> Any:
    """Does what the first answer says."""
    answer, _, path = batch[0]["answer"].partition(" child:")
    if path:
        child = os.fork()
        if child == 0:
            time.sleep(FOREVER_S)
            os._exit(0)
        Path(path).write_text(str(child))
    if answer == "raise":
        raise ValueError("no such word")
    if answer == "mute":
        raise Mute
    if answer == "set":
        return {float(number) for number, _ in enumerate(batch)}
    if answer == "exit":
        sys.exit("enough")
    if answer == "die":
        os._exit(7)
    if answer == "sleep":
        time.sleep(FOREVER_S)
    if answer == "hold":
        # Backtracking for longer than anybody waits, in native code that keeps the interpreter's lock.
        re.match(r"(a+)+$", "a" * 60 + "b")
    if answer == "none":
        return [None for _ in batch]
    if answer == "few":
        return []
    if answer == "nan":
        return [float("nan") for _ in batch]
    if answer == "much":
        return [9.0 for _ in batch]
    if answer == "text":
        return ["good" for _ in batch]
    return short(batch)
