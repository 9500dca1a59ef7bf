"""Failures of the store itself. What a caller did wrong is a `Refused`, not one of these."""

from __future__ import annotations

from edged.refusal import Inability

RETRY_AFTER_S = 10.0  # a disk is not emptied faster


class StoreError(Inability):
    """The database cannot be opened, read or written; nothing of the failed write is kept."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="storage_failed", retry_after_s=RETRY_AFTER_S)
