"""What the serve loop needs of an engine that decodes in this process: the seam between backends.

An engine in this process (`llamacpp`) is given tokens and gives rows of logits. Scheduling, sampling, stop strings,
swaps and proofs are above it and know no engine.

One thread owns everything that a model hands out. Letters: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.generate.scheduler import Entry
from engine.protocol import ModelFacts

Row = npt.NDArray[np.float32]  # float32[V] logits

BATCH_TOKENS = 512  # most tokens of one decode call


class AdapterRefused(Exception):
    """Raised when an adapter does not load. `code`: adapter_unreadable or adapter_mismatch."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class DecodeFailed(Exception):
    """Raised when an engine does not take a batch; the context's memory is to be cleared."""


class Adapter(Protocol):
    """A LoRA adapter in memory, never merged into the base. It may be set on several contexts of its model."""

    def free(self) -> None:
        """Release it. It must be set nowhere."""


class Context(Protocol):
    """A pool of KV cells and what is decoded on it, under at most one adapter at a time."""

    def set_adapter(self, adapter: Adapter | None) -> None:
        """Decode with `adapter` (None: the bare base) from now on; forgets every sequence. Raises DecodeFailed."""

    def clear(self) -> None:
        """Forget every sequence."""

    def copy(self, source: int, target: int, n_tokens: int) -> None:
        """Let sequence `target`, which must be empty, have the first `n_tokens` cells of `source`."""

    def forget(self, sequence: int) -> None:
        """Free the cells that only `sequence` holds; none is no mistake."""

    def decode(self, entries: Sequence[Entry]) -> Sequence[Row]:
        """Evaluate up to BATCH_TOKENS tokens; the logits of the entries that want a row, in order, valid until the next
        decode. The entries of a sequence follow each other and continue what it holds. Raises DecodeFailed."""


class Vocabulary(Protocol):
    """Texts to tokens and back, and the chat template as the model's files have it."""

    @property
    def n_vocab(self) -> int:
        """Token ids are below it."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    @property
    def chat_template(self) -> str | None: ...

    def tokenise(self, text: str, *, add_special: bool, parse_special: bool) -> tuple[int, ...]:
        """Token ids of `text`.

        Args:
            add_special: prepend BOS if the model wants one.
            parse_special: turn the text of control tokens into the tokens.
        """

    def piece(self, token: int) -> bytes:
        """The bytes that `token` adds to a text; b"" for control tokens. Not always whole characters."""

    def special_text(self, name: str) -> str:
        """The text of the "bos" or "eos" token, as chat templates want it; "" if the model has none."""

    def end_token(self) -> int | None:
        """The token that ends a turn, or else a text; None if the model has neither."""


class Model(Vocabulary, Protocol):
    """A loaded model."""

    @property
    def n_ctx_train_tokens(self) -> int:
        """The longest sequence that it was trained for."""

    def facts(self) -> ModelFacts: ...

    def open_adapter(self, folder: str) -> Adapter:
        """The adapter in a complete adapter folder (`adapters.folder`). Raises AdapterRefused."""

    def open_context(self, *, context_tokens: int, n_sequences: int, max_rows: int, threads: int) -> Context:
        """A pool of `context_tokens` cells for sequences 0 to n_sequences - 1.

        Args:
            max_rows: most rows of logits of one decode, at least `n_sequences`.
        Raises:
            EngineFault: out_of_memory.
        """
