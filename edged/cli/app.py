"""The command line: which verb is which function. No verb has code here."""

from __future__ import annotations

from typing import Annotated

import typer

from edged import __version__
from edged.cli import adapters, doctor, keys, later, learning, measure, models, run, talk

app = typer.Typer(
    name="edged",
    help="A language model on this machine that learns from what people say about its answers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"edged {__version__}")
        raise typer.Exit


@app.callback()
def _edged(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None: ...


app.command()(run.run)
app.command("check-config")(run.check_config)
app.command()(doctor.doctor)
app.command()(measure.demo)
app.command()(learning.status)
app.command()(talk.chat)
# A rating may be a negative number, which must not be read as an option.
app.command(context_settings={"ignore_unknown_options": True})(talk.rate)
app.command()(learning.train)
app.command()(learning.pause)
app.command()(learning.resume)
app.add_typer(adapters.commands, name="adapters")
app.add_typer(models.commands, name="models")
app.add_typer(keys.commands, name="keys")
app.command()(measure.bench)
later.register(app)
