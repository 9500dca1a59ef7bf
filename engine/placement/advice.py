"""What would fit, when nothing does: each change is tried, and the mildest amount of it that gives a plan is named.

Pure. One change alone is looked for first; where none is enough they are added up, in the order in which they cost the
operator least: pins are given up first, and the CPU takes the place of cards last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from engine.placement.describe import hindrance
from engine.placement.memory import ELEMENT_BYTES
from engine.placement.request import ROLES, Dtype, Request, Role
from engine.placement.search import Plan, search

LEAST_CONTEXT_TOKENS = 256  # what [serve] context_tokens may be at least
CONTEXT_STEP_TOKENS = 256
LEAST_SEQUENCE_TOKENS = 96  # a short question and two sentences
SEQUENCE_STEP_TOKENS = 32
FOLLOWERS: tuple[Role, ...] = ("critic", "reference")  # go where the actor is, unless they are pinned


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change of the settings in words, the request with it, and the plan that it gives."""

    change: str
    request: Request
    plan: Plan


@dataclasses.dataclass(frozen=True, slots=True)
class _Knob:
    """apply: the request with the knob at a value. values: mildest first. words: of a value. falls: memory does, from
    each value to the next."""

    values: Sequence[int | str]
    apply: Callable[[Request, int | str], Request]
    words: Callable[[int | str], str]
    falls: bool = True


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
    """The first of the knob's values that fits; by halving, where memory falls from each value to the next."""

    def attempt(index: int) -> Plan | None:
        found = search(knob.apply(request, knob.values[index]), idle=idle)
        return found if isinstance(found, Plan) else None

    def remedy(index: int, found: Plan) -> Remedy:
        words = ", ".join((*before, knob.words(knob.values[index])))
        return Remedy(change=words, request=found.request, plan=found)

    if not knob.falls:
        # What cannot be carried out would be no advice: others fit where a server would have to sleep meanwhile.
        tried = ((index, attempt(index)) for index in range(len(knob.values)))
        return next(
            (remedy(index, found) for index, found in tried if found is not None and not hindrance(found)), None
        )
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
    return remedy(high, best)


def _knobs(request: Request) -> list[_Knob]:
    """The knobs that have somewhere to go."""
    training, serving = request.training, request.serving
    n_layers = training.layers or request.model.shape.n_layers
    rows = range(training.sequence_tokens - 1, LEAST_SEQUENCE_TOKENS - 1, -1)
    contexts = range(serving.context_tokens - 1, LEAST_CONTEXT_TOKENS - 1, -1)
    knobs = [
        _unpin(request),
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
        _to_the_cpu(request),
    ]
    return [knob for knob in knobs if knob.values]


def _unpin(request: Request) -> _Knob:
    """Pins given up: each of the roles' alone, and then all."""
    pinned = [role for role in ROLES if request.pins.of(role)]
    roles: dict[str, Sequence[Role]] = {role: [role] for role in pinned}
    if len(pinned) > 1:
        roles["all"] = pinned
    return _Knob(
        list(roles),
        lambda given, value: _pin(given, dict.fromkeys(roles[str(value)], ())),
        lambda value: ", ".join(f"placement.{role} = []" for role in roles[str(value)]),
        falls=False,
    )


def _to_the_cpu(request: Request) -> _Knob:
    """Training, or serving too, on this machine's CPU, where cards would have done it.

    In float32 first, which a CPU that does not multiply bfloat16 is given.
    """
    devices = request.devices
    cpu = next((number for number, device in enumerate(devices) if device.kind == "cpu" and not device.host), None)
    everywhere = cpu is None or all(device.kind == "cpu" for device in devices)
    on_it: tuple[int, ...] = () if cpu is None else (cpu,)
    followers: dict[Role, tuple[int, ...]] = {role: () for role in FOLLOWERS if request.pins.of(role)}
    moved: tuple[dict[Role, tuple[int, ...]], ...] = ({"actor": on_it}, {"actor": on_it, "serve": on_it})
    dtypes = sorted({"float32", *request.dtypes}, key=lambda dtype: -ELEMENT_BYTES[dtype])
    options = [(dtype, pins | followers) for dtype in dtypes for pins in moved]

    def apply(given: Request, value: int | str) -> Request:
        dtype, pins = options[int(value)]
        return _training(_pin(given, pins), dtype=dtype)

    def words(value: int | str) -> str:
        dtype, pins = options[int(value)]
        pinned = [f"placement.{role} = {list(numbers)}" for role, numbers in pins.items()]
        return ", ".join(pinned if dtype == "float32" else [*pinned, f'dtype = "{dtype}"'])

    return _Knob([] if everywhere else range(len(options)), apply, words, falls=False)


def _pin(request: Request, pins: Mapping[Role, tuple[int, ...]]) -> Request:
    changes = {str(role): numbers for role, numbers in pins.items()}
    return dataclasses.replace(request, pins=dataclasses.replace(request.pins, **changes))


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
