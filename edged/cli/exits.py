"""How a command ends: named exit codes, and one exception for each way to fail.

    CommandError            1   the daemon or the command said no
    +-- NoDaemon           69   nobody answers at the socket or address
    +-- BadConfiguration   78   the settings cannot be used
    +-- NotYet              2   the verb has no implementation in this version

Usage errors (exit 2) are raised by typer itself. `edged.cli.main` turns these exceptions into one message on stderr and
the exit code; nothing else in `edged.cli` calls `sys.exit`.
"""

from __future__ import annotations

DONE = 0
FAILED = 1
USAGE = 2
NO_DAEMON = 69
CONFIGURATION = 78


class CommandError(Exception):
    """Args: message: the object and what is wrong. hint: what to do, or "" if the message says it."""

    code = FAILED

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class NoDaemon(CommandError):
    code = NO_DAEMON


class BadConfiguration(CommandError):
    code = CONFIGURATION


class NotYet(CommandError):
    code = USAGE
