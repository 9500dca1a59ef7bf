"""How a worker logs: one handler on stderr, in the form of the daemon's own log, which goes the same way.

The daemon says level and form in the environment when it starts the process.
"""

from __future__ import annotations

import json
import logging
import os
import sys

ENV_LOG_LEVEL = "EDGED_LOG_LEVEL"
ENV_LOG_FORMAT = "EDGED_LOG_FORMAT"  # "text" or "json"


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


def configure() -> None:
    """Log as the environment says; without a word in it, text from "info" up."""
    handler = logging.StreamHandler(sys.stderr)
    if os.environ.get(ENV_LOG_FORMAT) == "json":
        handler.setFormatter(JsonLines())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(os.environ.get(ENV_LOG_LEVEL, "info").upper())
