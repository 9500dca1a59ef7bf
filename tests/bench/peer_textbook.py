"""The textbook PPO pipeline as most people build it, one cycle: `python peer_textbook.py SPEC.json`.

Actor, critic and reference are three models; answers come from transformers' `generate`; batches are padded to one
length; log-probabilities are taken from the full [batch, time, vocabulary] logits; the trained LoRA is merged and the
whole model saved for the server, which loads it and answers. All of it in one process, with bfloat16 weights, which is
what the processor multiplies fastest. It learns on the given episodes; what it samples itself is timed and thrown away.

The same formulas as this engine where they are PPO's (GAE, whitened advantages, clip, clipped value loss, k3 to the
reference); the same LoRA on actor and critic. It warms up on one cycle and times a second.

Dimension letters: B episodes, T tokens of the padded batch, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from contest import finish, measured, peak_rss_bytes
from episodes import Sampled, load_episodes
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LEARNING_RATE = 1e-4
CLIP_LOW, CLIP_HIGH, VALUE_CLIP, VALUE_COEF, KL_COEF = 0.2, 0.28, 0.2, 0.5, 0.03
MAX_GRAD_NORM = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Padded:
    """ids, attention: int64[B, T], padding on the right. mask: bool[B, T - 1], True where the next token is one of the
    completion. rewards: float32[B, T - 1], on the last of them."""

    ids: torch.Tensor
    attention: torch.Tensor
    mask: torch.Tensor
    rewards: torch.Tensor

    def rows(self, chosen: torch.Tensor) -> Padded:
        """Some of the episodes."""
        return Padded(self.ids[chosen], self.attention[chosen], self.mask[chosen], self.rewards[chosen])


@dataclasses.dataclass(frozen=True, slots=True)
class Models:
    """The three models and one optimizer over what actor and critic train."""

    actor: Any
    critic: Any
    reference: Any
    optimizer: torch.optim.Optimizer


def load_models(folder: str, lora: dict[str, Any]) -> Models:
    """Actor and critic with a LoRA each, and the base once more as reference."""
    causal = {"dtype": torch.bfloat16}
    actor = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder, **causal), LoraConfig(**lora, task_type="CAUSAL_LM")
    )
    critic = get_peft_model(
        AutoModelForTokenClassification.from_pretrained(folder, num_labels=1, **causal),
        LoraConfig(**lora, task_type="TOKEN_CLS"),
    )
    reference = AutoModelForCausalLM.from_pretrained(folder, **causal).eval().requires_grad_(False)
    for module in (actor, critic):
        module.eval()  # no dropout; gradients flow all the same
    trained = [p for module in (actor, critic) for p in module.parameters() if p.requires_grad]
    return Models(actor, critic, reference, torch.optim.AdamW(trained, lr=LEARNING_RATE, eps=1e-5, weight_decay=0.0))


def pad(sampled: list[Sampled], pad_id: int) -> Padded:
    """All episodes as one batch."""
    longest = max(len(one.prompt_ids) + len(one.completion_ids) for one in sampled)
    ids = torch.full((len(sampled), longest), pad_id)
    attention = torch.zeros_like(ids)
    mask = torch.zeros(len(sampled), longest - 1, dtype=torch.bool)
    rewards = torch.zeros(len(sampled), longest - 1)
    for row, one in enumerate(sampled):
        start, end = len(one.prompt_ids), len(one.prompt_ids) + len(one.completion_ids)
        ids[row, :end] = torch.tensor(one.prompt_ids + one.completion_ids)
        attention[row, :end] = 1
        mask[row, start - 1 : end - 1] = True
        rewards[row, end - 2] = one.reward
    return Padded(ids, attention, mask, rewards)


def next_logprobs(model: Any, batch: Padded, temperature: float) -> torch.Tensor:
    """float32[B, T - 1]: log pi of each next token."""
    logits = model(input_ids=batch.ids, attention_mask=batch.attention, use_cache=False).logits[:, :-1]  # [B, T - 1, V]
    return torch.log_softmax(logits.float() / temperature, -1).gather(-1, batch.ids[:, 1:, None])[..., 0]


def values_of(model: Any, batch: Padded) -> torch.Tensor:
    """float32[B, T - 1]: the value before each next token."""
    values: torch.Tensor = model(input_ids=batch.ids, attention_mask=batch.attention).logits[:, :-1, 0].float()
    return values


def estimate_advantages(values: torch.Tensor, batch: Padded) -> tuple[torch.Tensor, torch.Tensor]:
    """Whitened advantages and returns, float32[B, T - 1]; gamma and lambda are 1, so a return is the reward to come."""
    returns = batch.rewards.flip(1).cumsum(1).flip(1) * batch.mask
    advantages = (returns - values) * batch.mask
    chosen = advantages[batch.mask]
    return (advantages - chosen.mean()) / (chosen.std() + 1e-8) * batch.mask, returns


def learn(models: Models, batch: Padded, spec: dict[str, Any]) -> int:
    """PPO on the batch; how many optimizer steps it took."""
    temperature = spec["temperature"]
    with torch.no_grad():
        old = next_logprobs(models.actor, batch, temperature)
        reference = next_logprobs(models.reference, batch, temperature)
        old_values = values_of(models.critic, batch)
    advantages, returns = estimate_advantages(old_values, batch)
    steps = 0
    for _ in range(spec["epochs"]):
        for chosen in torch.randperm(batch.ids.shape[0]).chunk(spec["minibatches"]):
            part, mask = batch.rows(chosen), batch.mask[chosen]
            logprobs = next_logprobs(models.actor, part, temperature)
            ratio = (logprobs - old[chosen]).exp()
            gain = advantages[chosen]
            policy = -torch.minimum(ratio * gain, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * gain)
            difference = reference[chosen] - logprobs
            policy = policy + KL_COEF * (torch.expm1(difference) - difference)
            values = values_of(models.critic, part)
            before = old_values[chosen]
            bounded = before + (values - before).clamp(-VALUE_CLIP, VALUE_CLIP)
            missed = (returns[chosen] - values).square(), (returns[chosen] - bounded).square()
            loss = (policy + VALUE_COEF * 0.5 * torch.maximum(*missed))[mask].mean()
            models.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(models.optimizer.param_groups[0]["params"], MAX_GRAD_NORM)
            models.optimizer.step()
            steps += 1
    return steps


def sample(actor: Any, tokenizer: Any, spec: dict[str, Any]) -> int:
    """Answers to the questions in one padded batch; how many tokens they have."""
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in spec["questions"]
        for _ in range(spec["answers"])
    ]
    prompts = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    with torch.no_grad():
        out = actor.generate(
            **prompts,
            do_sample=True,
            temperature=spec["temperature"],
            top_k=0,
            max_new_tokens=spec["max_tokens"],
            pad_token_id=tokenizer.pad_token_id,
        )
    return int((out[:, prompts["input_ids"].shape[1] :] != tokenizer.pad_token_id).sum())


def switch(actor: Any, tokenizer: Any) -> int:
    """Merge, save, load and answer one token, as a server would; bytes that went from trainer to server."""
    with tempfile.TemporaryDirectory() as folder:
        copy.deepcopy(actor).merge_and_unload().save_pretrained(folder)
        served = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        served.generate(
            **tokenizer("Hello!", return_tensors="pt"), max_new_tokens=1, pad_token_id=tokenizer.pad_token_id
        )
        return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))


def run(spec: dict[str, Any]) -> dict[str, float]:
    """The figures of the second of two cycles."""
    top = range(spec["n_layers"] - spec["layers"], spec["n_layers"]) if spec["layers"] else None
    lora = {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": LINEARS,
        "layers_to_transform": None if top is None else list(top),
    }
    models = load_models(spec["model_folder"], lora)
    tokenizer = AutoTokenizer.from_pretrained(spec["model_folder"])
    batch = pad(load_episodes(Path(spec["episodes"])), tokenizer.pad_token_id)
    learn(models, batch, {**spec, "epochs": 1})
    figures: dict[str, float] = {}
    with measured(figures, "cycle"):
        with measured(figures, "sample"):
            figures["tokens"] = sample(models.actor, tokenizer, spec)
        with measured(figures, "train"):
            figures["steps"] = learn(models, batch, spec)
        with measured(figures, "switch"):
            figures["switch_bytes"] = switch(models.actor, tokenizer)
    return figures | {"peak_rss_mb": peak_rss_bytes() / 1e6}


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(given["threads"])
    torch.manual_seed(1)
    finish(run(given))
