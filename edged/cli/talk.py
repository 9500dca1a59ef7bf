"""`edged chat` and `edged rate`: talk with the model and say what an answer was worth.

In an interactive chat a line "+" or "-" rates the answer before it; Ctrl-D ends. The conversation is kept in memory
only and sent whole with each turn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from edged.cli.connect import Client, ConnectOption, JsonOption, KeyOption, opened
from edged.cli.exits import CommandError
from edged.cli.show import print_error, print_json

THUMBS = {"+": "up", "-": "down"}


def chat(
    text: Annotated[str | None, typer.Argument(help="One question; without it an interactive chat starts.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy; the model only learns from sampled answers.")] = 0.7,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.  [default: the daemon's]")] = None,
    as_json: JsonOption = False,
    connect: ConnectOption = None,
    api_key: KeyOption = None,
) -> None:
    """Ask the model; the answer streams in. In an interactive chat, rate each answer with + or -."""
    options: dict[str, Any] = {"model": "default", "temperature": temperature}
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    if as_json and text is None:
        raise typer.BadParameter("--json needs TEXT", param_hint="--json")
    with opened(connect, api_key) as client:
        if text is None:
            _converse(client, options)
        elif as_json:
            question = [{"role": "user", "content": text}]
            print_json(client.post("/v1/chat/completions", {**options, "messages": question}))
        else:
            completion_id, _ = answer(client, [{"role": "user", "content": text}], options, write=_write)
            # stdout belongs to the answer.
            print(f"rate it: edged rate {completion_id} up|down", file=sys.stderr)


def rate(
    completion_id: Annotated[str, typer.Argument(metavar="ID", help="The completion, as in chatcmpl-...")],
    value: Annotated[str, typer.Argument(metavar="VALUE", help="up, down, or a number from -1 to 1.")],
    choice: Annotated[int, typer.Option(help="Which choice of the completion.")] = 0,
    reason: Annotated[str | None, typer.Option(help="Why, in words.")] = None,
    correction: Annotated[str | None, typer.Option(help="What the answer should have been.")] = None,
    as_json: JsonOption = False,
    connect: ConnectOption = None,
    api_key: KeyOption = None,
) -> None:
    """Rate an answer. Rating again replaces the earlier rating."""
    body: dict[str, Any] = {"completion_id": completion_id, "choice": choice, "rating": parse_rating(value)}
    if reason is not None:
        body["reason"] = reason
    if correction is not None:
        body["correction"] = correction
    with opened(connect, api_key) as client:
        stored = client.post("/v1/feedback", body)
    if as_json:
        print_json(stored)
    else:
        again = " (replaces an earlier rating)" if stored.get("replaces") else ""
        print(f"rated {completion_id} {stored['rating']:+g}{again}")


def parse_rating(value: str) -> str | float:
    """ "up", "down", or a number in [-1, 1]. Raises typer.BadParameter."""
    if value in THUMBS.values():
        return value
    if value in THUMBS:
        return THUMBS[value]
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not -1.0 <= number <= 1.0:
        raise typer.BadParameter(f"{value!r}: expected up, down or a number from -1 to 1", param_hint="VALUE")
    return number


def answer(
    client: Client, messages: list[dict[str, str]], options: dict[str, Any], *, write: Callable[[str], None]
) -> tuple[str, str]:
    """Stream one answer through `write`; the completion's id and the whole text."""
    completion_id, pieces = "", []
    for event in client.events("/v1/chat/completions", {**options, "messages": messages, "stream": True}):
        completion_id = event.get("id", completion_id)
        for piece in _texts(event):
            pieces.append(piece)
            write(piece)
    write("\n")
    return completion_id, "".join(pieces)


def _texts(event: dict[str, Any]) -> Iterator[str]:
    for choice in event.get("choices", []):
        if text := choice.get("delta", {}).get("content"):
            yield text


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _converse(client: Client, options: dict[str, Any]) -> None:
    import readline  # noqa: F401  (its import is what gives input() line editing and history)

    status = client.get("/v1/status")
    print(f"{status['model']['name']}, adapter v{status['adapter']['version']}. + or - rates an answer; Ctrl-D ends.")
    messages: list[dict[str, str]] = []
    last_id = ""
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not line:
            continue
        try:
            if line in THUMBS:
                _rate_last(client, last_id, THUMBS[line])
                continue
            asked = [*messages, {"role": "user", "content": line}]
            last_id, text = answer(client, asked, options, write=_write)
            messages = [*asked, {"role": "assistant", "content": text}]
        except CommandError as error:
            if error.code != CommandError.code:
                raise  # the daemon is gone: the chat cannot go on
            print_error(error.message, error.hint)


def _rate_last(client: Client, completion_id: str, thumb: str) -> None:
    if not completion_id:
        print("nothing to rate yet: ask something first")
        return
    client.post("/v1/feedback", {"completion_id": completion_id, "rating": thumb})
    learner = client.get("/v1/status").get("learner", {})
    missing = learner.get("ratings_until_update")
    print(f"rated {thumb}" + (f"; {missing} more ratings until the model learns" if missing else ""))
