"""A reward source that is a local transformers sequence classifier: a sentiment, toxicity or reward model in a folder.

Nothing is downloaded, no code of the folder is run, and only safetensors are read. Answers are read one by one, without
padding, so a reward does not depend on what else is judged; one that is longer than the model can read is not cut, it
has a reason. What a reward is:

    one output         tanh(x / 2), which is 2 sigmoid(x) - 1: the scale of a Bradley-Terry reward model
    several outputs    2 P(label) - 1, with the softmax over all of them
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jinja2
import torch
import transformers

from engine.fault import EngineFault
from engine.protocol import ClassifierSource, JudgeItem, JudgeReason
from engine.score import verdict
from engine.score.verdict import Verdict

Reads = Literal["conversation", "answer"]


class Classifier:
    """Judges by the model in `folder`."""

    def __init__(self, model: Any, tokenizer: Any, reads: Reads, column: int, device: torch.device) -> None:
        """column: of the output that is the reward."""
        self._model = model
        self._tokenizer = tokenizer
        self._reads: Reads = reads
        self._column = column
        self._device = device
        positions = getattr(model.config, "max_position_embeddings", None) or tokenizer.model_max_length
        self._max_tokens = min(int(positions), int(tokenizer.model_max_length))

    def judge(self, items: Sequence[JudgeItem], clip: float, deadline: float) -> Verdict:
        """One answer after the other; those that the deadline comes before have a reason, the others their reward."""
        return verdict.assemble([self._judge_one(item, clip, deadline) for item in items])

    def _judge_one(self, item: JudgeItem, clip: float, deadline: float) -> tuple[float | None, JudgeReason | None, str]:
        if time.monotonic() > deadline:
            return None, "judge_timeout", "the classifier was too slow for the batch"
        try:
            encoded = self._encode(item)
        except jinja2.TemplateError as error:  # the model's template does not take these roles
            return None, "judge_raised", f"the classifier's chat template: {error}"
        n_tokens = encoded["input_ids"].shape[1]
        if n_tokens > self._max_tokens:
            return None, "judge_too_long", f"{n_tokens} tokens, the classifier reads {self._max_tokens}"
        with torch.inference_mode():
            logits = self._model(**{name: tensor.to(self._device) for name, tensor in encoded.items()}).logits
        return verdict.check_value(reward_of(logits[0].double().tolist(), self._column), clip)

    def _encode(self, item: JudgeItem) -> Any:
        if self._reads == "answer":
            return self._tokenizer(item.answer, return_tensors="pt")
        if item.messages and self._tokenizer.chat_template:
            turns = [{"role": message.role, "content": message.content} for message in item.messages]
            turns.append({"role": "assistant", "content": item.answer})
            text = self._tokenizer.apply_chat_template(turns, tokenize=False)
            return self._tokenizer(text, add_special_tokens=False, return_tensors="pt")
        asked = item.messages[-1].content if item.messages else item.prompt or ""
        return self._tokenizer(asked, item.answer, return_tensors="pt")


def reward_of(logits: Sequence[float], column: int) -> float:
    """The reward in [-1, 1] of one answer's outputs; NaN if they are."""
    if len(logits) == 1:
        return math.tanh(logits[0] / 2.0)
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    return 2.0 * weights[column] / sum(weights) - 1.0


def open_classifier(wanted: ClassifierSource, *, threads: int, device: str) -> Classifier:
    """Load the model. Raises EngineFault (classifier_unusable, device_missing)."""
    torch.set_num_threads(threads)
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise EngineFault("device_missing", f"no GPU for {device}; set [placement] train_device to cpu")
    folder = Path(wanted.model_folder)
    if not folder.is_dir():
        raise _unusable(wanted, "there is no such folder")
    transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        model, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
            folder, use_safetensors=True, output_loading_info=True, dtype=torch.float32, **options
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise _unusable(wanted, str(error)) from error
    if loading["missing_keys"]:  # transformers fills them with random numbers
        raise _unusable(wanted, f"the weights lack {sorted(loading['missing_keys'])[0]!r}; it is no classifier")
    column = find_label(wanted, {int(number): name for number, name in model.config.id2label.items()})
    model = model.to(device).eval()
    return Classifier(model, tokenizer, wanted.reads, column, torch.device(device))


def find_label(wanted: ClassifierSource, labels: dict[int, str]) -> int:
    """The column of the output that is the reward. Raises EngineFault (classifier_unusable)."""
    if len(labels) == 1:
        return 0
    if not wanted.label and len(labels) == 2:
        return 1
    for column, name in labels.items():
        if name.lower() == wanted.label.lower():
            return column
    known = ", ".join(labels.values())
    raise _unusable(wanted, f"reward.classifier_label is {wanted.label!r}; the model has the labels {known}")


def _unusable(wanted: ClassifierSource, what: str) -> EngineFault:
    return EngineFault("classifier_unusable", f"reward.classifier {wanted.model_folder!r}: {verdict.shorten(what)}")
