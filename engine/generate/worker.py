"""The serve role: loads the model, then turns one loop over messages, decode steps and slices of proofs.

One thread owns llama.cpp. Each turn takes all waiting messages, makes one decode step of each context that answers,
and then one slice of a running proof, so staging delays no answer by more than a slice. Without work the loop sleeps
in the link until a message or the next beat.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from pathlib import Path

from adapters.errors import AdapterError
from adapters.manifest import verify
from engine.fault import EngineFault
from engine.generate.answering import Answering
from engine.generate.asking import Grammars
from engine.generate.backend import Adapter, AdapterRefused, Model
from engine.generate.decoder import Decoder
from engine.generate.fairness import Service
from engine.generate.gaps import Gaps
from engine.generate.prompt import Prompts
from engine.generate.prove import SLICE_TOKENS
from engine.generate.scheduler import Piece, Scheduler
from engine.generate.staging import Staging
from engine.generate.swap import Swap
from engine.generate.template import BadTemplate
from engine.link import Link
from engine.protocol import (
    AdapterRef,
    Backend,
    Cancel,
    Generate,
    Message,
    ProbeTokens,
    Ready,
    Route,
    Stage,
    StartServe,
    Stop,
    Tokenise,
    WireError,
)

log = logging.getLogger(__name__)

FINISHED_SEQUENCES = 8  # finished sequences beyond the slots that are kept for prefix reuse
STOP_MARGIN_S = 0.5  # of the time that Stop grants, kept for sending the cancelled answers


@dataclasses.dataclass(frozen=True, slots=True)
class _Loaded:
    model: Model
    prompts: Prompts
    decoders: tuple[Decoder, Decoder]
    adapter: Adapter | None
    probes: tuple[ProbeTokens, ...]
    load_s: float


def run(link: Link, start: StartServe) -> None:
    """Serve until Stop.

    Raises:
        EngineFault: model_unreadable, bad_template, adapter_unreadable, adapter_mismatch, not_finite, out_of_memory.
        LinkLost, Stopped: see `engine.link`.
    """
    if start.backend == "remote":
        from engine.generate.remote import worker as remote

        remote.run(link, start)
        return
    loaded = link.beat_while(lambda: _load(start), "loading")
    facts = dataclasses.replace(loaded.model.facts(), keeps_turns=loaded.prompts.keeps_turns)
    link.send(Ready(load_s=loaded.load_s, model=facts, probes=loaded.probes))
    _Loop(link, loaded, start).run()


class _Loop:
    def __init__(self, link: Link, loaded: _Loaded, start: StartServe) -> None:
        self._link = link
        self._swap = Swap(start.adapter.version)
        self._gaps = Gaps()
        self._answering = Answering(
            loaded.model,
            loaded.prompts,
            loaded.decoders,
            self._swap,
            context_tokens=start.context_tokens,
            send=link.send,
            ended=lambda context: self._staging.perform(self._swap.end(context)),
            began=self._gaps.first,
            grammars=_grammars_of(loaded.model, start.backend),
        )
        self._staging = Staging(
            loaded.model,
            loaded.prompts,
            loaded.decoders,
            self._swap,
            loaded.probes,
            adapter=loaded.adapter,
            send=link.send,
            is_answering=lambda: self._answering.is_decoding,
        )
        self._stop_at = math.inf

    def run(self) -> None:
        self._staging.prove_baseline()
        while not self._is_over():
            has_work = self._answering.has_work or self._staging.has_work
            self._take_messages(0.0 if has_work else self._link.until_next_beat_s())
            if self._answering.has_work:
                self._gaps.step(self._answering.step())
            else:
                self._gaps.idle()
            if self._staging.has_work:
                self._staging.slice()
            self._link.beat(self._busy())
            if (report := self._gaps.report()) is not None:
                self._link.send(report)

    def _is_over(self) -> bool:
        """Whether Stop was said and all is answered; cuts short what runs when the time is up."""
        if self._stop_at == math.inf:
            return False
        if time.monotonic() >= self._stop_at:
            self._answering.cancel_all()
        return not self._answering.has_work

    def _take_messages(self, timeout_s: float) -> None:
        """Take all messages that wait; wait for the first one for `timeout_s`."""
        message = self._link.receive(timeout_s)
        while message is not None:
            self._take(message)
            message = self._link.receive(0)

    def _take(self, message: Message) -> None:
        match message:
            case Generate():
                self._answering.generate(message)
            case Cancel():
                self._answering.cancel(message)
            case Tokenise():
                self._answering.tokenise(message)
            case Stage():
                self._staging.stage(message)
            case Route():
                self._staging.route(message, reroute=self._answering.reroute)
            case Stop():
                self._stop_at = time.monotonic() + max(0.0, message.within_s - STOP_MARGIN_S)
            case _:
                raise WireError(f"a serve worker takes no {type(message).__name__}")

    def _busy(self) -> str:
        if self._answering.has_work:
            return "answering"
        return "proving" if self._staging.has_work else ""


def _load(start: StartServe) -> _Loaded:
    began = time.monotonic()
    model = open_model(
        start.model_path, start.backend, gpu_layers=start.gpu_layers, device=start.device, dtype=start.dtype
    )
    try:
        prompts = Prompts(model)
        probes = tuple(prompts.probe(probe) for probe in start.probes)
        if not prompts.keeps_turns:
            log.warning(
                "the chat template of %s rewrites earlier turns of a conversation: what is learned of an answer holds "
                "behind its own prompt, and a later prompt may show it otherwise",
                start.model_path,
            )
    except BadTemplate as error:
        raise EngineFault("bad_template", f"{start.model_path}: {error}") from error
    adapter = _load_adapter(model, start.adapter)
    service = Service()  # one: a swap is no reason to forget what a user was served
    decoders = (_build_decoder(model, start, adapter, service), _build_decoder(model, start, adapter, service))
    _warm_up(decoders[0], start)
    return _Loaded(model, prompts, decoders, adapter, probes, time.monotonic() - began)


def open_model(path: str, backend: Backend, *, gpu_layers: int, device: str, dtype: str) -> Model:
    """The model in the engine that was asked for, whose library is loaded here and no other. Raises EngineFault."""
    if backend == "transformers":
        from engine.generate import hf_model

        return hf_model.Model(path, dtype=dtype, device=device)
    from engine.generate import llamacpp

    return llamacpp.Model(path, gpu_layers=gpu_layers)


def _grammars_of(model: Model, backend: Backend) -> Grammars | None:
    """What holds answers to a grammar: llama.cpp's own sampler, so only where it decodes."""
    if backend != "llamacpp":
        return None
    from engine.generate import llamacpp
    from engine.generate.constraint import Constraints

    assert isinstance(model, llamacpp.Model)
    return Constraints(model)


