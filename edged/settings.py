"""The settings of the daemon as frozen models: every key of the TOML file with its default, range, unit and meaning.

One class a `[section]`; each part of the daemon receives its own section. The descriptions are the comments of
`deploy/edged.toml`. A key marked `live` takes effect on SIGHUP, every other key at the next start. Reading the file and
wording its mistakes is the work of `edged.config`. Nothing here looks at the machine: whether a path exists or a port
is free is found out by who uses it.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator

from edged.addresses import Listen, TcpListen, UnixListen, parse_listen
from engine.protocol import OBJECTIVES, BaseWeights


def _as_listen(value: object) -> Listen:
    if isinstance(value, UnixListen | TcpListen):
        return value
    return parse_listen(value if isinstance(value, str) else "")


def _key(default: Any, description: str, *, live: bool = False, expected: str | None = None, **limits: Any) -> Any:
    """A key of the file. `expected` replaces the wording made from type and limits in error messages."""
    return Field(default, description=description, json_schema_extra={"live": live, "expected": expected}, **limits)


def _list_key(default: tuple[Any, ...], description: str, **options: Any) -> Any:
    # TOML has lists and frozen models want tuples: only the container is taken leniently, its items stay strict.
    return _key(default, description, strict=False, **options)


class Section(BaseModel):
    """One `[section]`: frozen, strict about types, and closed to unknown keys."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )


class ModelSection(Section):
    path: str = _key("smollm2-135m", "Model: a packaged name or a .gguf file.", min_length=1)
    name: str = _key("", "Public name in /v1/models; empty: made from the path.", max_length=200)


class LoraSection(Section):
    """What an adapter that begins on the base is made of; a live version keeps its own (`edged.learn.profile`)."""

    rank: int = _key(8, "Rank of every adapted matrix.", ge=1, le=256)
    alpha: float = _key(16.0, "Scale of the adapter: its output is multiplied by alpha / rank.", gt=0, le=1024)
    layers: Literal["auto", "top_third", "all"] | Annotated[int, Field(ge=1)] = _key(
        "auto",
        'Adapted blocks: "top_third", "all", how many of the topmost ones, or "auto": third on a CPU, all on a GPU.',
        expected='"auto", "top_third", "all" or a whole number >= 1',
    )


class ServeSection(Section):
    slots: int = _key(16, "Answers decoded at the same time.", ge=1, le=256)
    context_tokens: int = _key(
        10240, "Tokens in the context of the serve worker, shared by its slots.", ge=256, le=2**20
    )
    threads: int = _key(0, "CPU threads of the serve worker; 0: chosen from the machine.", ge=0, le=1024)
    max_queue: int = _key(256, "Requests that may wait for a slot; more get 429.", ge=0, le=100_000, live=True)
    default_max_tokens: int = _key(512, "Tokens of an answer if the request does not say.", ge=1, le=2**20, live=True)
    gpu_layers: int = _key(
        0,
        'Blocks of the model on the GPU; -1: all of them; 0: none, or all if placement.serve_device is "cuda".',
        ge=-1,
        le=1000,
    )
    start_timeout_s: float = _key(120.0, "Seconds in which the serve worker must be ready.", ge=1, le=3600)
    hang_timeout_s: float = _key(30.0, "Seconds of silence after which it is killed and started again.", ge=3, le=3600)


def parse_objectives(value: Any) -> dict[str, float]:
    """Objective -> weight. Raises ValueError with what is expected."""
    if not isinstance(value, dict) or not value:
        raise ValueError(f"a table of name = weight with one or more of {', '.join(OBJECTIVES)}")
    for name, weight in value.items():
        if name not in OBJECTIVES:
            raise ValueError(f"objectives out of {', '.join(OBJECTIVES)}, not {name!r}")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0.0 < weight <= 1000.0:
            raise ValueError(f"a weight above 0 and up to 1000 for {name}")
    return {name: float(weight) for name, weight in value.items()}


# The objectives that learn from answers which a judge rewarded, without a person's words.
JUDGED = tuple(name for name, feed in OBJECTIVES.items() if feed in ("rated", "groups", "thumbs"))


def learns_from_judged(objectives: Mapping[str, float]) -> bool:
    """Whether one of them is in JUDGED."""
    return bool(objectives.keys() & set(JUDGED))


Objectives = Annotated[dict[str, float], PlainValidator(parse_objectives)]


