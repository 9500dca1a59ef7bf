"""The one exception with which a worker says that it cannot do its role, or a job, and why.

`engine.worker` turns it into a `Fault` message and exit code 3. It is for conditions that a second try with the same
settings would meet again (an unreadable model, an adapter of another shape); bugs stay ordinary exceptions.
"""

from __future__ import annotations


class EngineFault(Exception):
    """Raised with a stable `code` (model_unreadable, model_mismatch, out_of_memory, ...) and a message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
