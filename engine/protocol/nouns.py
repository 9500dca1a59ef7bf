"""What messages of several roles speak of: an adapter on disk, a probe in tokens, a model's facts."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRef:
    """An adapter on disk. Version 0 is the base: `folder` is then None.

    `folder` is a PEFT folder that also holds `adapter.gguf` and `manifest.json`.
    """

    version: int
    folder: str | None


BASE = AdapterRef(version=0, folder=None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTokens:
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a serve worker found in the model file.

    keeps_turns: the chat template leaves earlier turns of a conversation as they were.
    """

    architecture: str
    n_layers: int
    n_embd: int
    n_vocab: int
    n_ctx_train_tokens: int
    eos_ids: tuple[int, ...]
    chat_template: bool
    keeps_turns: bool = True
