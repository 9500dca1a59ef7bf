"""What a server's log-probabilities are of. Pure.

A server tells one number for a sampled token, and which one depends on how it was started: of the model's own softmax
(vLLM's `raw_logprobs`), of the distribution that the token was drawn from (`processed_logprobs`), or of something in
between (SGLang: temperature and penalties applied, top-k and top-p not). Learning needs the second and the record keeps
the first, so what the number is has to be known; what it is not stays unknown, and is never guessed.

`Meaning.split` says which of the two a number is, for the options that a token was drawn with. A server's meaning is
found by asking it (`questions` and `judge`): the same next token at temperature 1 and 2, cut to the likeliest one, and
with a bias on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from engine.protocol import Sampling

BIAS = 3.0
CLEAR = 0.02  # nats: more than kernels round, and less than any of the questions moves a number by
MIN_SPREAD = 0.3  # nats below certainty that the likeliest token must be, or temperature and bias would not show
LOWEST = -9000.0  # servers write minus infinity as a large number


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What has been applied to the logits that a told log-probability is of.

    Attributes:
        tempered: the temperature. cut: top-k, top-p and min-p. shaped: penalties and biases.
    """

    tempered: bool
    cut: bool
    shaped: bool

    def split(self, told: float | None, sampling: Sampling) -> tuple[float | None, float | None]:
        """(under the sampling distribution, under the full softmax at temperature 1); None for what is not known."""
        told = None if told is None or not LOWEST < told <= 0 else told
        cuts = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
        shapes = bool(sampling.logit_bias) or any(
            (sampling.repetition_penalty != 1, sampling.frequency_penalty, sampling.presence_penalty)
        )
        untouched_by_shapes = not shapes or not self.shaped
        if sampling.temperature == 0:  # a point: its own probability is 1, and no server scales by zero
            return 0.0, told if untouched_by_shapes and not (cuts and self.cut) else None
        plain = sampling.temperature == 1
        is_behaviour = (plain or self.tempered) and (self.cut or not cuts) and (self.shaped or not shapes)
        is_raw = (plain or not self.tempered) and not (cuts and self.cut) and untouched_by_shapes
        return told if is_behaviour else None, told if is_raw else None

    def __str__(self) -> str:
        applied = [name for name in ("tempered", "cut", "shaped") if getattr(self, name)]
        return " and ".join(applied) if applied else "raw"


RAW = Meaning(tempered=False, cut=False, shaped=False)
PROCESSED = Meaning(tempered=True, cut=True, shaped=True)

PLAIN = Sampling(temperature=1.0)


def questions(likeliest: int) -> Mapping[str, Sampling]:
    """How to sample one token, to be told of the likeliest; it is known from an answer to PLAIN."""
    return {
        "tempered": Sampling(temperature=2.0),
        "cut": Sampling(temperature=1.0, top_k=1),
        "shaped": Sampling(temperature=1.0, logit_bias=((likeliest, BIAS),)),
    }


def can_tell(plain: float) -> bool:
    """Whether the likeliest token is uncertain enough for the questions to show anything."""
    return plain < -MIN_SPREAD


def judge(plain: float, told: Mapping[str, float]) -> Meaning:
    """The meaning, from what was told of the likeliest token.

    Args:
        plain: at temperature 1. told: the answers to `questions`, by name.
    """
    moved = {name: abs(value - plain) > CLEAR for name, value in told.items()}
    return Meaning(tempered=moved["tempered"], cut=moved["cut"], shaped=moved["shaped"])


def likeliest_of(top: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """The best of a server's alternatives."""
    return max(top, key=lambda item: item[1])
