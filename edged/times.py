"""Times in answers: `since` is RFC 3339 in UTC; every `..._at` stays Unix seconds, as in `edged.records`."""

from __future__ import annotations

from datetime import UTC, datetime


def rfc3339(at: float) -> str:
    """Unix seconds as `2026-01-31T12:00:05.250Z`."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
