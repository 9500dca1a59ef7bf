"""Failures of the store itself. What a caller did wrong is a `Refused`, not one of these."""

from __future__ import annotations


class StoreError(Exception):
    """The database cannot be opened, read or written; nothing of the failed write is kept."""
