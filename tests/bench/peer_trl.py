"""TRL's side of a comparison, one run, in TRL's own virtual environment: `peer_trl.py train|cycle|gradients SPEC.json`.

TRL's trainers as they come, with the options that make them fastest here: bfloat16 weights, no gradient checkpointing,
no reference model, nothing logged or saved. Episodes enter by `rollout_func`, TRL's own way of sampling elsewhere.

    train      two generation batches of the given episodes, `iterations` optimizer steps each; the second is timed
    cycle      the same with answers that TRL samples itself with transformers' generate
    gradients  the gradient of the last of `iterations` steps of GRPO or DPO, as safetensors

Imports nothing of ours but `contest` and `nvml`, which need the standard library only.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from contest import finish, peak_rss_bytes
from datasets import Dataset
from nvml import pci_bus_id_of
from nvml import read_joules as read_card_joules
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NO_CLIP = 1e9


class Clock(TrainerCallback):
    """When each optimizer step began and ended, sampling included where the step samples; and this process's CPU time
    and the card's joules at those moments."""

    def __init__(self, on_card: bool) -> None:
        self._on_card = on_card
        self.began: list[float] = []
        self.ended: list[float] = []
        self.cpu_began: list[float] = []
        self.cpu_ended: list[float] = []
        self.joules_began: list[float | None] = []
        self.joules_ended: list[float | None] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.joules_began.append(self._joules())
        self.began.append(time.perf_counter())
        self.cpu_began.append(time.process_time())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self._on_card:
            torch.cuda.synchronize()
        self.ended.append(time.perf_counter())
        self.cpu_ended.append(time.process_time())
        self.joules_ended.append(self._joules())

    def _joules(self) -> float | None:
        return read_card_joules(pci_bus_id_of(torch.device("cuda"))) if self._on_card else None


class Keep(TrainerCallback):
    """The gradient of the last optimizer step."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        model: torch.nn.Module = rest["model"]
        self.gradients = {
            _short(name): parameter.grad.detach().float().clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }


class TokensDpo(DPOTrainer):
    """DPO on pairs that are token ids already: a text is not tokenised a second time."""

    def _prepare_dataset(self, dataset: Dataset, *_: Any, **__: Any) -> Dataset:
        return dataset


def train(spec: dict[str, Any]) -> dict[str, float]:
    """Seconds of one generation batch's optimizer steps on the given episodes."""
    return _timed(spec, _grpo(spec, _base(spec), given=True, peft_config=_lora(spec)))


def cycle(spec: dict[str, Any]) -> dict[str, float]:
    """Seconds of sampling, and of the optimizer steps on what was sampled."""
    return _timed(spec, _grpo(spec, _base(spec), given=False, peft_config=_lora(spec)))


def gradients(spec: dict[str, Any]) -> dict[str, float]:
    """Write the gradient of the last step of a training that starts from the adapter in `parent`."""
    model = PeftModel.from_pretrained(_base(spec), spec["parent"], is_trainable=True)
    trainer = _dpo(spec, model) if spec["objective"] == "dpo" else _grpo(spec, model, given=True, batches=1)
    keep = Keep()
    trainer.add_callback(keep)
    trainer.train()
    save_file({name: gradient.contiguous() for name, gradient in keep.gradients.items()}, spec["gradients"])
    return {"steps": float(trainer.state.global_step)}


def _timed(spec: dict[str, Any], trainer: GRPOTrainer) -> dict[str, float]:
    on_card = spec.get("device", "cpu") != "cpu"
    clock = Clock(on_card)
    trainer.add_callback(clock)
    trainer.train()
    n = spec["iterations"]
    figures = {"train_s": clock.ended[-1] - clock.began[-n], "train_cpu_s": clock.cpu_ended[-1] - clock.cpu_began[-n]}
    figures |= {f"step_{i + 1}_s": clock.ended[-n + i] - clock.began[-n + i] for i in range(n)}
    figures |= {"steps": float(n), "peak_rss_mb": peak_rss_bytes() / 1e6}
    if on_card:
        figures["peak_mb"] = torch.cuda.max_memory_reserved() / 1e6
        if None not in (clock.joules_began[-n], clock.joules_ended[-1]):
            figures["train_j"] = clock.joules_ended[-1] - clock.joules_began[-n]
    return figures


