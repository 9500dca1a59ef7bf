"""The command line `edged VERB`: one file a group of verbs, put together in `edged.cli.app`.

A client verb is one HTTP exchange with the daemon (`connect`) and its text (`show`); `run`, `demo` and `bench` are
composition roots. Nothing here imports torch, llama.cpp, FastAPI or httpx before a verb needs it.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point of the `edged` script: runs the verb in `sys.argv` and exits with its code (`edged.cli.exits`)."""
    from edged.cli.app import app
    from edged.cli.exits import CommandError
    from edged.cli.show import print_error

    try:
        app()
    except CommandError as error:
        print_error(error.message, error.hint)
        sys.exit(error.code)
    except BrokenPipeError:
        # The reader of our output went away (`| head`): not an error of ours, but nothing can be written any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
