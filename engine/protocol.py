"""The messages between the daemon and its workers, and the rules of the link.

The daemon binds a ROUTER socket, each worker connects one DEALER. The life of a worker:

    worker -> Hello            first message; a wrong protocol version is refused by the decoder
    daemon -> StartServe | StartTrain
    worker -> Ready | Fault    Fault: the worker cannot do its role (bad model file); it exits after it
    ...    -> the role's messages below; the worker sends Beat at least every BEAT_S while its loop turns
    daemon -> Stop             the worker ends its work and exits 0

Serve role. `Generate` is answered by `Begun` and then, for each choice, `Chunk`s and one `ChoiceDone`, and at the end
one `RequestDone`; or by one `RequestFailed`, after which nothing follows. `Cancel` ends the open choices with finish
reason "cancelled". `Stage` loads an adapter into the spare context and proves it there; it is answered by `Staged` or
`StageFailed` and changes nothing for requests. `Route` sends new requests to a staged (or still resident) version and
is answered by `Routed` once the old context takes no new request; requests that run keep their adapter.

Train role. `Score` is answered by `Scored`, `Train` by `Progress`es and one `Trained` or `TrainFailed`. `Train` is a
pure function of its job folder: the same folder gives the same output bytes.

Times are seconds (`_s`) or milliseconds (`_ms`); log-probabilities are nats; token ids are the engine's own.
Log-probabilities that are unknown are None, never 0.0. This module imports the standard library and msgpack only.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from engine import wire
from engine.wire import MAX_MESSAGE_BYTES, Message, WireError, from_map, to_map

__all__ = [
    "BEAT_S",
    "MAX_MESSAGE_BYTES",
    "PROTOCOL",
    "Message",
    "WireError",
    "decode",
    "encode",
    "from_map",
    "to_map",
]

PROTOCOL = 1
BEAT_S = 1.0

# The worker finds its link in these variables of its environment.
ENV_ENDPOINT = "EDGED_LINK_ENDPOINT"
ENV_NAME = "EDGED_WORKER_NAME"
ENV_EPOCH = "EDGED_WORKER_EPOCH"

# Exit codes of a worker.
EXIT_FAULT = 3  # a Fault was sent: starting it again with the same settings will fail again
EXIT_LINK_LOST = 4  # the daemon is gone

FinishReason = Literal["stop", "length", "cancelled"]


def encode(message: Message, epoch: int) -> bytes:
    """One frame: `message` stamped with the worker's epoch (its incarnation number)."""
    return wire.encode(message, epoch, version=PROTOCOL)


def decode(data: bytes) -> tuple[int, Message]:
    """The epoch and the message of one frame. Raises WireError."""
    return wire.decode(data, _REGISTRY, version=PROTOCOL)