def _load_adapter(model: Model, ref: AdapterRef) -> Adapter | None:
    if ref.folder is None:
        return None
    try:
        verify(Path(ref.folder))
        return model.open_adapter(ref.folder)
    except (AdapterError, AdapterRefused) as error:
        raise EngineFault(error.code, f"version {ref.version}: {error}") from error


def _build_decoder(model: Model, start: StartServe, adapter: Adapter | None, service: Service) -> Decoder:
    n_sequences = start.slots + FINISHED_SEQUENCES
    context = model.open_context(
        context_tokens=start.context_tokens,
        n_sequences=n_sequences,
        max_rows=max(n_sequences, SLICE_TOKENS),
        threads=start.threads,
    )
    scheduler = Scheduler(slots=start.slots, n_sequences=n_sequences, pool_tokens=start.context_tokens, service=service)
    decoder = Decoder(context, scheduler)
    decoder.set_adapter(adapter)
    return decoder


def _warm_up(decoder: Decoder, start: StartServe) -> None:
    """Page in the weights, and find out before Ready whether the adapter gives numbers at all."""
    decoder.scheduler.submit(Piece("warm-up", (0,), rows_from=0, room=0))
    _, (evaluated,) = decoder.step(1)
    finite = math.isfinite(float(evaluated.row.sum()))
    decoder.abandon()
    if not finite:
        raise EngineFault("not_finite", f"version {start.adapter.version} gives NaN; start with another version")
