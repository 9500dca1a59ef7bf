"""How long requests wait for their first token, as a status shows it. Pure data."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokens:
    """How long requests waited for their first token lately, and what training gives for it; None: not known yet.

    idle_s, training_s: medians, of requests of all kinds. inflation: of requests of the same kind, at the upper
    quartile; `target` is what it is held to. share: of the time for training while somebody waits for a first token.
    """

    idle_s: float | None
    training_s: float | None
    inflation: float | None
    target: float
    share: float
