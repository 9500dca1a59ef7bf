"""The messages of any worker's life, from Hello to Stop, and where it finds its link."""

from __future__ import annotations

import dataclasses

from engine.protocol.nouns import ModelFacts, ProbeTokens
from engine.wire import Message

BEAT_S = 1.0

# The worker finds its link in these variables of its environment.
ENV_ENDPOINT = "EDGED_LINK_ENDPOINT"
ENV_NAME = "EDGED_WORKER_NAME"
ENV_EPOCH = "EDGED_WORKER_EPOCH"

# Exit codes of a worker.
EXIT_FAULT = 3  # a Fault was sent: starting it again with the same settings will fail again
EXIT_LINK_LOST = 4  # the daemon is gone


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    role: str
    name: str
    pid: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Message):
    """The role can work. `load_s` is from Start to here."""

    load_s: float
    model: ModelFacts | None = None  # serve role
    probes: tuple[ProbeTokens, ...] = ()  # serve role: the canary probes of Start, tokenised by the engine


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault(Message):
    """The worker cannot do its role. `code` is stable (model_unreadable, model_mismatch, out_of_memory, ...)."""

    code: str
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Beat(Message):
    """The loop of the worker turns. `busy` names the work in a word or two, "" when idle."""

    rss_bytes: int
    busy: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Message):
    """Finish and exit within `within_s`."""

    within_s: float
