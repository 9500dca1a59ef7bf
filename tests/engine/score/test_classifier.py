"""The classifier on tiny random transformers models: its rewards are the model's own, and what cannot work is told."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.fault import EngineFault
from engine.protocol import ChatMessage, ClassifierSource
from engine.score.classifier import Classifier, find_label, open_classifier, reward_of
from tests.engine.score.answers import make_item, soon

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Why", "Because", "Not", "user", "assistant", "?", "."]
MAX_TOKENS = 16
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
ROLES_ONLY = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
)


def write_classifier(folder: Path, n_labels: int, template: str | None = None) -> Any:
    """A random BERT of one block over ten words; the model."""
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=MAX_TOKENS,
        num_labels=n_labels,
        initializer_range=1.0,
    )
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = transformers.BertTokenizer(vocab=vocabulary, do_lower_case=False)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return model


def opened(folder: Path, **changes: Any) -> Classifier:
    values: dict[str, Any] = {"model_folder": str(folder), "label": "", "reads": "conversation", **changes}
    return open_classifier(ClassifierSource(**values), threads=1, device="cpu")


def peer_logits(model: Any, ids: list[int], types: list[int] | None = None) -> list[float]:
    with torch.no_grad():
        token_types = None if types is None else torch.tensor([types])
        logits: list[float] = model(torch.tensor([ids]), token_type_ids=token_types).logits[0].tolist()
    return logits


def ids_of(*words: str) -> list[int]:
    return [WORDS.index(word) for word in words]


def test_one_output_is_squashed_like_a_reward_models(tmp_path: Path) -> None:
    model = write_classifier(tmp_path, 1)
    found = opened(tmp_path).judge([make_item("Because."), make_item("Not.")], 1.0, soon())
    for answer, reward in zip(("Because", "Not"), found.rewards, strict=True):
        ids = ids_of("[CLS]", "Why", "?", "[SEP]", answer, ".", "[SEP]")
        (logit,) = peer_logits(model, ids, [0, 0, 0, 0, 1, 1, 1])
        assert reward == pytest.approx(2 / (1 + math.exp(-logit)) - 1, abs=1e-6)
    assert found.rewards[0] != found.rewards[1]


def test_several_outputs_give_the_probability_of_the_label(tmp_path: Path) -> None:
    model = write_classifier(tmp_path, 3)
    (reward,) = opened(tmp_path, label="label_1", reads="answer").judge([make_item("Because.")], 1.0, soon()).rewards
    logits = peer_logits(model, ids_of("[CLS]", "Because", ".", "[SEP]"))
    assert reward == pytest.approx(2 * torch.tensor(logits).softmax(0)[1].item() - 1, abs=1e-6)


def test_a_reward_does_not_depend_on_what_else_is_judged(tmp_path: Path) -> None:
    write_classifier(tmp_path, 2)
    judge = opened(tmp_path)
    alone = judge.judge([make_item("Because.")], 1.0, soon()).rewards[0]
    assert judge.judge([make_item("Not " * 8), make_item("Because.")], 1.0, soon()).rewards[1] == alone


def test_a_model_with_a_chat_template_sees_the_conversation_in_it(tmp_path: Path) -> None:
    model = write_classifier(tmp_path, 1, TEMPLATE)
    (reward,) = opened(tmp_path).judge([make_item("Because.")], 1.0, soon()).rewards
    (logit,) = peer_logits(model, ids_of("user", "Why", "?", "assistant", "Because", "."))
    assert reward == pytest.approx(math.tanh(logit / 2), abs=1e-6)


def test_a_continued_text_is_judged_behind_its_prompt(tmp_path: Path) -> None:
    model = write_classifier(tmp_path, 1, TEMPLATE)
    (reward,) = opened(tmp_path).judge([make_item("Because.", messages=(), prompt="Why?")], 1.0, soon()).rewards
    ids = ids_of("[CLS]", "Why", "?", "[SEP]", "Because", ".", "[SEP]")
    (logit,) = peer_logits(model, ids, [0, 0, 0, 0, 1, 1, 1])
    assert reward == pytest.approx(math.tanh(logit / 2), abs=1e-6)


def test_what_is_too_long_or_does_not_fit_the_template_costs_only_itself(tmp_path: Path) -> None:
    write_classifier(tmp_path, 1, ROLES_ONLY + TEMPLATE)
    tool = make_item(messages=(ChatMessage(role="tool", content="7"),))
    found = opened(tmp_path).judge([make_item("Not " * MAX_TOKENS), tool, make_item()], 1.0, soon())
    assert found.reasons == ("judge_too_long", "judge_raised", None)
    assert f"the classifier reads {MAX_TOKENS}" in found.detail


def test_what_the_deadline_comes_before_has_its_reason(tmp_path: Path) -> None:
    write_classifier(tmp_path, 1)
    assert opened(tmp_path).judge([make_item(), make_item()], 1.0, soon(-1.0)).reasons == ("judge_timeout",) * 2


@pytest.mark.parametrize(
    ("labels", "wanted", "column"),
    [(["x"], "", 0), (["x"], "y", 0), (["bad", "good"], "", 1), (["bad", "good"], "BAD", 0), (["a", "b", "c"], "b", 1)],
)
def test_the_label_is_found_by_its_name_or_by_custom(labels: list[str], wanted: str, column: int) -> None:
    source = ClassifierSource(model_folder="m", label=wanted, reads="answer")
    assert find_label(source, dict(enumerate(labels))) == column


@pytest.mark.parametrize(("labels", "wanted"), [(["a", "b", "c"], ""), (["bad", "good"], "better")])
def test_a_label_that_is_not_there_is_a_fault_that_tells_which_are(labels: list[str], wanted: str) -> None:
    with pytest.raises(EngineFault, match=f"the model has the labels {', '.join(labels)}"):
        find_label(ClassifierSource(model_folder="m", label=wanted, reads="answer"), dict(enumerate(labels)))


def test_rewards_of_huge_outputs_are_finite() -> None:
    assert reward_of([1e30, -1e30], 0) == 1.0
    assert reward_of([1e30, -1e30], 1) == -1.0
    assert reward_of([-1e30], 0) == -1.0
    assert math.isnan(reward_of([math.nan], 0))


def test_a_folder_without_a_classifier_is_a_fault(tmp_path: Path) -> None:
    def complaint() -> str:
        with pytest.raises(EngineFault) as caught:
            opened(tmp_path / "model")
        assert caught.value.code == "classifier_unusable"
        return caught.value.message

    assert "there is no such folder" in complaint()
    (tmp_path / "model").mkdir()
    assert str(tmp_path / "model") in complaint()
    model = write_classifier(tmp_path / "model", 1)
    (tmp_path / "model" / "model.safetensors").unlink()
    complaint()
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")  # a pickle is not read
    complaint()


def test_a_model_without_a_head_is_not_given_a_random_one(tmp_path: Path) -> None:
    model = write_classifier(tmp_path, 1)
    model.bert.save_pretrained(tmp_path)
    with pytest.raises(EngineFault, match=r"the weights lack .*classifier.*; it is no classifier"):
        opened(tmp_path)