def _grpo(
    spec: dict[str, Any],
    model: torch.nn.Module,
    *,
    given: bool,
    batches: int = 2,
    peft_config: LoraConfig | None = None,
) -> GRPOTrainer:
    sampled = json.loads(Path(spec["episodes"]).read_text())
    n_groups = 1 + max(one["group"] for one in sampled)
    n_answers = len(sampled) // n_groups
    groups = {f"group-{number}": [one for one in sampled if one["group"] == number] for number in range(n_groups)}
    prompts = list(groups) if given else [[{"role": "user", "content": text}] for text in spec["questions"]]
    taken = dict.fromkeys(groups, 0)

    def give(asked: list[str], _: GRPOTrainer) -> dict[str, list[Any]]:
        chosen = []
        for prompt in asked:
            chosen.append(groups[prompt][taken[prompt] % n_answers])
            taken[prompt] += 1
        return {
            "prompt_ids": [one["prompt_ids"] for one in chosen],
            "completion_ids": [one["completion_ids"] for one in chosen],
            "logprobs": [one["logprobs"] for one in chosen],
            "rating": [one["reward"] for one in chosen],
        }

    def reward(completions: list[Any], completion_ids: list[list[int]], rating: Any = None, **_: Any) -> list[float]:
        return (
            list(rating)
            if rating is not None
            else [-float(len(ids)) + 1e-3 * i for i, ids in enumerate(completion_ids)]
        )

    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="bench-trl-"),
        per_device_train_batch_size=len(sampled),
        num_generations=n_answers,
        num_iterations=spec["iterations"],
        max_steps=batches * spec["iterations"],
        max_completion_length=spec["max_tokens"],
        temperature=spec["temperature"],
        beta=0.0,
        shuffle_dataset=False,
        **_common(spec),
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": prompts * batches}),
        processing_class=_tokenizer(spec),
        peft_config=peft_config,
        rollout_func=give if given else None,
    )


def _dpo(spec: dict[str, Any], model: torch.nn.Module) -> DPOTrainer:
    sampled = json.loads(Path(spec["episodes"]).read_text())
    n_groups = 1 + max(one["group"] for one in sampled)
    groups = [[one for one in sampled if one["group"] == number] for number in range(n_groups)]
    pairs = [(group[rank], group[-1 - rank]) for group in groups for rank in range(len(group) // 2)]
    rows = {
        "prompt_ids": [chosen["prompt_ids"] for chosen, _ in pairs],
        "chosen_ids": [chosen["completion_ids"] for chosen, _ in pairs],
        "rejected_ids": [rejected["completion_ids"] for _, rejected in pairs],
    }
    arguments = DPOConfig(
        output_dir=tempfile.mkdtemp(prefix="bench-trl-"),
        per_device_train_batch_size=len(pairs),
        max_steps=spec["iterations"],
        beta=0.1,
        **_common(spec),
    )
    return TokensDpo(
        model=model,
        ref_model=_base(spec),  # for an adapter that goes on training TRL would take the adapter as it came
        args=arguments,
        train_dataset=Dataset.from_dict(rows),
        processing_class=_tokenizer(spec),
    )


def _common(spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "use_cpu": spec.get("device", "cpu") == "cpu",
        "bf16": False,  # autocasting; the weights are of the spec's dtype already
        "gradient_checkpointing": False,
        "learning_rate": spec["learning_rate"],
        "adam_epsilon": 1e-5,
        "lr_scheduler_type": "constant",
        "max_grad_norm": NO_CLIP,
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 1,
    }


def _base(spec: dict[str, Any]) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(spec["model_folder"], dtype=getattr(torch, spec["dtype"]))


def _tokenizer(spec: dict[str, Any]) -> Any:
    return AutoTokenizer.from_pretrained(spec["model_folder"])


def _lora(spec: dict[str, Any]) -> LoraConfig:
    top = range(spec["n_layers"] - spec["layers"], spec["n_layers"]) if spec["layers"] else None
    return LoraConfig(
        r=8,
        lora_alpha=16,
        lora_dropout=0.0,
        target_modules=LINEARS,
        layers_to_transform=None if top is None else list(top),
        task_type="CAUSAL_LM",
    )


def _short(name: str) -> str:
    """`model.layers.20.mlp.up_proj.lora_A` of the name of a PEFT model's parameter."""
    return name.removeprefix("base_model.model.").replace(".default.weight", "")


ACTIONS = {"train": train, "cycle": cycle, "gradients": gradients}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("spec")
    arguments = parser.parse_args()
    torch.set_num_threads(json.loads(Path(arguments.spec).read_text())["threads"])
    finish(ACTIONS[arguments.action](json.loads(Path(arguments.spec).read_text())))