class LearnSection(Section):
    enabled: bool = _key(True, "Whether ratings make updates; false: only serve and record.")
    batch_ratings: int = _key(16, "Newly rated answers that make an update.", ge=1, le=4096, live=True)
    max_wait_s: float = _key(
        900.0, "Seconds after which a smaller batch is used, from its first rating.", ge=0, le=604_800, live=True
    )
    max_batch: int = _key(64, "Rated answers in one update at most, older ones included.", ge=2, le=8192, live=True)
    replay_ratio: float = _key(0.5, "Older rated answers for each new one.", ge=0, le=8, live=True)
    staleness: int = _key(8, "Versions that an answer may lie behind the live one to be trained on.", ge=0, live=True)
    reference: int = _key(
        0, "Version that the KL penalty pulls towards at first; 0: the base model.", ge=0, lt=2**31, live=True
    )
    reanchor_ratings: int = _key(
        128,
        "Ratings of a live version, liked no less than the reference, that make it the reference; 0: never.",
        ge=0,
        live=True,
    )
    objectives: Objectives = _key(
        {"ppo": 1.0},
        "What is minimised: name = weight, of " + ", ".join(OBJECTIVES) + ". Pairs feed dpo, corrections dpo and sft.",
        live=True,
    )
    dpo_beta: float = _key(0.1, "Tie of DPO to the reference.", gt=0, le=10, live=True)
    kto_beta: float = _key(0.1, "Tie of KTO to the reference.", gt=0, le=10, live=True)
    liked_weight: float = _key(
        1.0,
        "Weight of all liked answers of a batch in KTO, however many they are.",
        ge=1e-3,
        le=1e3,
        live=True,
    )
    disliked_weight: float = _key(
        1.0,
        "Weight of all disliked answers; liked : disliked is held within 1 and 4/3, as the KTO paper advises.",
        ge=1e-3,
        le=1e3,
        live=True,
    )
    learning_rate: float = _key(2e-3, "Step size of the adapter.", gt=0, le=1, live=True)
    critic_learning_rate: float = _key(1e-3, "Step size of the critic.", gt=0, le=1, live=True)
    epochs: int = _key(2, "Passes over the batch in one update.", ge=1, le=32, live=True)
    minibatches: int = _key(2, "Optimizer steps in one pass.", ge=1, le=64, live=True)
    clip_low: float = _key(0.2, "How far the probability ratio may fall below 1.", gt=0, lt=1, live=True)
    clip_high: float = _key(0.28, "How far the probability ratio may rise above 1.", gt=0, le=10, live=True)
    dual_clip: float = _key(
        3.0, "Bound on the loss of a token of a disliked answer, in advantages.", gt=1, le=1000, live=True
    )
    value_clip: float = _key(0.2, "How far a value may move in one update, in reward units.", gt=0, le=100, live=True)
    value_coef: float = _key(0.5, "Weight of the critic's loss.", ge=0, le=100, live=True)
    gamma: float = _key(1.0, "Discount of rewards for each token.", ge=0, le=1, live=True)
    gae_lambda: float = _key(1.0, "Lambda of generalised advantage estimation.", ge=0, le=1, live=True)
    kl_coef: float = _key(0.1, "Weight of the KL penalty towards the reference, per nat.", ge=0, le=100, live=True)
    kl_estimator: Literal["k1", "k2", "k3"] = _key("k2", "Estimator of that KL from sampled tokens.", live=True)
    kl_in: Literal["loss", "reward"] = _key(
        "loss", "Where the penalty stands; in the reward it is always k1.", live=True
    )
    kl_target: float = _key(
        0.0, "KL to the reference that kl_coef is steered towards, in nats; 0: kl_coef stays.", ge=0, le=100, live=True
    )
    entropy_coef: float = _key(0.0, "Weight of the policy's entropy, per nat.", ge=0, le=10, live=True)
    live_kl_max: float = _key(
        0.3, "KL to the live adapter that ends an update early, in nats.", gt=0, le=100, live=True
    )
    importance_cap: float = _key(2.0, "Largest weight of an answer by an older adapter.", ge=1, le=100, live=True)
    drift_max: float = _key(
        1.0,
        "Nats per token by which sampler and live adapter may differ about an older answer; beyond, it is left out.",
        gt=0,
        le=20,
        live=True,
    )
    max_grad_norm: float = _key(1.0, "Gradients are scaled down to this norm.", gt=0, le=1000, live=True)
    critic: Literal["head", "lora"] = _key(
        "head", "A value head on frozen features, or an adapter of its own with one.", live=True
    )
    critic_warmup_steps: int = _key(30, "Critic-only steps before the first update.", ge=0, le=10_000, live=True)
    weight_decay: float = _key(
        0.0, "Weight decay of the adapter, per step and unit of step size.", ge=0, le=1, live=True
    )
    dtype: Literal["auto", "bfloat16", "float32"] = _key("auto", "Number format of the base model in the trainer.")
    base_weights: BaseWeights = _key(
        "auto",
        'How the trainer holds the base: unpacked once, or "quantised", as in its file: smaller and slower; "auto": '
        "quantised on a GPU that unpacked weights would fill by more than half.",
    )
    fuse: bool = _key(
        False, "Compile small operations of the trainer into fewer; for GPUs, takes seconds at its start."
    )
    threads: int = _key(0, "CPU threads of the train worker; 0: chosen from the machine.", ge=0, le=1024)
    idle_class: bool = _key(True, "Train on the CPU only in time that nothing else wants (SCHED_IDLE).")
    min_share: float = _key(
        0.1,
        "Share of the time that training keeps while it slows answers down; while nobody asks it has all.",
        gt=0,
        le=1,
        live=True,
    )
    start_timeout_s: float = _key(300.0, "Seconds in which the train worker must be ready.", ge=1, le=7200)
    hang_timeout_s: float = _key(120.0, "Seconds of silence after which it is killed and started again.", ge=3, le=7200)
    max_attempts: int = _key(3, "Tries of one update before it counts as failed.", ge=1, le=100, live=True)
    seed: int = _key(
        0, "Seed of all updates; the same ratings and seed give the same adapter.", ge=0, lt=2**31, live=True
    )


