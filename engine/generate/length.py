"""Whether texts are far too long for the context, found out without tokenising all of them.

A tokeniser takes seconds for a megabyte, and nobody is answered meanwhile. So a text that could not fit is found out
about by its bytes, and one that looks as if it could not by counting the tokens of one piece after the other, up to
where it is clear. What is not refused here may still turn out too long by a little when it is tokenised as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

TOKEN_BYTES_LIKELY = 4  # of a token on average; a text with fewer for each place is tokenised at once
TOKEN_BYTES_MAX = 16  # on average over a whole context: more have only texts that repeat one character
PIECE_CHARS = 8192
CUT_TOKENS = 8  # that cutting a text in two may add to it, at most


class Tokeniser(Protocol):
    """What turns texts to tokens (`engine.generate.backend.Vocabulary`)."""

    def tokenise(self, text: str, *, add_special: bool, parse_special: bool) -> tuple[int, ...]: ...


def excess(tokeniser: Tokeniser, texts: Sequence[str], room_tokens: int) -> str | None:
    """What speaks against `texts` fitting into `room_tokens` together, as "has more than 8192 tokens"; None if they may
    fit."""
    n_bytes = sum(len(text.encode()) for text in texts)
    if n_bytes <= TOKEN_BYTES_LIKELY * room_tokens:
        return None
    if n_bytes > TOKEN_BYTES_MAX * room_tokens:
        return f"has {n_bytes} bytes, more than {TOKEN_BYTES_MAX} for each token of the context"
    n_tokens = 0
    for text in texts:
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            n_tokens += len(tokeniser.tokenise(piece, add_special=False, parse_special=True)) - CUT_TOKENS
            if n_tokens > room_tokens:
                return f"has more than {room_tokens} tokens"
    return None
