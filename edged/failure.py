"""How a job on a worker can fail. The client modules of `edged.serve` and `edged.learn` raise these.

WorkerLost    the process died or went silent: nothing is known of what it did; the job may be tried again
WorkerDown    no process was there to begin with: the job was not even tried
WorkerFault   the process says that it cannot do its role at all: trying again will not help
WorkerBusy    the process is well and has not come to the job yet: nothing speaks against anybody, ask again
JobRefused    the process is well and will not do this job
"""

from __future__ import annotations

from collections.abc import Mapping

# Codes of `engine.protocol.Fault` and `StageFailed` that speak against the adapter and not against the machine.
ADAPTER_FAULTS = frozenset({"adapter_unreadable", "adapter_mismatch", "not_finite"})


class WorkerLost(RuntimeError):
    """Raised when a worker died or did not start."""


class WorkerDown(WorkerLost):
    """Raised when a job was not given to a worker because none was running."""


class WorkerBusy(RuntimeError):
    """Raised when a job has to wait longer than its caller does. The job is not given up; asking again joins it."""


class WorkerFault(RuntimeError):
    """Raised when a worker cannot do its role. `code` as in `engine.protocol.Fault`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class JobRefused(RuntimeError):
    """Raised when a worker will not do a job. `code` as in `engine.protocol.StageFailed` and `TrainFailed`.
    left_out: reason -> answers of the job that could not be used."""

    def __init__(self, code: str, message: str, left_out: Mapping[str, int] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.left_out = dict(left_out or {})
