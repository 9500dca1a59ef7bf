"""Who of a flow is on which device: what may be asked for, the processes that follow from it, and whether it is there.

A device is named as torch does: "cpu", "cuda:1". "cpu:1" is a second process on the same processors. Roles of training
on one device share its process; on different ones they are the ranks of one update (`engine.train.ranks`). A role that
is not named stands where a flow without cards has it: server and actor on the CPU, critic and reference by the actor.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Literal, get_args

from engine.protocol import LoraSettings, TrainPlan

Role = Literal["serve", "actor", "critic", "reference"]
ROLES: tuple[Role, ...] = get_args(Role)

VISIBLE_CARDS = "CUDA_VISIBLE_DEVICES"
ASK_WITHIN_S = 120.0


def placed(devices: Mapping[Role, str]) -> dict[Role, str]:
    """The device of every role, with its number: "cpu:0", "cuda:1".

    Raises:
        ValueError: no such role, or no such kind of device.
    """
    if unknown := sorted(set(devices) - set(ROLES)):
        raise ValueError(f"devices: {', '.join(map(repr, unknown))} is no role; the roles are {', '.join(ROLES)}")
    actor = devices.get("actor", "cpu")
    asked: dict[Role, str] = {"serve": "cpu", "actor": actor, "critic": actor, "reference": actor, **devices}
    return {role: _numbered(role, device) for role, device in asked.items()}


def train_plan(on: Mapping[Role, str], threads: int) -> TrainPlan:
    """One rank for each device that trains, the actor's first.

    Args:
        on: as `placed` gives it. threads: of all ranks together.
    """
    devices = list(dict.fromkeys((on["actor"], on["critic"], on["reference"])))
    if len(devices) == 1:
        return TrainPlan()
    return TrainPlan(
        mode="split",
        devices=tuple(map(torch_device, devices)),
        actor=(0,),
        critic=(devices.index(on["critic"]),),
        reference=(devices.index(on["reference"]),),
        threads=max(1, threads // len(devices)),
    )


def torch_device(device: str) -> str:
    """What the trainer calls a device of `placed`: the CPU is one device to it, whoever shares it."""
    return "cpu" if is_cpu(device) else device


def is_cpu(device: str) -> bool:
    """Whether a device of `placed` is no card."""
    return device.startswith("cpu")


def default_lora(n_layers: int, device: str) -> LoraSettings:
    """Of a size that `device` can train: on a CPU the topmost third of the blocks is adapted, on a card all of them."""
    return LoraSettings(rank=8, alpha=16.0, layers=max(1, -(-n_layers // 3)) if is_cpu(device) else 0)


def server_environment(device: str) -> dict[str, str]:
    """What shows a serve worker the card that it is to use, and no other; llama.cpp would spread over all it sees."""
    if is_cpu(device):
        return {}
    number = int(device.partition(":")[2])
    shown = [card.strip() for card in os.environ.get(VISIBLE_CARDS, "").split(",") if card.strip()]
    if not shown:
        return {VISIBLE_CARDS: str(number)}
    return {VISIBLE_CARDS: shown[number] if number < len(shown) else ""}


def check_there(on: Mapping[Role, str]) -> None:
    """Ask torch and llama.cpp, each in a process of its own, whether they reach the cards; where none is named, nobody.

    Raises:
        ValueError: a role's card is out of reach.
    """
    if not is_cpu(on["serve"]):
        asking = "import llama_cpp; print(int(llama_cpp.llama_supports_gpu_offload()))"
        if not _ask(asking, server_environment(on["serve"])):
            raise ValueError(f"devices: llama.cpp reaches no {on['serve']} to serve on; {_REMEDY}")
    training = {role: device for role, device in on.items() if role != "serve" and not is_cpu(device)}
    n_cards = _ask("import torch; print(torch.cuda.device_count())", {}) if training else 0
    for role, device in training.items():
        if int(device.partition(":")[2]) >= n_cards:
            raise ValueError(
                f"devices: torch reaches no {device} for the {role}, and {n_cards} cards in all; {_REMEDY}"
            )


_REMEDY = 'give another device ("cpu"), or install a build that takes this card'


def _numbered(role: Role, device: str) -> str:
    found = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", device) if isinstance(device, str) else None
    if found is None:
        raise ValueError(
            f'devices: got {device!r} for the {role}, expected "cpu", "cuda" or one by number, as "cuda:1"'
        )
    return f"{found[1]}:{int(found[2] or 0)}"


def _ask(program: str, environment: Mapping[str, str]) -> int:
    answer = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=ASK_WITHIN_S,
    )
    if answer.returncode:
        raise ValueError(f"devices: {program!r} ends with {answer.returncode}: {answer.stderr.strip()[-300:]}")
    return int(answer.stdout.split()[-1])
