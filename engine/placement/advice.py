"""What would fit, when nothing does: each change is tried, and the mildest amount of it that gives a plan is named.

Pure. One change alone is looked for first; where none is enough they are added up, in the order in which they cost the
operator least.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from engine.placement.memory import ELEMENT_BYTES
from engine.placement.request import Dtype, Request
from engine.placement.search import Plan, search

LEAST_CONTEXT_TOKENS = 256  # what [serve] context_tokens may be at least
CONTEXT_STEP_TOKENS = 256
LEAST_SEQUENCE_TOKENS = 96  # a short question and two sentences
SEQUENCE_STEP_TOKENS = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change of the settings in words, the request with it, and the plan that it gives."""

    change: str
    request: Request
    plan: Plan


@dataclasses.dataclass(frozen=True, slots=True)
class _Knob:
    """apply: the request with the knob at a value. values: mildest first. words: of a value."""

    values: Sequence[int | str]
    apply: Callable[[Request, int | str], Request]
    words: Callable[[int | str], str]


def remedies(request: Request, *, idle: bool) -> tuple[Remedy, ...]:
    """Every single change that is enough; if there is none, one made of several; empty if even that does not fit."""
    single = tuple(remedy for knob in _knobs(request) if (remedy := _mildest(request, knob, (), idle)) is not None)
    return single or tuple(_together(request, idle))


def _together(request: Request, idle: bool) -> Iterator[Remedy]:
    words: tuple[str, ...] = ()
    for knob in _knobs(request):
        remedy = _mildest(request, knob, words, idle)
        if remedy is not None:
            yield remedy
            return
        last = knob.values[-1]
        request, words = knob.apply(request, last), (*words, knob.words(last))


def _mildest(request: Request, knob: _Knob, before: Sequence[str], idle: bool) -> Remedy | None:
    """The first of the knob's values that fits. Memory falls from each value to the next, so halving finds it."""

    def attempt(index: int) -> Plan | None:
        found = search(knob.apply(request, knob.values[index]), idle=idle)
        return found if isinstance(found, Plan) else None

    low, high, best = 0, len(knob.values) - 1, attempt(len(knob.values) - 1)
    if best is None:
        return None
    while low < high:
        middle = (low + high) // 2
        found = attempt(middle)
        if found is None:
            low = middle + 1
        else:
            high, best = middle, found
    words = ", ".join((*before, knob.words(knob.values[high])))
    return Remedy(change=words, request=best.request, plan=best)


def _knobs(request: Request) -> list[_Knob]:
    """The knobs that have somewhere to go."""
    training, serving = request.training, request.serving
    n_layers = training.layers or request.model.shape.n_layers
    rows = range(training.sequence_tokens - 1, LEAST_SEQUENCE_TOKENS - 1, -1)
    contexts = range(serving.context_tokens - 1, LEAST_CONTEXT_TOKENS - 1, -1)
    knobs = [
        _Knob(
            ["head"] if training.critic == "lora" else [],
            lambda given, value: _training(given, critic=value),
            lambda value: f'critic = "{value}"',
        ),
        _Knob(
            _smaller_dtypes(request),
            lambda given, value: _training(given, dtype=value),
            lambda value: f'dtype = "{value}"',
        ),
        _Knob(
            ["quantised"] if request.model.packed_block_bytes and training.held == "dequantised" else [],
            lambda given, value: _training(given, held=value),
            lambda value: f'base_weights = "{value}"',
        ),
        _Knob(
            range(n_layers - 1, 0, -1),
            lambda given, value: _training(given, layers=value),
            lambda value: f"lora.layers = {value}",
        ),
        _Knob(
            [tokens for tokens in contexts if tokens % CONTEXT_STEP_TOKENS == 0],
            _set_context,
            lambda value: f"serve.context_tokens = {value}",
        ),
        _Knob(
            [tokens for tokens in rows if tokens % SEQUENCE_STEP_TOKENS == 0],
            _set_sequence,
            lambda value: f"micro-batches of {value} tokens: no longer answers, prompt included",
        ),
    ]
    return [knob for knob in knobs if knob.values]


def _smaller_dtypes(request: Request) -> list[Dtype]:
    size = ELEMENT_BYTES[request.training.dtype]
    smaller = [dtype for dtype in request.dtypes if ELEMENT_BYTES[dtype] < size]
    return sorted(smaller, key=lambda dtype: -ELEMENT_BYTES[dtype])


def _training(request: Request, **changes: object) -> Request:
    return dataclasses.replace(request, training=dataclasses.replace(request.training, **changes))  # type: ignore[arg-type]


def _set_sequence(request: Request, value: int | str) -> Request:
    tokens = int(value)
    training = request.training
    # The update has as many answers as before, each of them shorter.
    batch_tokens = -(-training.batch_tokens * tokens // training.sequence_tokens)
    return _training(request, sequence_tokens=tokens, micro_batch_tokens=tokens, batch_tokens=batch_tokens)


def _set_context(request: Request, value: int | str) -> Request:
    return dataclasses.replace(request, serving=dataclasses.replace(request.serving, context_tokens=int(value)))
