"""What a server does for this worker, whichever it is; and which one answers at a URL."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

from engine.generate.remote.transport import ServerGone, Stream, Transport
from engine.protocol import Sampling

ADAPTER_PREFIX = "edged-v"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One sequence to sample.

    adapter: its name on the server; None: the base. top: alternatives to tell of each token. end_ids: tokens that end
    it. max_tokens: sampled at most.
    """

    prompt_ids: tuple[int, ...]
    adapter: str | None
    sampling: Sampling
    seed: int
    max_tokens: int
    top: int
    end_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Drawn:
    """A sampled token. told: its log-probability as the server has it (see `meaning`); None where it said none.
    top: (id, log-probability) of the likeliest, best first. cached_tokens: of the prompt, found in the server's cache;
    0 if it does not say."""

    id: int
    told: float | None
    top: tuple[tuple[int, float], ...] = ()
    cached_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """The server ended the sequence."""

    reason: Literal["stop", "length", "abort"]


class Server(Protocol):
    """A server with a base model. Methods block, and raise ServerGone and ServerRefused; any thread may call them."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def max_tokens(self) -> int | None:
        """Longest sequence that it takes; None if it does not say."""

    def loaded(self, *, quickly: bool = False) -> dict[str, str]:
        """Adapters that it has: name -> path, as it sees it ("" if it does not say). quickly: see `Transport.get`."""

    def load(self, name: str, path: str) -> None:
        """Load an adapter under a name that it has not had for another one. Repeating it changes nothing."""

    def unload(self, name: str) -> None:
        """Give the adapter's memory back. One that is not there is no mistake."""

    def draw(self, stream: Stream, asked: Asked) -> Iterator[Drawn | Finished]:
        """Sample one sequence; what comes before Finished is every token in order."""

    def score(self, tokens: Sequence[int], adapter: str | None) -> tuple[float | None, ...]:
        """Of each token, its log-probability under the model's own softmax; None of the first one."""


def find_server(transport: Transport) -> Server:
    """The server at the other end, by what its models are owned by. Raises ServerGone, ServerRefused."""
    from engine.generate.remote.sglang import Sglang
    from engine.generate.remote.vllm import Vllm

    cards = model_cards(transport)
    bases = [card for card in cards if not card.get("parent")]
    if not bases:
        raise ServerGone(f"{transport.url}: it lists no model")
    owner = bases[0].get("owned_by")
    if owner == "vllm":
        return Vllm(transport, bases[0])
    if owner == "sglang":
        return Sglang(transport, bases[0])
    raise ServerGone(f"{transport.url}: a server of {owner!r}; vLLM and SGLang are spoken to")


def model_cards(transport: Transport, *, quickly: bool = False) -> list[dict[str, Any]]:
    """What `/v1/models` lists. Raises ServerGone, ServerRefused."""
    listed = transport.get("/v1/models", quickly=quickly)
    cards = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(cards, list) or not all(isinstance(card, dict) for card in cards):
        raise ServerGone(f"{transport.url}: /v1/models lists no models; is it a server of language models?")
    return cards


def adapters_of(cards: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Of model cards, the adapters: name -> path."""
    return {str(card["id"]): str(card.get("root") or "") for card in cards if card.get("parent") and card.get("id")}


def best_first(top: dict[int, float] | Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Alternatives in the order in which they are told."""
    pairs = list(top.items()) if isinstance(top, dict) else list(top)
    return tuple(sorted(pairs, key=lambda item: -item[1]))
