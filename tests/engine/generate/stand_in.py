"""A server that behaves as vLLM or SGLang document that they do, over a tiny model: what the remote backend is tested
against. transformers and PEFT compute; batching is a lock.

Copied on purpose: the routes and the shape of what they answer; which log-probability is told, by how the server was
started; several tokens in an event; SGLang's events with all tokens so far or the new ones only; the text of refusals;
and vLLM's prefix cache, which is keyed by an adapter's name and knows nothing of what was loaded under it before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import numpy as np
import peft
import torch
import transformers

from engine.generate.shaping import Shape, Shaper

BASE = "tiny"
Told = Literal["raw", "processed", "tempered"]


@dataclasses.dataclass(frozen=True)
class Options:
    """As the server was started. told: vLLM's --logprobs-mode, or what SGLang does. n_max: --max-loras and the like."""

    kind: Literal["vllm", "sglang"]
    told: Told
    incremental: bool = False
    api_key: str | None = None
    loras: bool = True


class StandIn:
    """A running server. aborted: streams whose reader left. `down` closes it, with all its connections."""

    def __init__(self, folder: Path, options: Options, port: int = 0) -> None:
        self.options = options
        self.adapters: dict[str, str] = {}
        self.ever: list[tuple[str, str]] = []  # every load
        self.unloaded: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.n_streams = self.aborted = 0
        self.fail_streams_after: int | None = None
        self._lock = threading.Lock()
        self._cache: dict[tuple[str | None, tuple[int, ...]], np.ndarray] = {}
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._adapted: Any = None
        self._known: dict[str, str] = {}  # name -> what PEFT calls it
        self._open: set[Any] = set()
        stand_in = self

        class Handler(_Handler):
            server_of = stand_in

        self._http = _Http(("127.0.0.1", port), Handler)
        self._http.daemon_threads = True
        self.port = int(self._http.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def down(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(2)

    # ---------------------------------------------------------------------------------------------- what it does

    def load(self, name: str, path: str) -> str | None:
        """Why it does not, or None."""
        with self._lock:
            try:
                inside = f"{name}-{len(self.ever)}".replace(".", "_")
                if self._adapted is None:
                    self._adapted = peft.PeftModel.from_pretrained(self._model, path, adapter_name=inside).eval()
                else:
                    self._adapted.load_adapter(path, adapter_name=inside)
            except Exception as error:
                return f"Loading lora {name} failed: {error}"
            self.adapters[name], self._known[name] = path, inside
            self.ever.append((name, path))
        return None

    def logits(self, name: str | None, tokens: tuple[int, ...]) -> np.ndarray:
        """float32[T, V], out of a cache where it was computed before."""
        with self._lock:
            key = (name, tokens)
            if key not in self._cache:
                with torch.no_grad():
                    self._cache[key] = self._compute(name, torch.tensor([tokens]))
            return self._cache[key]

    def _compute(self, name: str | None, ids: torch.Tensor) -> np.ndarray:
        if name is None:
            if self._adapted is None:
                return self._model(input_ids=ids).logits[0].numpy()
            with self._adapted.disable_adapter():
                return self._adapted(input_ids=ids).logits[0].numpy()
        self._adapted.set_adapter(self._known[name])
        return self._adapted(input_ids=ids).logits[0].numpy()

    def draw(self, name: str | None, prompt: list[int], options: dict[str, Any]) -> Iterator[tuple[int, float, list]]:
        """Tokens, what is told of them, and of the likeliest ones."""
        shaper = Shaper(
            Shape(
                bias=tuple((int(token), float(value)) for token, value in options.get("logit_bias", {}).items()),
                repetition_penalty=options.get("repetition_penalty", 1.0),
                frequency_penalty=options.get("frequency_penalty", 0.0),
                presence_penalty=options.get("presence_penalty", 0.0),
            ),
            prompt,
        )
        temperature, top_k = options["temperature"], max(0, options.get("top_k", -1))
        chance = np.random.default_rng(options["seed"])
        tokens = list(prompt)
        for _ in range(options["max_tokens"]):
            raw = self.logits(name, tuple(tokens))[-1].astype(np.float64)
            shaped = shaper.apply(raw.astype(np.float32)).astype(np.float64)
            tempered = shaped / temperature if temperature > 0 else shaped
            cut = _cut(tempered, top_k, options.get("top_p", 1.0), options.get("min_p", 0.0))
            told = _log_softmax({"raw": raw, "tempered": tempered, "processed": cut}[self.options.told])
            if temperature == 0:
                token = int(shaped.argmax())
                told = _log_softmax(raw if self.options.told == "raw" else shaped)
            else:
                probabilities = np.exp(_log_softmax(cut))
                token = int(chance.choice(len(raw), p=probabilities / probabilities.sum()))
            shaper.note(token)
            tokens.append(token)
            best = np.argsort(-told)[:8]
            yield token, float(max(told[token], -9999.0)), [(int(i), float(max(told[i], -9999.0))) for i in best]
            if token in options["stop_token_ids"]:
                return


class _Http(ThreadingHTTPServer):
    allow_reuse_address = True

    def handle_error(self, *_: Any) -> None:
        """Readers that left, and connections that `down` has shut."""


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def _cut(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    kept = np.ones(len(logits), bool)
    order = np.argsort(-logits)
    if top_k:
        kept[order[top_k:]] = False
    probabilities = np.exp(_log_softmax(np.where(kept, logits, -np.inf)))
    if top_p < 1:
        n = int(np.searchsorted(np.cumsum(probabilities[order]), top_p)) + 1
        kept[order[n:]] = False
    if min_p > 0:
        kept &= probabilities >= min_p * probabilities.max()
    return np.where(kept, logits, -np.inf)


class _Handler(BaseHTTPRequestHandler):
    """The routes. HTTP/1.0: a stream ends where its connection does."""

    server_of: StandIn

    def log_message(self, *_: Any) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        self.server_of._open.add(self.connection)

    def finish(self) -> None:
        self.server_of._open.discard(self.connection)
        super().finish()

    def do_GET(self) -> None:
        if self._refused():
            return
        if self.path != "/v1/models":
            return self._json(404, {"detail": "Not Found"})
        kind = self.server_of.options.kind
        cards: list[dict[str, Any]] = [
            {"id": BASE, "object": "model", "owned_by": kind, "root": "/models/tiny", "max_model_len": 512}
        ]
        cards += [
            {"id": name, "object": "model", "owned_by": kind, "root": path, "parent": BASE}
            for name, path in self.server_of.adapters.items()
        ]
        self._json(200, {"object": "list", "data": cards})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._refused():
            return
        self.server_of.requests.append(body)
        routes = {
            "vllm": {
                "/v1/completions": self._vllm_completions,
                "/v1/load_lora_adapter": self._vllm_load,
                "/v1/unload_lora_adapter": self._vllm_unload,
            },
            "sglang": {
                "/generate": self._sglang_generate,
                "/load_lora_adapter": self._sglang_load,
                "/unload_lora_adapter": self._sglang_unload,
            },
        }[self.server_of.options.kind]
        if self.path not in routes or ("lora" in self.path and not self.server_of.options.loras):
            return self._json(404, {"detail": "Not Found"})
        routes[self.path](body)

    # ------------------------------------------------------------------------------------------------------ vLLM

    def _vllm_load(self, body: dict[str, Any]) -> None:
        name = body["lora_name"]
        if name in self.server_of.adapters:
            return self._vllm_error(400, f"The lora adapter '{name}' has already been loaded.", "InvalidUserInput")
        why = self.server_of.load(name, body["lora_path"])
        if why is not None:
            return self._vllm_error(500, why, "InternalServerError")
        self._text(200, f"Success: LoRA adapter '{name}' added successfully.")

    def _vllm_unload(self, body: dict[str, Any]) -> None:
        name = body["lora_name"]
        if name not in self.server_of.adapters:
            return self._vllm_error(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        del self.server_of.adapters[name]
        self.server_of.unloaded.append(name)
        self._text(200, f"Success: LoRA adapter '{name}' removed successfully.")

    def _vllm_completions(self, body: dict[str, Any]) -> None:
        model = body["model"]
        if model != BASE and model not in self.server_of.adapters:
            return self._vllm_error(404, f"The model `{model}` does not exist.", "NotFoundError")
        name = None if model == BASE else model
        if "prompt_logprobs" in body:
            tokens = tuple(body["prompt"])
            rows = [_log_softmax(row.astype(np.float64)) for row in self.server_of.logits(name, tokens)]
            told: list[Any] = [None]
            told += [
                {str(token): {"logprob": float(row[token]), "rank": 1, "decoded_token": "?"}}
                for row, token in zip(rows[:-1], tokens[1:], strict=True)
            ]
            return self._json(200, {"choices": [{"index": 0, "text": "?", "prompt_logprobs": told}]})
        assert body["stream"]
        assert body["return_token_ids"]
        assert body["return_tokens_as_token_ids"]
        self._stream(self._vllm_events(name, body))

    def _vllm_events(self, name: str | None, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        drawn, n_tokens, last = [], 0, None
        for token, told, best in self.server_of.draw(name, body["prompt"], body):
            n_tokens, last = n_tokens + 1, token
            drawn.append((token, told, best[: body["logprobs"]]))
            if len(drawn) > n_tokens % 3:
                yield self._vllm_event(drawn)
                drawn = []
        event = self._vllm_event(drawn)
        event["choices"][0]["finish_reason"] = "stop" if last in body["stop_token_ids"] else "length"
        yield event

    @staticmethod
    def _vllm_event(drawn: list[tuple[int, float, list]]) -> dict[str, Any]:
        logprobs = {
            "tokens": [f"token_id:{token}" for token, _, _ in drawn],
            "token_logprobs": [told for _, told, _ in drawn],
            # What was sampled comes first, and then as many of the likeliest as were asked for.
            "top_logprobs": [
                {f"token_id:{one}": value for one, value in [(token, told), *best]} for token, told, best in drawn
            ],
        }
        choice: dict[str, Any] = {"index": 0, "text": "?", "logprobs": logprobs, "finish_reason": None}
        return {"object": "text_completion", "choices": [choice | {"token_ids": [token for token, _, _ in drawn]}]}

    def _vllm_error(self, status: int, message: str, kind: str) -> None:
        self._json(status, {"error": {"message": message, "type": kind, "param": None, "code": status}})

    # ---------------------------------------------------------------------------------------------------- SGLang

    def _sglang_load(self, body: dict[str, Any]) -> None:
        name = body["lora_name"]
        why = f"LoRA with name {name} already exists." if name in self.server_of.adapters else None
        why = why or self.server_of.load(name, body["lora_path"])
        loaded = dict(self.server_of.adapters)
        self._json(
            200 if why is None else 400, {"success": why is None, "error_message": why or "", "loaded_adapters": loaded}
        )

    def _sglang_unload(self, body: dict[str, Any]) -> None:
        name = body["lora_name"]
        there = self.server_of.adapters.pop(name, None)
        if there is not None:
            self.server_of.unloaded.append(name)
        message = "" if there is not None else f"LoRA adapter {name} is not loaded."
        self._json(200 if there is not None else 400, {"success": there is not None, "error_message": message})

    def _sglang_generate(self, body: dict[str, Any]) -> None:
        name, tokens = body.get("lora_path"), body["input_ids"]
        if name is not None and name not in self.server_of.adapters:
            return self._json(
                400, {"error": {"message": f"The following requested LoRA adapters are not loaded: {name}"}}
            )
        if not body.get("stream"):
            rows = [_log_softmax(row.astype(np.float64)) for row in self.server_of.logits(name, tuple(tokens))]
            told = [[None, tokens[0], None]]
            told += [[float(row[t]), t, None] for row, t in zip(rows[:-1], tokens[1:], strict=True)]
            return self._json(
                200, {"text": "?", "meta_info": {"input_token_logprobs": told, "prompt_tokens": len(tokens)}}
            )
        self._stream(self._sglang_events(name, body))

    def _sglang_events(self, name: str | None, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        given = body["sampling_params"]
        options = given | {"max_tokens": given["max_new_tokens"], "seed": given["sampling_seed"]}
        logprobs, tops, n_told = [], [], 0

        def event(reason: dict[str, Any] | None) -> dict[str, Any]:
            nonlocal n_told
            start = n_told if self.server_of.options.incremental else 0
            n_told = len(logprobs)
            meta = {
                "finish_reason": reason,
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": len(logprobs),
                "cached_tokens": 3,
                "output_token_logprobs": logprobs[start:],
            }
            if body["top_logprobs_num"]:
                meta["output_top_logprobs"] = tops[start:]
            return {"text": "?", "meta_info": meta}

        for token, told, best in self.server_of.draw(name, body["input_ids"], options):
            logprobs.append([told, token, None])
            tops.append([[value, one, None] for one, value in best[: body["top_logprobs_num"]]])
            if len(logprobs) % 3 != 2:
                yield event(None)
        last = logprobs[-1][1]
        ended = last in given["stop_token_ids"]
        yield event({"type": "stop", "matched": last} if ended else {"type": "length", "length": len(logprobs)})

    # ---------------------------------------------------------------------------------------------------- plumbing

    def _refused(self) -> bool:
        key = self.server_of.options.api_key
        if key is not None and self.headers.get("Authorization") != f"Bearer {key}":
            self._json(401, {"error": "Unauthorized"})
            return True
        return False

    def _stream(self, events: Iterator[dict[str, Any]]) -> None:
        self.server_of.n_streams += 1
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for number, event in enumerate(events):
                if number == self.server_of.fail_streams_after:
                    return self.connection.shutdown(2)
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.server_of.aborted += 1

    def _json(self, status: int, value: Any) -> None:
        self._text(status, json.dumps(value))

    def _text(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(text.encode())
