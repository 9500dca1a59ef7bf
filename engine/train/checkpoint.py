"""The trainer's state between updates, on disk: critic, both optimizers, and nothing random.

    state.safetensors   critic weights, running means of both optimizers
    state.json          step counts, and which adapter the actor's means belong to

The adapter itself is not here: it is published as an adapter folder. A generator needs no state, every update is
seeded. Writing gives the same bytes for the same state; durability is the caller's (`engine.train.job` fsyncs the
folder and renames it).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from engine.lora import Lora
from engine.train.adamw import AdamState
from engine.train.critic import Critic

STATE_FILE = "state.json"
TENSORS_FILE = "state.safetensors"
FORMAT = 1


class CheckpointError(ValueError):
    """Raised when a checkpoint cannot be read or belongs to another adapter or base."""


def save_checkpoint(folder: Path, lora: Lora, adam: AdamState, critic: Critic) -> None:
    """Write both files into the existing `folder`."""
    tensors = {"critic.weight": critic.weight, "critic.bias": critic.bias}
    tensors |= _named_state("critic", ["weight", "bias"], critic.adam)
    tensors |= _named_state("actor", _parameter_names(lora), adam)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, folder / TENSORS_FILE)
    state = {
        "format": FORMAT,
        "rank": lora.rank,
        "alpha": lora.alpha,
        "actor_steps": adam.steps,
        "critic_steps": critic.adam.steps,
    }
    (folder / STATE_FILE).write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")


def load_checkpoint(folder: Path, lora: Lora, n_features: int, device: torch.device) -> tuple[AdamState, Critic]:
    """The state that belongs to `lora`.

    Raises:
        CheckpointError: missing, damaged, or of an adapter with other modules, rank or scale.
    """
    try:
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text())
        tensors = load_file(folder / TENSORS_FILE, device=str(device))
        if state["format"] != FORMAT or (state["rank"], state["alpha"]) != (lora.rank, lora.alpha):
            raise CheckpointError(f"{folder}: made for an adapter of rank {state['rank']} and alpha {state['alpha']}")
        adam = _read_state("actor", _parameter_names(lora), lora.parameters(), tensors, state["actor_steps"])
        weight, bias = tensors["critic.weight"], tensors["critic.bias"]
        if weight.shape != (n_features,) or bias.shape != (1,):
            raise CheckpointError(f"{folder}: the critic has {weight.numel()} inputs, this base gives {n_features}")
        critic = Critic(
            weight, bias, _read_state("critic", ["weight", "bias"], [weight, bias], tensors, state["critic_steps"])
        )
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be read ({error}); train from fresh state") from error
    except KeyError as error:
        raise CheckpointError(f"{folder}: {error.args[0]} is missing; train from fresh state") from error
    return adam, critic


def _parameter_names(lora: Lora) -> list[str]:
    return [f"{module}.{factor}" for module in lora.matrices for factor in "AB"]


def _named_state(owner: str, names: list[str], adam: AdamState) -> dict[str, torch.Tensor]:
    means = {f"{owner}.mean.{name}": mean for name, mean in zip(names, adam.means, strict=True)}
    return means | {f"{owner}.square.{name}": square for name, square in zip(names, adam.squares, strict=True)}


def _read_state(
    owner: str, names: list[str], parameters: list[torch.Tensor], tensors: dict[str, torch.Tensor], steps: int
) -> AdamState:
    means = [tensors[f"{owner}.mean.{name}"] for name in names]
    squares = [tensors[f"{owner}.square.{name}"] for name in names]
    for name, parameter, mean, square in zip(names, parameters, means, squares, strict=True):
        if not mean.shape == square.shape == parameter.shape:
            raise CheckpointError(f"{owner} state of {name}: {list(mean.shape)}, expected {list(parameter.shape)}")
    return AdamState(int(steps), means, squares)
