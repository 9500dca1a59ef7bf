"""`edged keys ...`: the API keys of the TCP listener. A secret is shown once, when it is made."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from edged.cli.connect import ConnectOption, JsonOption, KeyOption, opened
from edged.cli.show import columns, print_json, when

commands = typer.Typer(help="API keys for access over TCP.", no_args_is_help=True)


class ScopeName(StrEnum):
    """`edged.records.Scope` as a choice on the command line."""

    INFER = "infer"
    FEEDBACK = "feedback"
    ADMIN = "admin"


@commands.command()
def create(
    name: Annotated[str, typer.Argument(help="What the audit shows, as in key:NAME.")],
    scope: Annotated[
        list[ScopeName] | None, typer.Option(help="Repeatable.  [default: infer and feedback]", show_default=False)
    ] = None,
    as_json: JsonOption = False,
    connect: ConnectOption = None,
    api_key: KeyOption = None,
) -> None:
    """Make a key. Once one exists, TCP clients need one."""
    scopes = [s.value for s in scope or (ScopeName.INFER, ScopeName.FEEDBACK)]
    with opened(connect, api_key) as client:
        made = client.post("/v1/keys", {"name": name, "scopes": scopes})
    if as_json:
        print_json(made)
    else:
        print(made["secret"])


@commands.command("list")
def list_keys(as_json: JsonOption = False, connect: ConnectOption = None, api_key: KeyOption = None) -> None:
    """List the keys, without their secrets."""
    with opened(connect, api_key) as client:
        body = client.get("/v1/keys")
    if as_json:
        print_json(body)
        return
    rows = [
        [key["id"], key["name"], ", ".join(sorted(key["scopes"])), when(key["created_at"]), when(key["revoked_at"])]
        for key in body["data"]
    ]
    print(columns(rows, header=["id", "name", "scopes", "created", "revoked"]) if rows else "no keys")


@commands.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID")], connect: ConnectOption = None, api_key: KeyOption = None
) -> None:
    """Make a key invalid at once."""
    with opened(connect, api_key) as client:
        client.delete(f"/v1/keys/{key_id}")
    print(f"key {key_id} is revoked")
