"""The daemon's side of a serve role that runs in a thread of the test process, over a link of two queues."""

from __future__ import annotations

import dataclasses
import itertools
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from engine import protocol
from engine.protocol import AdapterRef, ChatMessage, Message, Sampling

HANG_GUARD_S = 60.0
PROBES = (
    protocol.ProbeText(user="the cat", assistant="a cat is that"),
    protocol.ProbeText(user="Hi", assistant="é!"),
)
M = TypeVar("M", bound=Message)
T = TypeVar("T")
_numbers = itertools.count()


class MemoryLink:
    """What a role asks of `engine.link.Link`, without a daemon."""

    def __init__(self) -> None:
        self.said: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._wakes: list[int] = []
        self._rung = os.eventfd(0, os.EFD_NONBLOCK)

    def order(self, message: Message) -> None:
        self._orders.put(message)
        os.eventfd_write(self._rung, 1)

    def send(self, message: Message) -> None:
        assert protocol.decode(protocol.encode(message, 1)) == (1, message)
        self.said.put(message)

    def receive(self, timeout_s: float) -> Message | None:
        if self._orders.empty() and timeout_s > 0:
            ready, _, _ = select.select([self._rung, *self._wakes], [], [], timeout_s)
            if self._rung in ready:
                os.eventfd_read(self._rung)
        return None if self._orders.empty() else self._orders.get()

    def also_wake_on(self, descriptor: int) -> None:
        self._wakes.append(descriptor)

    def beat(self, busy: str = "") -> None:
        pass

    def until_next_beat_s(self) -> float:
        return 1.0

    def beat_while(self, work: Callable[[], T], busy: str) -> T:
        return work()

    def close(self) -> None:
        os.close(self._rung)


class Desk:
    """A running serve role and what it has said."""

    def __init__(self, run: Callable[[Any, protocol.StartServe], None], start: protocol.StartServe) -> None:
        self.link = MemoryLink()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(run, start), name="serve role", daemon=True)
        self._thread.start()
        self.ready = self.expect(protocol.Ready)

    def _run(self, run: Callable[[Any, protocol.StartServe], None], start: protocol.StartServe) -> None:
        try:
            run(self.link, start)
        except BaseException as error:  # told to the test, which asks for it
            self.failure = error

    def stop(self) -> None:
        self.link.order(protocol.Stop(within_s=0.5))
        self._thread.join(HANG_GUARD_S)
        assert not self._thread.is_alive()
        self.link.close()

    def until_over(self) -> BaseException | None:
        """Wait until the role ends by itself; with what."""
        self._thread.join(HANG_GUARD_S)
        assert not self._thread.is_alive()
        return self.failure

    def send(self, message: Message) -> None:
        self.link.order(message)

    def receive(self) -> Message:
        """The next message that is no news."""
        deadline = time.monotonic() + HANG_GUARD_S
        while time.monotonic() < deadline:
            try:
                message = self.link.said.get(timeout=0.2)
            except queue.Empty:
                if not self._thread.is_alive():
                    raise AssertionError(f"the role ended: {self.failure!r}") from self.failure
                continue
            if not isinstance(message, protocol.Beat | protocol.Decoding):
                return message
        raise AssertionError("the role says nothing")

    def expect(self, kind: type[M], *others: type[Message]) -> M:
        """The next message of this kind; only messages of `others` may come before."""
        while True:
            message = self.receive()
            if isinstance(message, kind):
                return message
            assert isinstance(message, others), f"unexpected {message}"

    def collect(self, *request_ids: str) -> dict[str, list[Message]]:
        """Everything that is said about these requests, to the end of all of them."""
        said: dict[str, list[Message]] = {request_id: [] for request_id in request_ids}
        while not all(of and isinstance(of[-1], protocol.RequestDone | protocol.RequestFailed) for of in said.values()):
            message = self.receive()
            said[getattr(message, "request_id", "")].append(message)
        return said

    def ask(self, message: protocol.Generate) -> list[Message]:
        self.send(message)
        return self.collect(message.request_id)[message.request_id]

    def answer(self, message: protocol.Generate) -> protocol.ChoiceDone:
        """The only choice of a request."""
        (done,) = of(self.ask(message), protocol.ChoiceDone)
        return done

    def version(self) -> int:
        """The version that answers now."""
        (begun,) = of(self.ask(chat(max_tokens=1)), protocol.Begun)
        return begun.version

    def stage(self, adapter: AdapterRef, **changes: Any) -> protocol.Staged | protocol.StageFailed:
        settings: dict[str, Any] = {"fluency_prompts": ("Hi", "Why?"), "fluency_tokens": 6, "seed": 1} | changes
        self.send(protocol.Stage(job_id=f"stage-{next(_numbers)}", adapter=adapter, **settings))
        message = self.receive()
        assert isinstance(message, protocol.Staged | protocol.StageFailed), message
        return message

    def route(self, version: int) -> protocol.Routed | protocol.RouteFailed:
        self.send(protocol.Route(job_id=f"route-{next(_numbers)}", version=version))
        message = self.receive()
        assert isinstance(message, protocol.Routed | protocol.RouteFailed), message
        return message


def start_serve(model_path: str, **changes: Any) -> protocol.StartServe:
    settings: dict[str, Any] = {
        "model_path": model_path,
        "adapter": protocol.BASE,
        "slots": 4,
        "context_tokens": 512,
        "threads": 1,
        "probes": PROBES,
    }
    return protocol.StartServe(**(settings | changes))


def chat(text: str = "the cat", *, n: int = 1, prompt: str | None = None, **sampling: Any) -> protocol.Generate:
    settings: dict[str, Any] = {"max_tokens": 12, "seed": 5} | sampling
    return protocol.Generate(
        request_id=f"request-{next(_numbers)}",
        messages=(ChatMessage(role="user", content=text),) if prompt is None else None,
        prompt=prompt,
        n=n,
        sampling=Sampling(**settings),
    )


def written(answer: str, **changes: Any) -> protocol.Tokenise:
    messages = (ChatMessage(role="user", content="the cat"),)
    request = protocol.Tokenise(request_id=f"request-{next(_numbers)}", messages=messages, answer=answer)
    return dataclasses.replace(request, **changes)


def of(said: Sequence[Message], kind: type[M]) -> list[M]:
    return [message for message in said if isinstance(message, kind)]
