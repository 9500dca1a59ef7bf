"""`edged status`, `train`, `pause` and `resume`: what the learner does, and when."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from edged.cli.connect import Client, ConnectOption, JsonOption, KeyOption, opened
from edged.cli.exits import CommandError
from edged.cli.show import print_json, status_text, update_text

POLL_S = 0.2
UPDATE_TIMEOUT_S = 1800.0


def status(as_json: JsonOption = False, connect: ConnectOption = None, api_key: KeyOption = None) -> None:
    """Show the model, the live adapter, the learner, the store and the workers."""
    with opened(connect, api_key) as client:
        body = client.get("/v1/status")
    if as_json:
        print_json(body)
    else:
        print(status_text(body))


def train(
    now: Annotated[
        bool, typer.Option("--now", help="Wait for the verdict and print it; exit code 0 whatever it is.")
    ] = False,
    as_json: JsonOption = False,
    connect: ConnectOption = None,
    api_key: KeyOption = None,
) -> None:
    """Make an update of the ratings that there are, without waiting for a full batch.

    The update starts at once in any case. Without --now the command does not wait for it.
    """
    with opened(connect, api_key) as client:
        before = client.get("/v1/status")["learner"]["updates_total"]
        answer = client.post("/v1/train")
        if not answer["accepted"]:
            raise CommandError(f"no update now: {answer['reason']}")
        result = _await_verdict(client, before) if now else answer
    if as_json:
        print_json(result)
    else:
        print(update_text(result) if now else "an update is planned; `edged status` shows its verdict")


def _await_verdict(client: Client, updates_before: int) -> dict[str, Any]:
    from rich.console import Console

    give_up_at = time.monotonic() + UPDATE_TIMEOUT_S
    with Console(stderr=True).status("training") as shown:
        while time.monotonic() < give_up_at:
            learner = client.get("/v1/status")["learner"]
            if learner["updates_total"] > updates_before and learner.get("last_update"):
                return dict(learner["last_update"])
            shown.update(str(learner["state"]).replace("_", " "))
            time.sleep(POLL_S)
    raise CommandError(
        f"the update has no verdict after {UPDATE_TIMEOUT_S:.0f} s; it goes on in the daemon",
        hint="look at `edged status` and at the daemon's log",
    )


def pause(connect: ConnectOption = None, api_key: KeyOption = None) -> None:
    """Stop learning; answers and ratings go on, and ratings are kept for later."""
    with opened(connect, api_key) as client:
        client.post("/v1/pause")
    print("learning is paused; `edged resume` ends it")


def resume(connect: ConnectOption = None, api_key: KeyOption = None) -> None:
    """Learn again after `edged pause`."""
    with opened(connect, api_key) as client:
        client.post("/v1/resume")
    print("learning goes on")
