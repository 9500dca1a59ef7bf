"""vLLM through its OpenAI routes and its runtime LoRA routes.

    GET  /v1/models                     base, context length, adapters
    POST /v1/completions                prompt as token ids; `return_token_ids`, `logprobs`, `prompt_logprobs`
    POST /v1/load_lora_adapter, /v1/unload_lora_adapter
                                        with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora

Adapters are never loaded in place of another (`load_inplace`) and no name is ever used for another adapter: vLLM keys
its prefix cache by the name (vllm-project/vllm#42125), and an adapter that is loaded in place is read from disk again
at every step (NovaSky-AI/SkyRL#1606).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from engine.generate.remote.server import Asked, Drawn, Finished, adapters_of, best_first, model_cards
from engine.generate.remote.transport import ServerGone, ServerRefused, Stream, Transport

COMPLETIONS = "/v1/completions"
_TOKEN = "token_id:"  # how tokens are named with return_tokens_as_token_ids


class Vllm:
    """Implements `engine.generate.remote.server.Server`."""

    name = "vLLM"

    def __init__(self, transport: Transport, base: dict[str, Any]) -> None:
        """base: its card in /v1/models."""
        self._transport = transport
        self._base = str(base["id"])
        length = base.get("max_model_len")
        self.max_tokens = length if isinstance(length, int) else None

    def loaded(self, *, quickly: bool = False) -> dict[str, str]:
        return adapters_of(model_cards(self._transport, quickly=quickly))

    def load(self, name: str, path: str) -> None:
        if name in self.loaded():
            return
        try:
            self._transport.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        except ServerRefused as refused:
            if name not in self.loaded():  # an answer that was lost had loaded it
                raise _with_advice(refused) from refused

    def unload(self, name: str) -> None:
        try:
            self._transport.post("/v1/unload_lora_adapter", {"lora_name": name})
        except ServerRefused as refused:
            if refused.status != 404:
                raise

    def draw(self, stream: Stream, asked: Asked) -> Iterator[Drawn | Finished]:
        reason = None
        for event in stream.events(COMPLETIONS, self._body(asked)):
            if "error" in event:
                raise ServerRefused(500, str(event["error"]))
            for choice in event.get("choices", ()):
                yield from _drawn(choice)
                reason = choice.get("finish_reason") or reason
        if reason is not None:
            yield Finished(reason if reason in ("stop", "length") else "abort")

    def score(self, tokens: Sequence[int], adapter: str | None) -> tuple[float | None, ...]:
        body = {"model": adapter or self._base, "prompt": list(tokens), "max_tokens": 1, "temperature": 0.0}
        answer = self._transport.post(COMPLETIONS, body | {"prompt_logprobs": 0})
        try:
            told = answer["choices"][0]["prompt_logprobs"]
            scores = [
                None if of is None else float(of[str(token)]["logprob"]) for token, of in zip(tokens, told, strict=True)
            ]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerGone(
                f"{self._transport.url}: no prompt_logprobs of the tokens that were sent: {error}"
            ) from error
        return tuple(scores)

    def _body(self, asked: Asked) -> dict[str, Any]:
        sampling = asked.sampling
        body: dict[str, Any] = {
            "model": asked.adapter or self._base,
            "prompt": list(asked.prompt_ids),
            "max_tokens": asked.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
            "seed": asked.seed,
            "stop_token_ids": list(asked.end_ids),
            "logprobs": asked.top,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stream": True,
        }
        if sampling.logit_bias:
            body["logit_bias"] = {str(token): value for token, value in sampling.logit_bias}
        return body


def _drawn(choice: dict[str, Any]) -> Iterator[Drawn]:
    ids = choice.get("token_ids") or []
    told = choice.get("logprobs") or {}
    logprobs = told.get("token_logprobs") or [None] * len(ids)
    tops = told.get("top_logprobs") or [None] * len(ids)
    if not len(ids) == len(logprobs) == len(tops):
        raise ServerRefused(500, f"{len(ids)} tokens with {len(logprobs)} log-probabilities: vLLM older than 0.10.2?")
    for token, logprob, top in zip(ids, logprobs, tops, strict=True):
        named = {int(name.removeprefix(_TOKEN)): float(value) for name, value in (top or {}).items() if _TOKEN in name}
        yield Drawn(int(token), None if logprob is None else float(logprob), best_first(named))


def _with_advice(refused: ServerRefused) -> ServerRefused:
    if refused.status == 404 and "lora" not in str(refused).lower():
        return ServerRefused(
            404,
            "vLLM takes no adapters at run time; start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
        )
    return refused
