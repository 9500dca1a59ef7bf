"""What is served and how it is asked for: `[model]`, `[serve]`, `[api]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PlainValidator

from edged.addresses import Listen, TcpListen, UnixListen, parse_listen
from edged.settings.keys import Section, key, list_key
from engine import protocol


def _as_listen(value: object) -> Listen:
    if isinstance(value, UnixListen | TcpListen):
        return value
    return parse_listen(value if isinstance(value, str) else "")


class ModelSection(Section):
    path: str = key("smollm2-135m", "Model: a packaged name, a .gguf file or a Hugging Face folder.", min_length=1)
    name: str = key("", "Public name in /v1/models; empty: made from the path.", max_length=200)


SLOT_TOKENS = 640  # a usual prompt and an answer of the default length
BODY_BYTES_MAX = protocol.MAX_MESSAGE_BYTES - 64 * 1024  # what is handed to the serve worker, less what is put round it
LEAST_AUTO_TOKENS = 16 * SLOT_TOKENS  # a box of few slots can have long conversations


class ServeSection(Section):
    """The serve worker and its queue."""

    backend: Literal["auto", "llamacpp", "transformers", "remote"] = key(
        "auto",
        'Who decodes: "llamacpp" .gguf files, "transformers" Hugging Face folders, "remote" a server at serve.url; '
        '"auto": the server if there is a URL, else whoever reads the model.',
    )
    url: str = key(
        "",
        "Server of vLLM or SGLang that decodes the model of model.path: http://HOST:PORT, https:// or unix:PATH.",
        pattern=r"^((http|https)://[^\s/]+(/\S*)?|unix:/\S+)?$",
        expected='"", "http://HOST:PORT", "https://HOST:PORT" or "unix:PATH"',
    )
    api_key_file: str = key("", "File with the key that the server asks for; empty: it asks for none.")
    adapters_seen_at: str = key(
        "", "Folder under which the server sees cache/served of the state folder; empty: under the same path."
    )
    # llama.cpp takes 256 sequences at most, and eight are kept for finished ones.
    slots: int = key(16, "Answers decoded at the same time.", ge=1, le=248)
    context_tokens: Literal[0] | Annotated[int, Field(ge=256, le=2**20)] = key(
        0,
        "Tokens in the context of the serve worker, shared by its slots; 0: 640 a slot, 10240 at least.",
        expected="0 or a whole number >= 256 and <= 1048576",
    )
    threads: int = key(0, "CPU threads of the serve worker; 0: chosen from the machine.", ge=0, le=1024)
    max_queue: int = key(256, "Requests that may wait for a slot; more get 429.", ge=0, le=100_000, live=True)
    queue_timeout_s: float = key(
        600.0,
        "Seconds that a request may wait for a slot; then it gets 429 and is not begun. A request can ask for less.",
        gt=0,
        le=86_400,
        live=True,
    )
    default_max_tokens: int = key(512, "Tokens of an answer if the request does not say.", ge=1, le=2**20, live=True)
    ttft_inflation: float = key(
        1.3,
        "How many times as long a request may wait for its first token while training; beyond, training rests for it.",
        gt=1,
        le=100,
        live=True,
    )
    gpu_layers: int = key(
        0,
        'Blocks of the model on the GPU; -1: all of them; 0: none, or all if placement.serve_device is "cuda".',
        ge=-1,
        le=1000,
    )
    start_timeout_s: float = key(120.0, "Seconds in which the serve worker must be ready.", ge=1, le=3600)
    hang_timeout_s: float = key(30.0, "Seconds of silence after which it is killed and started again.", ge=3, le=3600)

    @property
    def pool_tokens(self) -> int:
        """Tokens that the slots share, `context_tokens` or what 0 means."""
        return self.context_tokens or max(LEAST_AUTO_TOKENS, SLOT_TOKENS * self.slots)


class ApiSection(Section):
    listen: tuple[Annotated[Listen, PlainValidator(_as_listen)], ...] = list_key(
        (), "Addresses, unix:PATH or tcp:HOST:PORT; empty: edged.sock in the state or runtime folder."
    )
    max_body_bytes: int = key(
        2**20, "Largest request body, in bytes; larger ones get 413.", ge=1024, le=BODY_BYTES_MAX, live=True
    )
    read_timeout_s: float = key(
        30.0,
        "Seconds in which a request must have arrived, and some of an answer must be taken.",
        gt=0,
        le=3600,
        live=True,
    )
    drain_s: float = key(
        7.0, "Seconds that running answers get at a stop, which takes 3 more at most.", ge=0, le=600, live=True
    )
    allowed_hosts: tuple[Annotated[str, Field(min_length=1)], ...] = list_key(
        (), "Host names that TCP requests may ask for, besides the loopback ones."
    )
