"""The serve role on a server elsewhere: one loop over messages from the daemon and news of the server.

At the start it waits until the server answers, for as long as it is told to: a server of a large model takes minutes to
load, and may be started after the daemon. A server that is gone later is a fault of this worker, so that the daemon
starts another one, which waits in the same way and loads the live adapter again.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from pathlib import Path

from engine.fault import EngineFault
from engine.generate.asking import Asking
from engine.generate.backend import AdapterRefused
from engine.generate.gaps import Gaps
from engine.generate.hf_vocabulary import FolderVocabulary
from engine.generate.prompt import Prompts
from engine.generate.remote.answering import Answering, News
from engine.generate.remote.mailbox import Mailbox
from engine.generate.remote.meaning import PLAIN, Meaning, can_tell, judge, likeliest_of, questions
from engine.generate.remote.server import Asked, Drawn, Server, find_server
from engine.generate.remote.staging import Adapters, Outcome, Shelf, Staging
from engine.generate.remote.transport import ServerGone, ServerRefused, Transport
from engine.generate.swap import Swap
from engine.generate.template import BadTemplate
from engine.link import Link
from engine.protocol import (
    Cancel,
    Generate,
    Message,
    ModelFacts,
    ProbeTokens,
    Ready,
    Route,
    Sampling,
    Stage,
    StartServe,
    Stop,
    Tokenise,
    WireError,
)

log = logging.getLogger(__name__)

STOP_MARGIN_S = 0.5  # of the time that Stop grants, kept for sending the cancelled answers
ASK_AGAIN_S = 0.5  # while the server does not answer yet


@dataclasses.dataclass(frozen=True, slots=True)
class _Opened:
    """Everything that is there before Ready."""

    vocabulary: FolderVocabulary
    prompts: Prompts
    facts: ModelFacts
    probes: tuple[ProbeTokens, ...]
    transport: Transport
    server: Server
    meaning: Meaning
    adapters: Adapters
    name: str | None
    trained_tokens: int
    load_s: float


def run(link: Link, start: StartServe) -> None:
    """Serve until Stop.

    Raises:
        EngineFault: model_unreadable, bad_template, server_unreachable, adapter_unreadable, adapter_mismatch,
            adapter_lost, not_finite.
        LinkLost, Stopped: see `engine.link`.
    """
    opened = link.beat_while(lambda: _open(start), "waiting for the server")
    link.send(Ready(load_s=opened.load_s, model=opened.facts, probes=opened.probes))
    _Loop(link, opened, start).run()


class _Loop:
    def __init__(self, link: Link, opened: _Opened, start: StartServe) -> None:
        self._link = link
        self._news: Mailbox[News] = Mailbox()
        self._outcomes: Mailbox[Outcome] = Mailbox()
        for mailbox in (self._news, self._outcomes):
            link.also_wake_on(mailbox.descriptor)
        self._gaps = Gaps()  # of first tokens only: what the server does between two tokens is its own business
        swap = Swap(start.adapter.version)
        self._staging = Staging(opened.adapters, swap, opened.probes, self._outcomes, name=opened.name, send=link.send)
        self._answering = Answering(
            opened.server,
            opened.transport,
            opened.meaning,
            Asking(
                opened.vocabulary,
                opened.prompts,
                context_tokens=opened.trained_tokens,
                trained_tokens=opened.trained_tokens,
            ),
            swap,
            self._news,
            slots=start.slots,
            end_ids=opened.vocabulary.eos_ids,
            piece_of=opened.vocabulary.piece,
            name_of=self._staging.name_of,
            send=link.send,
            ended=lambda context: self._staging.perform(swap.end(context)),
            began=self._gaps.first,
        )
        self._stop_at = math.inf

    def run(self) -> None:
        self._staging.prove_baseline()
        while not self._is_over():
            until_stop_s = max(0.0, self._stop_at - time.monotonic())
            self._take_messages(min(self._link.until_next_beat_s(), until_stop_s, self._answering.until_deadline_s()))
            self._answering.give_up_the_late()
            for news in self._news.take_all():
                self._answering.take(news)
            for outcome in self._outcomes.take_all():
                self._staging.take(outcome)
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
                self._staging.route(message)
            case Stop():
                self._stop_at = time.monotonic() + max(0.0, message.within_s - STOP_MARGIN_S)
            case _:
                raise WireError(f"a serve worker takes no {type(message).__name__}")

    def _busy(self) -> str:
        if self._answering.has_work:
            return "answering"
        return "proving" if self._staging.has_work else ""


def _open(start: StartServe) -> _Opened:
    began = time.monotonic()
    folder = Path(start.model_path)
    vocabulary = FolderVocabulary(folder)
    try:
        prompts = Prompts(vocabulary)
        probes = tuple(prompts.probe(probe) for probe in start.probes)
    except BadTemplate as error:
        raise EngineFault("bad_template", f"{start.model_path}: {error}") from error
    transport = Transport(start.url, api_key=read_key(start.api_key_file))
    server = _wait_for(transport, start.server_wait_s)
    try:
        meaning = find_meaning(server, transport, [probe.prompt_ids for probe in probes], vocabulary.eos_ids)
        shelf = Shelf(Path(start.shelf), start.shelf_seen_at or start.shelf)
        adapters = Adapters(server, transport, meaning, shelf, vocabulary, prompts, folder)
        name = adapters.load(start.adapter)
        adapters.unload_others(name)
    except AdapterRefused as refused:
        raise EngineFault(refused.code, f"version {start.adapter.version}: {refused}") from refused
    except (ServerGone, ServerRefused) as error:
        raise EngineFault("server_unreachable", f"{server.name}: {error}") from error
    facts = _facts(folder, vocabulary, prompts, server)
    log.info("%s at %s; its log-probabilities are %s", server.name, start.url, meaning)
    return _Opened(
        vocabulary=vocabulary,
        prompts=prompts,
        facts=facts,
        probes=probes,
        transport=transport,
        server=server,
        meaning=meaning,
        adapters=adapters,
        name=name,
        trained_tokens=facts.n_ctx_train_tokens,
        load_s=time.monotonic() - began,
    )


def _wait_for(transport: Transport, wait_s: float) -> Server:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return find_server(transport)
        except (ServerGone, ServerRefused) as error:
            if time.monotonic() >= deadline:
                raise EngineFault("server_unreachable", f"no server within {wait_s:g} s: {error}") from error
            time.sleep(ASK_AGAIN_S)


def find_meaning(
    server: Server, transport: Transport, prompts: list[tuple[int, ...]], end_ids: frozenset[int]
) -> Meaning:
    """What the server's log-probabilities are of, by asking it. Raises ServerGone, ServerRefused."""

    def told_of(prompt: tuple[int, ...], sampling: Sampling) -> dict[int, float]:
        asked = Asked(
            prompt_ids=prompt, adapter=None, sampling=sampling, seed=1, max_tokens=1, top=1, end_ids=tuple(end_ids)
        )
        for item in server.draw(transport.stream(), asked):
            if isinstance(item, Drawn):
                return dict(item.top)
        raise ServerGone(f"{transport.url}: asked for a token, it gave none")

    for prompt in prompts:
        top = told_of(prompt, PLAIN)
        if not top:
            raise ServerGone(f"{transport.url}: it tells no log-probabilities")
        likeliest, plain = likeliest_of(tuple(top.items()))
        if not can_tell(plain):
            continue
        told = {name: told_of(prompt, sampling).get(likeliest) for name, sampling in questions(likeliest).items()}
        known = {name: value for name, value in told.items() if value is not None}
        if len(known) == len(told):
            return judge(plain, known)
    raise ServerGone(f"{transport.url}: what its log-probabilities are of could not be found out")


def _facts(folder: Path, vocabulary: FolderVocabulary, prompts: Prompts, server: Server) -> ModelFacts:
    shape, trained = vocabulary.shape, vocabulary.trained_tokens
    return ModelFacts(
        architecture=shape.arch,
        n_layers=shape.n_layers,
        n_embd=shape.n_embd,
        n_vocab=vocabulary.n_vocab,
        n_ctx_train_tokens=trained if server.max_tokens is None else min(trained, server.max_tokens),
        eos_ids=tuple(sorted(vocabulary.eos_ids)),
        chat_template=vocabulary.chat_template is not None,
        keeps_turns=prompts.keeps_turns,
    )


def read_key(path: str) -> str | None:
    """The key in a file, None for "". Raises EngineFault server_unreachable."""
    if not path:
        return None
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise EngineFault("server_unreachable", f"serve.api_key_file: {path}: {error.strerror}") from error
