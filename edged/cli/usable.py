"""Whether what the settings name is there: the judge's folder or service, blocks to adapt, devices.

`edged check-config` and `edged doctor` ask. The daemon does not: it starts without a judge, and tells of it, as what is
missing may come back. A check never raises for what it looks at, and starts nothing.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from edged.cli.checks import Finding, check_placement

if TYPE_CHECKING:
    from edged.settings import Settings

CONNECT_TIMEOUT_S = 3.0


def check_settings(settings: Settings) -> tuple[list[str], list[str]]:
    """What cannot work on this machine, and what works otherwise than it reads; a line each."""
    findings = [*check_judge(settings, connects=False), *check_blocks(settings), *check_placement(settings)]
    problems = [_line(finding) for finding in findings if finding.level == "fail"]
    return problems, [_line(finding) for finding in findings if finding.level == "warn" and finding.name == "adapter"]


def check_judge(settings: Settings, *, connects: bool) -> list[Finding]:
    """Whether the judge of `[reward]` is where the settings say; nothing without one. connects: try its service."""
    reward = settings.reward
    folders = {"function": ("function_folder", reward.function_folder), "classifier": ("classifier", reward.classifier)}
    if reward.source in folders:
        key, folder = folders[reward.source]
        if folder and not Path(folder).is_dir():
            found = f"reward.{key}: {folder!r} is no folder"
            return [Finding(name="judge", level="fail", found=found, advice=f"correct reward.{key}")]
    if reward.source == "http" and connects and (why := refusal_of_service(reward.url)):
        found = f"reward.url: nothing answers at {reward.url}: {why}"
        return [Finding(name="judge", level="fail", found=found, advice="start the service, or correct reward.url")]
    return [] if reward.source == "feedback" else [Finding(name="judge", level="ok", found=reward.source)]


def refusal_of_service(url: str) -> str:
    """Why no connection to the host and port of `url` is made; "" if one is."""
    try:
        parts = urlsplit(url)
        address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        socket.create_connection(address, CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def check_blocks(settings: Settings) -> list[Finding]:
    """Whether the model has as many blocks as are to be adapted. A model that cannot be read is `check_model`'s."""
    from edged.base_model import ModelError, find_model, read_shape

    layers = settings.lora.layers
    if not isinstance(layers, int):
        return []
    try:
        n_layers = read_shape(find_model(settings.model.path)).n_layers
    except (ModelError, OSError):
        return []
    if layers <= n_layers:
        return []
    found = f"lora.layers: got {layers}, the model has {n_layers} blocks: these are adapted"
    return [Finding(name="adapter", level="warn", found=found, advice='write "all", or how many')]


def _line(finding: Finding) -> str:
    return f"{finding.found}; {finding.advice}" if finding.advice else finding.found
