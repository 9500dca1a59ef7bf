"""Answers to judge, for the tests of the reward sources."""

from __future__ import annotations

import time
from typing import Any

from engine.protocol import ChatMessage, JudgeItem


def make_item(answer: str = "Because.", **changes: Any) -> JudgeItem:
    values: dict[str, Any] = {
        "episode_id": 1,
        "messages": (ChatMessage(role="user", content="Why?"),),
        "prompt": None,
        "answer": answer,
        "finish_reason": "stop",
        "metadata": {},
        "prompt_ids": (3, 4),
        "completion_ids": (5, 6, 2),
        **changes,
    }
    return JudgeItem(**values)


def soon(seconds: float = 60.0) -> float:
    """A deadline that no test reaches, unless it says so."""
    return time.monotonic() + seconds