def _as_web_address(value: str) -> str:
    if value == "":
        return value
    try:
        parts = urllib.parse.urlsplit(value)
        reachable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an IPv6 address without its end, a port beyond 65535
        reachable = False
    if not reachable or re.search(r"\s", value):
        raise ValueError("an address that begins with http:// or https://")
    return value


class RewardSection(Section):
    clip: float = _key(1.0, "Rewards are cut to plus or minus this, in rating units.", gt=0, le=100, live=True)
    source: Literal["feedback", "function", "http", "classifier", "fitted"] = _key(
        "feedback",
        'Judge of answers that nobody has rated; "feedback": none. With one the box practises while it is idle.',
    )
    function: str = _key(
        "",
        "The function, as module:function; it takes a list of answers and gives a number or None for each.",
        pattern=r"^$|^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$",
        expected="module:function",
    )
    function_folder: str = _key("", "Folder that its module lies in; empty: it is installed beside edged.")
    url: Annotated[str, AfterValidator(_as_web_address)] = _key(
        "",
        "Address of the reward service, http:// or https://.",
        expected="an address that begins with http:// or https://",
    )
    classifier: str = _key("", "Folder of the classifier: a transformers sequence classifier with its tokenizer.")
    classifier_label: str = _key(
        "", "Label whose probability is the reward; empty: the only output, or the second of two."
    )
    classifier_reads: Literal["conversation", "answer"] = _key(
        "conversation", "What the classifier is shown: the conversation with the answer, or the answer alone."
    )
    fitted_ratings_min: int = _key(
        32, "Rated answers from which on the fitted model may be used.", ge=10, le=1_000_000, live=True
    )
    fitted_accuracy_min: float = _key(
        0.65,
        "Share of held-out pairs that it must put in the right order to be used; 0.5 is chance.",
        ge=0.5,
        lt=1,
        live=True,
    )
    batch: int = _key(16, "Answers that the judge is asked about at once.", ge=1, le=1024, live=True)
    timeout_s: float = _key(
        30.0, "Seconds for such a batch; a judge that takes longer is killed.", ge=0.1, le=3600, live=True
    )
    start_timeout_s: float = _key(120.0, "Seconds in which the judge must be ready.", ge=1, le=3600)


class PracticeSection(Section):
    """What the box does while nobody needs it, if `[reward] source` names a judge."""

    idle_s: float = _key(
        30.0, "Seconds without a request or an update after which it begins.", ge=0, le=86_400, live=True
    )
    round_prompts: int = _key(4, "Different prompts that a round answers.", ge=1, le=1024, live=True)
    group_size: int = _key(4, "Answers to each of them, which are compared.", ge=2, le=64, live=True)
    max_tokens: int = _key(128, "Tokens of such an answer at most.", ge=1, le=2**20, live=True)
    max_updates: int = _key(
        8,
        "Practice updates in a row without a rating by a person; then it waits for one.",
        ge=1,
        le=1_000_000,
        live=True,
    )
    prompts_file: str = _key(
        "", "Prompts, one a line, besides those of users' latest requests; empty: none.", live=True
    )


_FLUENCY_PROMPTS = (
    "What can I cook with eggs and potatoes?",
    "How do I remove a coffee stain from a shirt?",
    "Why is the sky blue?",
    "Write a short note to thank a neighbour for watering my plants.",
    "What should I pack for a weekend by the sea?",
    "How does a bicycle stay upright?",
    "Give me an idea for a birthday present for my sister.",
    "What is a good way to fall asleep faster?",
)