# ---------------------------------------------------------------------------------------------------- any worker


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    role: str
    name: str
    pid: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a serve worker found in the model file."""

    architecture: str
    n_layers: int
    n_embd: int
    n_vocab: int
    n_ctx_train_tokens: int
    eos_ids: tuple[int, ...]
    chat_template: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Message):
    """The role can work. `load_s` is from Start to here."""

    load_s: float
    model: ModelFacts | None = None  # serve role
    probes: tuple[ProbeTokens, ...] = ()  # serve role: the canary probes of Start, tokenised by the engine


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault(Message):
    """The worker cannot do its role. `code` is stable (model_unreadable, model_mismatch, out_of_memory, ...)."""

    code: str
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Beat(Message):
    """The loop of the worker turns. `busy` names the work in a word or two, "" when idle."""

    rss_bytes: int
    busy: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Message):
    """Finish and exit within `within_s`."""

    within_s: float


# --------------------------------------------------------------------------------------------------------- serve


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRef:
    """An adapter on disk. Version 0 is the base: `folder` is then None.

    `folder` is a PEFT folder that also holds `adapter.gguf` and `manifest.json`.
    """

    version: int
    folder: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProbeText:
    """A fixed canary probe: a user's turn and an assistant's answer to score."""

    user: str
    assistant: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTokens:
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartServe(Message):
    model_path: str
    adapter: AdapterRef  # served from the first request on
    slots: int  # sequences decoded at once in one context
    context_tokens: int  # KV pool of one context, shared by its slots
    threads: int
    probes: tuple[ProbeText, ...]
    gpu_layers: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    role: str
    content: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """temperature 0 is greedy; top_k 0 and top_p 1.0 cut nothing; seed None draws one."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = None  # None: up to the context's end
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0  # alternatives reported a token; only with logprobs
    logprobs: bool = False  # report token texts in the chunks; log-probabilities are always recorded


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Generate(Message):
    """Answer `messages` through the chat template, or continue `prompt` as it is: exactly one of the two."""

    request_id: str
    messages: tuple[ChatMessage, ...] | None
    prompt: str | None
    n: int
    sampling: Sampling


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Message):
    request_id: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Begun(Message):
    """The request runs on adapter `version`, to its end."""

    request_id: str
    version: int
    prompt_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprob:
    id: int
    text: str
    bytes: tuple[int, ...]
    logprob: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token as OpenAI's `logprobs.content` shows it: raw log-softmax at temperature 1."""

    id: int
    text: str
    bytes: tuple[int, ...]
    logprob: float
    top: tuple[TopLogprob, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk(Message):
    """New text of a choice; never half a character, never part of a stop string. `text` may be ""."""

    request_id: str
    choice: int
    text: str
    tokens: tuple[TokenLogprob, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDone(Message):
    """One finished choice: the record that learning needs.

    completion_ids: every sampled token in order, a sampled end-of-sequence token included.
    logprobs: of each of them under the distribution it was sampled from; None where unknown.
    raw_logprobs: of each of them under the full softmax at temperature 1.
    text: the whole text that the chunks carried.
    seed: the seed that was used.
    """

    request_id: str
    choice: int
    finish_reason: FinishReason
    completion_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    raw_logprobs: tuple[float | None, ...]
    text: str
    seed: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestDone(Message):
    request_id: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed(Message):
    """`code` is stable: context_length_exceeded, bad_template, bad_prompt, engine_error."""

    request_id: str
    code: str
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stage(Message):
    """Load `adapter` into the spare context and prove it there: canary log-probabilities of the start's probes, and
    one sampled answer (`fluency_tokens` at most, temperature 0.7, seeded) to each of `fluency_prompts`."""

    job_id: str
    adapter: AdapterRef
    fluency_prompts: tuple[str, ...]
    fluency_tokens: int
    seed: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Staged(Message):
    """The adapter stands in the spare context.

    canary: per probe, the raw log-probability of each completion token under the staged adapter.
    live_canary: the same under the version that was live when it was staged.
    fluency: per prompt, the sampled answer.
    longest_gap_ms: the longest time in which no decode step of a running request ran because of staging (0 if idle).
    """

    job_id: str
    version: int
    canary: tuple[tuple[float, ...], ...]
    live_canary: tuple[tuple[float, ...], ...]
    fluency: tuple[ProbeTokens, ...]
    fluency_texts: tuple[str, ...]
    load_ms: float
    prove_ms: float
    longest_gap_ms: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageFailed(Message):
    """`code`: adapter_unreadable, adapter_mismatch, not_finite, engine_error. The spare context is clean again."""

    job_id: str
    version: int
    code: str
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Route(Message):
    """Send new requests to `version`, which must be staged or resident in the other context."""

    job_id: str
    version: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Routed(Message):
    """New requests run on `version`. `swap_ms`: time in which no decode step ran because of the routing."""

    job_id: str
    version: int
    swap_ms: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouteFailed(Message):
    """`version` is neither staged nor resident; the live version has not changed."""

    job_id: str
    version: int
    message: str


# --------------------------------------------------------------------------------------------------------- train


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """rank, alpha: of every adapted matrix. layers: how many of the topmost blocks are adapted (0: all)."""

    rank: int
    alpha: float
    layers: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartTrain(Message):
    """base_sha256: of the model file; the dequantised copy is cached in `cache_folder` under it."""

    model_path: str
    base_sha256: str
    cache_folder: str
    lora: LoraSettings
    threads: int
    dtype: Literal["bfloat16", "float32"]
    device: str  # "cpu" or "cuda:0"
    idle_class: bool  # run under SCHED_IDLE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTokens:
    """What the trainer sees of an episode. `adapter` is the one that sampled it."""

    episode_id: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    temperature: float
    adapter: AdapterRef


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Score(Message):
    """Compute trunk features, old and reference log-probabilities of these episodes, and keep them at hand."""

    job_id: str
    episodes: tuple[EpisodeTokens, ...]
    reference: AdapterRef


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeScore:
    """reference_logprob: mean over the non-EOS completion tokens, at temperature 1; None for an empty answer.
    kl: mean over the completion tokens of log pi(sampling adapter) - log pi(reference), both at temperature 1.
    engine_gap: mean |trainer's logprob - engine's logprob| at the sampling temperature; None if unknown."""

    episode_id: int
    n_tokens: int
    reference_logprob: float | None
    kl: float
    engine_gap: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scored(Message):
    job_id: str
    scores: tuple[EpisodeScore, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PpoSettings:
    """Hyper-parameters of one update. Names follow the papers (PPO: arXiv 1707.06347, GAE: 1506.02438).

    kl_coef: weight of the k3 estimate of KL(new || reference) in the loss.
    live_kl_max: an epoch stops once the mean KL of new against the parent adapter passes it; the gate judges the same.
    importance_cap: truncation of pi_old / pi_behaviour (decoupled PPO).
    """

    learning_rate: float
    critic_learning_rate: float
    epochs: int
    minibatches: int
    clip_low: float
    clip_high: float
    value_clip: float
    value_coef: float
    gamma: float
    gae_lambda: float
    kl_coef: float
    live_kl_max: float
    importance_cap: float
    max_grad_norm: float
    critic_warmup_steps: int
    weight_decay: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RatedEpisode:
    """reward: in [-1, 1]. replay: rated before, already used by an earlier update."""

    episode: EpisodeTokens
    reward: float
    replay: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """Everything an update depends on. It is written to `job.msgpack` in the job folder before training starts.

    parent: the adapter that the update starts from. checkpoint: folder with critic and optimizer state, or None for
    fresh state. probes: the canary probes, to be scored under the parent and under the result.
    """

    job_id: str
    version: int
    parent: AdapterRef
    reference: AdapterRef
    checkpoint: str | None
    episodes: tuple[RatedEpisode, ...]
    probes: tuple[ProbeTokens, ...]
    ppo: PpoSettings
    lora: LoraSettings
    seed: int
    threads: int
    base_sha256: str
    created_at: float = 0.0  # Unix seconds; goes into the manifest, so that a replay gives the same bytes


JOB_FILE = "job.msgpack"
OUT_FOLDER = "out"  # holds adapter/ (a complete adapter folder), checkpoint/ and result.msgpack; appears by rename
RESULT_FILE = "result.msgpack"  # a TrainResult


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """metrics: finite floats by the field's names (`ppo/approx_kl`, `ppo/clip_frac`, `critic/explained_variance`,
    `kl/live`, `kl/reference`, `lora/norm`, ...). seconds: by stage. dropped: reason -> episodes left out.
    canary, parent_canary: per probe, log-probabilities under the result and under the parent."""

    job_id: str
    version: int
    metrics: dict[str, float]
    seconds: dict[str, float]
    dropped: dict[str, int]
    canary: tuple[tuple[float, ...], ...]
    parent_canary: tuple[tuple[float, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Train(Message):
    """Run the job in `folder` (holds job.msgpack). The rename of out.tmp to out is the only sign of success."""

    job_id: str
    folder: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Message):
    job_id: str
    stage: str
    done: int
    total: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trained(Message):
    job_id: str
    result: TrainResult


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainFailed(Message):
    """`code`: batch_empty, not_finite, adapter_mismatch, out_of_memory, bad_job, engine_error. Nothing was written."""

    job_id: str
    code: str
    message: str
    details: dict[str, Any] = dataclasses.field(default_factory=dict)


_REGISTRY: dict[str, type[Message]] = {
    cls.__name__: cls
    for cls in (
        Hello, Ready, Fault, Beat, Stop,
        StartServe, Generate, Cancel, Begun, Chunk, ChoiceDone, RequestDone, RequestFailed,
        Stage, Staged, StageFailed, Route, Routed, RouteFailed,
        StartTrain, Score, Scored, Train, Progress, Trained, TrainFailed,
    )
}  # fmt: skip
