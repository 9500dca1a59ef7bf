"""The command line `edged VERB`: one file a group of verbs, put together in `edged.cli.app`.

A client verb is one HTTP exchange with the daemon (`connect`) and its text (`show`); `run`, `demo` and `bench` are
composition roots. Nothing here imports torch, llama.cpp, FastAPI or httpx before a verb needs it.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import NoReturn


def main() -> None:
    """Entry point of the `edged` script: runs the verb in `sys.argv` and exits with its code (`edged.cli.exits`)."""
    from edged.cli.app import app
    from edged.cli.exits import CommandError
    from edged.cli.show import print_error

    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where a disk that is full can still be told of
    except CommandError as error:
        print_error(error.message, error.hint)
        sys.exit(error.code)
    except BrokenPipeError:
        _give_up_output()  # its reader went away (`| head`): not an error of ours
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        print_error(f"the output cannot be written: {error.strerror}", "make room where it goes to")
        _give_up_output()


def _give_up_output() -> NoReturn:
    """Leave: nothing can be written to standard output any more, not even what is buffered."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)
