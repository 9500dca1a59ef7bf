"""SGLang through its native route and its runtime LoRA routes.

    GET  /v1/models                             base, context length, adapters
    POST /generate                              `input_ids`, `return_logprob`, `lora_path` (the adapter's name)
    POST /load_lora_adapter, /unload_lora_adapter   with --enable-lora, --max-lora-rank and --lora-target-modules

Its OpenAI routes return no token ids, so /generate it is. Events of a stream hold all tokens so far, or only the new
ones (`--incremental-streaming-output`): which of the two follows from how many it says there are. A seed counts only
where the server runs with --enable-deterministic-inference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from engine.generate.remote.server import Asked, Drawn, Finished, adapters_of, best_first, model_cards
from engine.generate.remote.transport import ServerGone, ServerRefused, Stream, Transport

GENERATE = "/generate"


class Sglang:
    """Implements `engine.generate.remote.server.Server`."""

    name = "SGLang"

    def __init__(self, transport: Transport, base: dict[str, Any]) -> None:
        """base: its card in /v1/models."""
        self._transport = transport
        length = base.get("max_model_len")
        self.max_tokens = length if isinstance(length, int) else None

    def loaded(self, *, quickly: bool = False) -> dict[str, str]:
        return adapters_of(model_cards(self._transport, quickly=quickly))

    def load(self, name: str, path: str) -> None:
        if name in self.loaded():
            return
        try:
            _check(self._transport.post("/load_lora_adapter", {"lora_name": name, "lora_path": path}))
        except ServerRefused as refused:
            if "already" not in str(refused):  # an answer that was lost had loaded it
                raise

    def unload(self, name: str) -> None:
        if name in self.loaded():
            _check(self._transport.post("/unload_lora_adapter", {"lora_name": name}))

    def draw(self, stream: Stream, asked: Asked) -> Iterator[Drawn | Finished]:
        n_seen = 0
        for event in stream.events(GENERATE, self._body(asked)):
            if "error" in event:
                raise ServerRefused(500, str(event["error"]))
            meta = event.get("meta_info") or {}
            tokens = meta.get("output_token_logprobs") or []
            tops = meta.get("output_top_logprobs") or [None] * len(tokens)
            fresh = 0
            if len(tokens) == meta.get("completion_tokens"):  # all so far
                fresh = n_seen
            for (logprob, token, *_), top in zip(tokens[fresh:], tops[fresh:], strict=True):
                n_seen += 1
                alternatives = best_first([(int(one[1]), float(one[0])) for one in top or ()])
                told = None if logprob is None else float(logprob)
                yield Drawn(int(token), told, alternatives[: asked.top], int(meta.get("cached_tokens") or 0))
            reason = meta.get("finish_reason")
            if reason is not None:
                kind = reason.get("type") if isinstance(reason, dict) else reason
                yield Finished(kind if kind in ("stop", "length") else "abort")
                return

    def score(self, tokens: Sequence[int], adapter: str | None) -> tuple[float | None, ...]:
        body: dict[str, Any] = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = self._transport.post(GENERATE, body | ({"lora_path": adapter} if adapter else {}))
        try:
            told = answer["meta_info"]["input_token_logprobs"]
            if [int(one[1]) for one in told] != list(tokens):
                raise ValueError("they are of other tokens")
            return tuple(None if one[0] is None else float(one[0]) for one in told)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerGone(
                f"{self._transport.url}: no log-probabilities of the tokens that were sent: {error}"
            ) from error

    def _body(self, asked: Asked) -> dict[str, Any]:
        sampling = asked.sampling
        options: dict[str, Any] = {
            "max_new_tokens": asked.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
            "stop_token_ids": list(asked.end_ids),
            "sampling_seed": asked.seed,
        }
        if sampling.repetition_penalty != 1:
            options["repetition_penalty"] = sampling.repetition_penalty
        if sampling.logit_bias:
            options["logit_bias"] = {str(token): value for token, value in sampling.logit_bias}
        body: dict[str, Any] = {
            "input_ids": list(asked.prompt_ids),
            "sampling_params": options,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": asked.top,
            "stream": True,
        }
        return body | ({"lora_path": asked.adapter} if asked.adapter else {})


def _check(answer: Any) -> None:
    """Some refusals come with status 200."""
    if isinstance(answer, dict) and answer.get("success") is False:
        raise ServerRefused(400, str(answer.get("error_message") or answer.get("message") or "it did not say why"))
