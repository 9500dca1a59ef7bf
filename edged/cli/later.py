"""Verbs that are named in the contract and do not exist yet in this version: one honest line, exit code 2."""

from __future__ import annotations

from collections.abc import Callable

import typer

from edged import __version__
from edged.cli.exits import NotYet

NOT_YET = {
    "import": "Bring in chats, ratings or models of other programs.",
    "export": "Write episodes and ratings for other programs.",
    "forget": "Remove a person's data and what was learned from it.",
    "watch": "A live view in the terminal.",
    "sync": "Trade adapter deltas with an aggregator.",
    "energy": "Energy measured and governed.",
    "aggregator": "The cloud side of sync.",
}


def register(app: typer.Typer) -> None:
    """Add every verb of `NOT_YET` to `app`, hidden from the help."""
    for verb in NOT_YET:
        app.command(
            verb, hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
            add_help_option=False, help=NOT_YET[verb],
        )(_refusal(verb))  # fmt: skip


def _refusal(verb: str) -> Callable[[typer.Context], None]:
    def refuse(context: typer.Context) -> None:
        raise NotYet(f"`edged {verb}` does not exist yet in version {__version__}")

    return refuse
