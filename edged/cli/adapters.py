"""`edged adapters ...`: the versions, what is live, and the operator's say over it.

Every verb that changes what is served takes `--if-live`: the daemon compares and swaps, so two operators cannot undo
each other by accident; `keep` changes nothing that is served. `import` judges a PEFT folder, or a llama.cpp LoRA
file, as a candidate: the gate can refuse it, which is exit code 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from edged.cli.connect import Client, ConnectOption, IfLiveOption, JsonOption, KeyOption, opened
from edged.cli.exits import CommandError
from edged.cli.show import columns, print_json, when

# The figures that `show` prints without --all, in this order, and what each of them says.
SHOWN_FIGURES = {
    "reward/mean": "mean rating of the answers it was trained on",
    "episodes": "answers it was trained on",
    "tokens": "tokens of those answers",
    "kl/live": "how far it moved from the version before, nats/token",
    "kl/reference": "how far it is from the reference, nats/token",
    "ppo/clip_frac": "share of tokens at the clip limits",
    "critic/explained_variance": "how well the critic foresaw the ratings; 1 is best",
    "entropy": "how undecided its next token is, nats",
    "lora/norm": "size of the adapter",
    "gate/canary_gap": "gap between trainer and server, nats/token",
    "gate/fluency_logprob": "plausibility of its probe answers to the base, nats/token",
    "gate/fluency_logprob_live": "the same of the version that was live",
    "gate/distinct_2": "share of distinct token pairs in its probe answers",
    "deep/prompts": "prompts that the deep gate compared it on with the version before",
    "deep/implausible": "plausibility of these answers to the base, nats/token",
    "deep/implausible_before": "the same of the version before",
    "deep/repeated": "share of token triples in them that were there before",
    "deep/repeated_before": "the same of the version before",
    "deep/corrections_fall": "what corrections lost against what they corrected, nats/token",
}

commands = typer.Typer(help="The adapter versions: see, choose, move.", no_args_is_help=True)

Version = Annotated[int, typer.Argument(metavar="VERSION", help="A version number; 0 is the base.", min=0)]


@commands.command("list")
def list_versions(as_json: JsonOption = False, connect: ConnectOption = None, api_key: KeyOption = None) -> None:
    """List every version, newest last; * marks the live one."""
    with opened(connect, api_key) as client:
        body = client.get("/v1/adapters")
    if as_json:
        print_json(body)
    else:
        print(versions_text(body))


@commands.command()
def show(
    version: Version,
    every: Annotated[bool, typer.Option("--all", help="Print every figure, by name.")] = False,
    as_json: JsonOption = False,
    connect: ConnectOption = None,
    api_key: KeyOption = None,
) -> None:
    """Show one version: where it comes from, and what the trainer and the gate measured."""
    with opened(connect, api_key) as client:
        adapter = find_version(client.get("/v1/adapters"), version)
    if as_json:
        print_json(adapter)
    else:
        print(version_text(adapter, every=every))


@commands.command()
def diff(
    version: Version,
    other: Annotated[int, typer.Argument(metavar="OTHER", min=0)],
    as_json: JsonOption = False,
    connect: ConnectOption = None,
    api_key: KeyOption = None,
) -> None:
    """Show how far two versions lie apart, in all and by module."""
    with opened(connect, api_key) as client:
        body = client.get(f"/v1/adapters/{version}/diff/{other}")
    if as_json:
        print_json(body)
    else:
        print(diff_text(version, other, body))


@commands.command()
def promote(
    version: Version, if_live: IfLiveOption = None, connect: ConnectOption = None, api_key: KeyOption = None
) -> None:
    """Serve this version from now on; learning goes on from it."""
    with opened(connect, api_key) as client:
        _change(client, f"/v1/adapters/{version}/promote", if_live=if_live)
    print(f"v{version} is live")


@commands.command()
def rollback(if_live: IfLiveOption = None, connect: ConnectOption = None, api_key: KeyOption = None) -> None:
    """Serve the version that was live before this one."""
    with opened(connect, api_key) as client:
        _change(client, "/v1/adapters/rollback", if_live=if_live)
        live = client.get("/v1/status")["adapter"]["version"]
    print(f"v{live} is live")


@commands.command()
def pin(
    version: Version, if_live: IfLiveOption = None, connect: ConnectOption = None, api_key: KeyOption = None
) -> None:
    """Serve exactly this version and publish nothing until `unpin`."""
    with opened(connect, api_key) as client:
        _change(client, f"/v1/adapters/{version}/pin", if_live=if_live, pinned=True)
    print(f"v{version} is live and pinned; `edged adapters unpin` ends it")


@commands.command()
def unpin(if_live: IfLiveOption = None, connect: ConnectOption = None, api_key: KeyOption = None) -> None:
    """Let new versions go live again."""
    with opened(connect, api_key) as client:
        live = client.get("/v1/status")["adapter"]["version"]
        _change(client, f"/v1/adapters/{live}/pin", if_live=live if if_live is None else if_live, pinned=False)
    print(f"v{live} is live; new versions may follow it")


@commands.command()
def keep(
    version: Version,
    drop: Annotated[bool, typer.Option("--drop", help="Take the mark away again.")] = False,
    connect: ConnectOption = None,
    api_key: KeyOption = None,
) -> None:
    """Mark a version as never to be collected."""
    with opened(connect, api_key) as client:
        client.post(f"/v1/adapters/{version}/keep", {"kept": not drop})
    print(f"v{version} may be collected" if drop else f"v{version} is kept")


@commands.command("import")
def import_folder(
    folder: Annotated[Path, typer.Argument(help="A PEFT folder or a .gguf LoRA file, on the daemon's machine.")],
    if_live: IfLiveOption = None,
    as_json: JsonOption = False,
    connect: ConnectOption = None,
    api_key: KeyOption = None,
) -> None:
    """Bring in an adapter as a candidate; the gate publishes or refuses it."""
    if not folder.exists():
        raise CommandError(f"{folder}: no such folder or file")
    with opened(connect, api_key) as client:
        adapter = _change(client, "/v1/adapters/import", if_live=if_live, folder=str(folder.resolve()))
    if as_json:
        print_json(adapter)
    if adapter["state"] == "refused":
        raise CommandError(f"v{adapter['version']} was refused: {adapter['reason']}")
    if not as_json:
        print(f"v{adapter['version']} {adapter['state']}")


@commands.command()
def export(
    version: Version,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="[default: edged-v<VERSION>.tar]")] = None,
    connect: ConnectOption = None,
    api_key: KeyOption = None,
) -> None:
    """Write a version to a tar file: a PEFT folder with the GGUF adapter in it."""
    target = output or Path(f"edged-v{version}.tar")
    part = target.with_name(target.name + ".part")
    with opened(connect, api_key) as client:
        try:
            with part.open("wb") as file:
                for piece in client.download(f"/v1/adapters/{version}/export"):
                    file.write(piece)
            part.replace(target)
        except OSError as error:
            raise CommandError(f"{target}: cannot be written: {error.strerror}") from error
        finally:
            part.unlink(missing_ok=True)
    print(target)


def _change(client: Client, path: str, *, if_live: int | None, **body: Any) -> dict[str, Any]:
    answer: dict[str, Any] = client.post(path, body if if_live is None else {**body, "if_live": if_live})
    return answer


def find_version(body: dict[str, Any], version: int) -> dict[str, Any]:
    """The entry of `version` in the body of GET /v1/adapters. Raises CommandError if there is none."""
    for adapter in body["data"]:
        if adapter["version"] == version:
            return dict(adapter)
    raise CommandError(f"adapter version {version} does not exist", hint="`edged adapters list` shows all")


def versions_text(body: dict[str, Any]) -> str:
    """The body of GET /v1/adapters as a table."""
    live = body["live"]["version"]
    rows = [
        [
            "*" if adapter["version"] == live else "",
            f"v{adapter['version']}",
            "-" if adapter.get("parent_version") is None else f"v{adapter['parent_version']}",
            adapter["origin"],
            _state_text(adapter),
            when(adapter.get("created_at")) if adapter["version"] else "-",
            (adapter.get("deep") or {}).get("verdict", "-"),
            (adapter.get("verdict") == "rolled_back" and adapter.get("verdict_reason")) or adapter.get("reason") or "",
        ]
        for adapter in body["data"]
    ]
    return columns(rows, header=["", "version", "parent", "origin", "state", "created", "deep gate", "reason"])


def deep_text(deep: dict[str, Any]) -> str:
    """What the deep gate found, in a line."""
    told = f"{deep['verdict']} against v{deep['against']}: {deep['reason']}"
    if deep.get("rolled_back_to") is not None:
        told += f"; rolled back to v{deep['rolled_back_to']}"
    elif deep.get("kept_why"):
        told += f"; still served: {deep['kept_why']}"
    return told


def _state_text(adapter: dict[str, Any]) -> str:
    state = "rolled back" if adapter.get("verdict") == "rolled_back" else str(adapter["state"])
    return state + ", kept" * bool(adapter.get("kept")) + ", collected" * bool(adapter.get("collected_at"))


def version_text(adapter: dict[str, Any], *, every: bool = False) -> str:
    """One version with its most telling figures and what they say, or with `every` figure by name."""
    rows = [
        [name.replace("_", " "), when(value) if name == "created_at" else str(value)]
        for name, value in adapter.items()
        if name not in ("metrics", "deep") and value is not None
    ]
    if deep := adapter.get("deep"):
        rows.append(["deep gate", deep_text(deep)])
    metrics: dict[str, float] = adapter.get("metrics") or {}
    names = sorted(metrics) if every else [name for name in SHOWN_FIGURES if name in metrics]
    parts = [columns(rows)]
    if names:
        parts.append(columns([[name, f"{metrics[name]:.4g}", SHOWN_FIGURES.get(name, "")] for name in names]))
    if hidden := len(metrics) - len(names):
        parts.append(f"{hidden} more figures: --all")
    return "\n\n".join(parts)


def diff_text(version: int, other: int, body: dict[str, Any]) -> str:
    """The body of GET /v1/adapters/V/diff/OTHER, the modules that differ most first."""
    head = columns(
        [
            [f"norm of v{version}", f"{body['norm']:.4f}"],
            [f"norm of v{other}", f"{body['other_norm']:.4f}"],
            ["distance", f"{body['distance']:.4f}"],
            ["cosine", "-" if body.get("cosine") is None else f"{body['cosine']:.4f}"],
        ]
    )
    modules = sorted(body.get("modules", {}).items(), key=lambda item: -item[1])
    return head + ("\n\n" + columns([[name, f"{distance:.4f}"] for name, distance in modules]) if modules else "")
