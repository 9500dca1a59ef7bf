"""Groups of answers that the box asks of itself: a client of the serve worker that gives way to everybody else.

Sampled with full support, and at temperature 1 unless told otherwise, as policy gradients want it. Nothing is recorded
here, no limit of users' requests counts these, and `interrupt` ends them all at once: on the worker the slots are free
for whatever is sent after it. A group is whole or is not there at all. Each purpose has a sampler of its own, whose
groups are known by their names.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from typing import Protocol

from edged.answer import Ask
from edged.failure import JobRefused, WorkerDown, WorkerLost
from edged.records import Caller, Episode, PracticePrompt
from edged.serve import translation
from edged.serve.translation import Serving
from engine import protocol


class Interrupted(Exception):
    """Raised for a group that was given up because somebody needs the box."""


class Engine(Protocol):
    """The serve worker as this module sees it."""

    @property
    def is_ready(self) -> bool: ...

    def send(self, message: protocol.Message) -> None: ...


@dataclasses.dataclass(slots=True)
class _Group:
    """A group under way, and what has come of it."""

    ask: Ask
    created_at: float
    outcome: asyncio.Future[list[Episode]]
    version: int = 0
    prompt_ids: tuple[int, ...] = ()
    choices: list[protocol.ChoiceDone] = dataclasses.field(default_factory=list)


class Sampler:
    """Lives on the event loop; `received` and `down` are called by its owner. purpose: one word, "practice"."""

    def __init__(self, serving: Serving, engine: Engine, purpose: str) -> None:
        self._caller = Caller(name=purpose, scopes=frozenset())
        self._prefix = f"{purpose}-"
        self._serving = serving
        self._engine = engine
        self._groups: dict[str, _Group] = {}

    async def sample(
        self,
        prompt: PracticePrompt,
        *,
        n: int,
        max_tokens: int,
        seed: int,
        temperature: float = 1.0,
        version: int | None = None,
    ) -> list[Episode]:
        """`n` answers to `prompt`, without ids.

        Args:
            version: that answers; None for the one that is live.
        Raises:
            Interrupted: by `interrupt`.
            JobRefused: the engine will not answer this prompt, or holds no such version (`not_resident`).
            WorkerLost: it died, or is not there.
        """
        if not self._engine.is_ready:
            raise WorkerDown("the serve worker is not running")
        ask = self._ask(prompt, n=n, max_tokens=max_tokens, seed=seed, temperature=temperature)
        group = _Group(ask, time.time(), asyncio.get_running_loop().create_future())
        self._groups[ask.completion_id] = group
        try:
            self._engine.send(dataclasses.replace(translation.generate(ask, max_tokens), version=version))
            return await group.outcome
        finally:
            if self._groups.pop(ask.completion_id, None) is not None and group.outcome.cancelled():
                self._cancel(group)

    def interrupt(self) -> None:
        """Give up every group under way."""
        for group in self._groups.values():
            self._cancel(group)
            _fail(group, Interrupted())

    def down(self) -> None:
        """The worker is gone."""
        for group in self._groups.values():
            _fail(group, WorkerLost("the serve worker died"))

    def received(self, message: protocol.Message) -> bool:
        """Take a message of the serve worker; False if it is not about a group."""
        match message:
            case (
                protocol.Begun()
                | protocol.Chunk()
                | protocol.ChoiceDone()
                | protocol.RequestDone()
                | protocol.RequestFailed()
            ) if message.request_id.startswith(self._prefix):
                group = self._groups.get(message.request_id)
                if group is not None:  # else it was given up
                    self._take(group, message)
                return True
            case _:
                return False

    def _take(self, group: _Group, message: protocol.Message) -> None:
        match message:
            case protocol.Begun():
                group.version, group.prompt_ids = message.version, message.prompt_ids
            case protocol.ChoiceDone():
                group.choices.append(message)
            case protocol.RequestFailed():
                _fail(group, JobRefused(message.code, message.message))
            case protocol.RequestDone():
                if any(choice.finish_reason == "cancelled" for choice in group.choices):
                    _fail(group, Interrupted())
                elif not group.outcome.done():
                    group.outcome.set_result(self._episodes(group))

    def _episodes(self, group: _Group) -> list[Episode]:
        episodes = [
            translation.episode(
                group.ask,
                choice,
                serving=self._serving,
                version=group.version,
                prompt_ids=group.prompt_ids,
                created_at=group.created_at,
            )
            for choice in sorted(group.choices, key=lambda choice: choice.choice)
        ]
        return [dataclasses.replace(episode, origin="practice") for episode in episodes]

    def _ask(self, prompt: PracticePrompt, *, n: int, max_tokens: int, seed: int, temperature: float) -> Ask:
        return Ask(
            completion_id=f"{self._prefix}{secrets.token_hex(12)}",
            messages=prompt.messages,
            prompt=prompt.prompt,
            n=n,
            temperature=temperature,
            top_p=1.0,
            top_k=0,
            seed=seed,
            max_tokens=max_tokens,
            stop=(),
            logprobs=False,
            top_logprobs=0,
            user=None,
            metadata={},
            caller=self._caller,
            stream=False,
        )

    def _cancel(self, group: _Group) -> None:
        if self._engine.is_ready:
            self._engine.send(protocol.Cancel(request_id=group.ask.completion_id))


def _fail(group: _Group, error: Exception) -> None:
    if not group.outcome.done():
        group.outcome.set_exception(error)
