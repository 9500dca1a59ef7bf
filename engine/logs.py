"""How every process logs: one handler on stderr, as text or as JSON lines. Libraries never configure logging.

The daemon configures by its settings; a worker by its environment, where the daemon puts the same. This module imports
the standard library only, so that the daemon may import it. Prompts and answers are never logged at INFO.
"""

from __future__ import annotations

import json
import logging
import os
import sys

ENV_LOG_LEVEL = "EDGED_LOG_LEVEL"
ENV_LOG_FORMAT = "EDGED_LOG_FORMAT"  # "text" or "json"
# What they say at INFO is of every request (uvicorn.access), or the same for every adapter that is written (gguf).
QUIET = ("uvicorn.access", "gguf")


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


def configure(level: str, form: str) -> None:
    """Send the log of `level` and above to stderr; `form` is "text" or "json". May be called again on a reload."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for library in QUIET:
        logging.getLogger(library).setLevel(logging.WARNING)


def configure_from_environment() -> None:
    """Log as the environment says; without a word in it, text from "info" up."""
    configure(os.environ.get(ENV_LOG_LEVEL, "info"), os.environ.get(ENV_LOG_FORMAT, "text"))


def environment(level: str, form: str) -> dict[str, str]:
    """What makes a worker log like the process that starts it."""
    return {ENV_LOG_LEVEL: level, ENV_LOG_FORMAT: form}
