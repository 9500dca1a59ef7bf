"""How the daemon logs: one handler on stderr, as text or as JSON lines. Libraries never configure logging; this does.

Prompts and answers are never logged at INFO.
"""

from __future__ import annotations

import json
import logging
import sys


class JsonLines(logging.Formatter):
    """One JSON object a record: time (Unix seconds), level, logger, message, and the exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def for_workers(level: str, form: str) -> dict[str, str]:
    """The environment that makes a worker log like the daemon (see `engine.logs`)."""
    return {"EDGED_LOG_LEVEL": level, "EDGED_LOG_FORMAT": form}


def configure(level: str, form: str) -> None:
    """Send the log of `level` and above to stderr; `form` is "text" or "json". May be called again on a reload."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)