class GateSection(Section):
    norm_max: float = _key(100.0, "Largest norm of the whole adapter (scaled B A, Frobenius).", gt=0, live=True)
    live_kl_max: float = _key(0.5, "Largest mean KL to the live adapter, in nats per token.", gt=0, le=100, live=True)
    canary_gap_max: float = _key(
        0.25, "Largest mean gap between trainer and server on the canary, in nats per token.", gt=0, le=100, live=True
    )
    fluency_drop: float = _key(
        0.8, "Nats per token that probe answers may lose under the base, against the live adapter.", gt=0, live=True
    )
    fluency_floor: float = _key(
        1.5, "Nats per token that probe answers may lose under the base, against the base itself.", gt=0, live=True
    )
    distinct_drop: float = _key(
        0.4,
        "Share of distinct token pairs that probe answers may lose, against the live adapter.",
        gt=0,
        le=1,
        live=True,
    )
    fluency_prompts: tuple[Annotated[str, Field(min_length=1)], ...] = _list_key(
        _FLUENCY_PROMPTS, "Questions that every candidate answers before it is served.", live=True, min_length=1
    )
    fluency_tokens: int = _key(24, "Tokens of each probe answer at most.", ge=4, le=512, live=True)


_DEVICE = r"^(auto|cpu|cuda(:\d{1,2})?)$"
_DEVICE_EXPECTED = '"auto", "cpu", "cuda" or "cuda:N"'


def _pins(description: str) -> Any:
    return _list_key((), description, expected="a list of device numbers, as in [0, 1]")


DeviceNumber = Annotated[int, Field(ge=0, le=63)]


class PlacementSection(Section):
    serve_device: str = _key(
        "auto",
        'Device that serves; "auto": the CPU, but for the blocks that serve.gpu_layers puts on the GPU.',
        pattern=_DEVICE,
        expected=_DEVICE_EXPECTED,
    )
    train_device: str = _key(
        "auto",
        'Device that trains; "auto": the first NVIDIA GPU if its driver is there, else the CPU.',
        pattern=_DEVICE,
        expected=_DEVICE_EXPECTED,
    )
    serve: tuple[DeviceNumber, ...] = _pins(
        "Device that serves, by the number that `edged doctor` lists; empty: chosen."
    )
    actor: tuple[DeviceNumber, ...] = _pins("Devices that train the actor, by number; empty: chosen.")
    critic: tuple[DeviceNumber, ...] = _pins("Devices that train the critic, by number; empty: chosen.")
    reference: tuple[DeviceNumber, ...] = _pins("Devices of the reference, by number; empty: where the critic is.")
    reward: tuple[DeviceNumber, ...] = _pins("Device of the reward source, by number; empty: where the actor is.")
    cpu_devices: int = _key(
        1,
        "Devices that the CPU counts as; above 1 as many processes share an update, and the threads.",
        ge=1,
        le=4,
    )


class ApiSection(Section):
    listen: tuple[Annotated[Listen, PlainValidator(_as_listen)], ...] = _list_key(
        (), "Addresses, unix:PATH or tcp:HOST:PORT; empty: edged.sock in the state or runtime folder."
    )
    max_body_bytes: int = _key(
        2**20, "Largest request body, in bytes; larger ones get 413.", ge=1024, le=2**30, live=True
    )
    read_timeout_s: float = _key(30.0, "Seconds in which a request must have arrived.", gt=0, le=3600, live=True)
    drain_s: float = _key(
        7.0, "Seconds that running answers get at a stop, which takes 3 more at most.", ge=0, le=600, live=True
    )
    allowed_hosts: tuple[Annotated[str, Field(min_length=1)], ...] = _list_key(
        (), "Host names that TCP requests may ask for, besides the loopback ones."
    )


class StoreSection(Section):
    readers: int = _key(2, "Connections, and threads, that read the database.", ge=1, le=32)


class LogSection(Section):
    level: Literal["debug", "info", "warning", "error"] = _key(
        "info", "Least level that is logged; a worker takes a change at its next start.", live=True
    )
    format: Literal["text", "json"] = _key("text", "One line of text or one JSON object for each entry.")


class Settings(Section):
    """The whole file."""

    model: ModelSection = ModelSection()
    lora: LoraSection = LoraSection()
    serve: ServeSection = ServeSection()
    learn: LearnSection = LearnSection()
    reward: RewardSection = RewardSection()
    practice: PracticeSection = PracticeSection()
    gate: GateSection = GateSection()
    placement: PlacementSection = PlacementSection()
    api: ApiSection = ApiSection()
    store: StoreSection = StoreSection()
    log: LogSection = LogSection()
