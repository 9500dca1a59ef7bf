"""The trainer's state between updates, on disk: critic, both optimizers, baseline, and nothing random.

    state.safetensors   critic weights, running means of both optimizers
    state.json          step counts, the baseline, the KL controller, and which adapter the actor's means belong to

The adapter itself is not here: it is published as an adapter folder. A generator needs no state, every update is
seeded. Writing gives the same bytes for the same state; durability is the caller's (`engine.train.job` fsyncs the
folder and renames it).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from engine.lora import Lora
from engine.train.adamw import AdamState
from engine.train.critic import Baseline, Critic
from engine.train.learner import Learner, SteeredPenalty

STATE_FILE = "state.json"
TENSORS_FILE = "state.safetensors"
FORMAT = 1


class CheckpointError(ValueError):
    """Raised when a checkpoint cannot be read or belongs to another adapter or base."""


def save_checkpoint(folder: Path, learner: Learner) -> None:
    """Write both files into the existing `folder`."""
    critic, lora = learner.critic, learner.lora
    tensors = {f"critic.{name}": tensor for name, tensor in zip(critic.names(), critic.parameters(), strict=True)}
    tensors |= _named_state("critic", critic.names(), critic.adam)
    tensors |= _named_state("actor", _parameter_names(lora), learner.adam)
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    (folder / TENSORS_FILE).write_bytes(data)  # a full disk is an OSError here, as everywhere
    state = {
        "format": FORMAT,
        "rank": lora.rank,
        "alpha": lora.alpha,
        "actor_steps": learner.adam.steps,
        "critic": critic.kind,
        "critic_steps": critic.adam.steps,
        "baseline": {"mean": learner.baseline.mean, "useless": learner.baseline.useless},
        "penalty": None if learner.penalty is None else dataclasses.asdict(learner.penalty),
    }
    (folder / STATE_FILE).write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")


def load_checkpoint(folder: Path, lora: Lora, critic: Critic) -> Learner:
    """A learner on `lora` with the state that belongs to it.

    Args:
        critic: a fresh one; it takes over the checkpoint's state in place if that is of its kind, and stays fresh, with
            no baseline in its stead, if not.

    Raises:
        CheckpointError: missing, damaged, or of an adapter with other modules, rank or scale.
    """
    device = lora.parameters()[0].device
    try:
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text())
        tensors = load_file(folder / TENSORS_FILE, device=str(device))
        if state["format"] != FORMAT or (state["rank"], state["alpha"]) != (lora.rank, lora.alpha):
            raise CheckpointError(f"{folder}: made for an adapter of rank {state['rank']} and alpha {state['alpha']}")
        adam = _read_state("actor", _parameter_names(lora), lora.parameters(), tensors, state["actor_steps"])
        baseline = Baseline()
        if state.get("critic", "head") == critic.kind:
            _restore_critic(critic, tensors, state["critic_steps"])
            baseline = Baseline(**state.get("baseline", {}))
        steered = state.get("penalty")
        return Learner(lora, adam, critic, baseline, None if steered is None else SteeredPenalty(**steered))
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be read ({error}); train from fresh state") from error
    except KeyError as error:
        raise CheckpointError(f"{folder}: {error.args[0]} is missing; train from fresh state") from error


def _restore_critic(critic: Critic, tensors: dict[str, torch.Tensor], steps: int) -> None:
    for name, parameter in zip(critic.names(), critic.parameters(), strict=True):
        saved = tensors[f"critic.{name}"]
        if saved.shape != parameter.shape:
            raise CheckpointError(f"the critic's {name} is {list(saved.shape)}, expected {list(parameter.shape)}")
        parameter.copy_(saved)
    critic.adam = _read_state("critic", critic.names(), critic.parameters(), tensors, steps)


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
