"""The messages of the train role, and the job and result that pass as files.

`Score` is answered by `Scored`, `Train` by `Progress`es and one `Trained` or `TrainFailed`. `Train` is a pure function
of its job folder: the same folder gives the same output bytes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from engine.protocol.nouns import AdapterRef, ProbeTokens
from engine.wire import Message

Feed = Literal["rated", "groups", "thumbs", "pairs", "corrections"]

# Objective -> what it feeds on: single rated answers, rated answers in groups to one prompt, answers that are merely
# liked or disliked, preferred pairs, or answers written by a person. A new objective is a module of this name in
# engine/train/objectives and a line here.
OBJECTIVES: dict[str, Feed] = {
    "ppo": "rated",
    "reinforce_pp": "rated",
    "grpo": "groups",
    "rloo": "groups",
    "kto": "thumbs",
    "dpo": "pairs",
    "sft": "corrections",
}

KlEstimator = Literal["k1", "k2", "k3"]
TrainRole = Literal["actor", "critic", "reference"]
TrainMode = Literal["timeslice", "split", "data_parallel", "sharded"]

MICRO_BATCH_TOKENS = 640  # large enough that products of a small model are efficient


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """rank, alpha: of every adapted matrix. layers: how many of the topmost blocks are adapted (0: all)."""

    rank: int
    alpha: float
    layers: int


BaseWeights = Literal["auto", "dequantised", "quantised"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan:
    """Which process does what part of an update, and how much goes through the network at once.

    A rank is a process; rank 0 is the train worker, and starts the others. `actor`, `critic` and `reference` are the
    ranks of each role; rank 0 is the first of the actor's.

    devices: of each rank, as torch names them, the same one several times if it is to be shared; () for the train
        worker alone on the device that it was started with.
    threads: of each rank; 0: those of the job.
    micro_batch_tokens: most tokens, prompts included, that go through the network together on one rank; an answer is
        never cut.
    halvings: how often micro_batch_tokens has been halved because memory ran out.
    """

    mode: TrainMode = "timeslice"
    devices: tuple[str, ...] = ()
    actor: tuple[int, ...] = (0,)
    critic: tuple[int, ...] = (0,)
    reference: tuple[int, ...] = (0,)
    threads: int = 0
    micro_batch_tokens: int = MICRO_BATCH_TOKENS
    halvings: int = 0

    def of(self, role: TrainRole) -> tuple[int, ...]:
        """Ranks of `role`."""
        ranks: tuple[int, ...] = getattr(self, role)
        return ranks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartTrain(Message):
    """base_sha256: of the model file; the dequantised copy is cached in `cache_folder` under it.

    base_weights: unpacked once, or the file's own blocks; "auto" by the device's memory. No result depends on it.
    fuse: compile small operations, see `engine.fusion`.
    plan: what episodes are scored under until a job brings another.
    """

    model_path: str
    base_sha256: str
    cache_folder: str
    lora: LoraSettings
    threads: int
    dtype: Literal["bfloat16", "float32"]
    device: str  # "cpu" or "cuda:0"
    idle_class: bool  # run under SCHED_IDLE
    base_weights: BaseWeights = "auto"
    fuse: bool = False
    plan: TrainPlan = TrainPlan()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTokens:
    """What the trainer sees of an episode. `adapter` is the one that sampled it.

    An answer that a person wrote is one too, with a negative id, no logprobs, temperature 1 and the base as adapter.
    """

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
    engine_gap: mean |trainer's logprob - engine's logprob| at the sampling temperature; None if unknown. engine_bias:
    the same with its sign."""

    episode_id: int
    n_tokens: int
    reference_logprob: float | None
    kl: float
    engine_gap: float | None
    engine_bias: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scored(Message):
    job_id: str
    scores: tuple[EpisodeScore, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PpoSettings:
    """Hyper-parameters of one update. Names follow the papers (PPO: arXiv 1707.06347, GAE: 1506.02438).

    kl_coef: weight of the estimate of KL(new || reference). kl_in: whether it stands in the loss or, of the parent, in
        the rewards. kl_target: mean KL that an adaptive controller steers that weight towards (arXiv 1909.08593, 2.2);
        it begins at kl_coef, and anew when that is set to another value
    entropy_coef: weight of the policy's entropy in the objective.
    dual_clip: bound on the loss of a token with negative advantage, in advantages; above 1.
    critic: "head" is a value head on frozen features; "lora" a second adapter with a value head.
    live_kl_max: an epoch stops once the mean KL(parent || new) passes it; the gate judges the same.
    importance_cap: truncation of pi_old / pi_behaviour (decoupled PPO). drift_max: how far the mean of its logarithm
        over a whole answer by an older version may be from 0 (`engine.train.sequence_filter`).
    """

    learning_rate: float = 2e-3
    critic_learning_rate: float = 1e-3
    epochs: int = 2
    minibatches: int = 2
    clip_low: float = 0.2
    clip_high: float = 0.28
    value_clip: float = 0.2
    value_coef: float = 0.5
    gamma: float = 1.0
    gae_lambda: float = 1.0
    kl_coef: float = 0.1
    live_kl_max: float = 0.3
    importance_cap: float = 2.0
    drift_max: float = 1.0
    max_grad_norm: float = 1.0
    critic_warmup_steps: int = 30
    weight_decay: float = 0.0
    kl_estimator: KlEstimator = "k2"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_target: float = 0.0
    entropy_coef: float = 0.0
    dual_clip: float = 3.0
    critic: Literal["head", "lora"] = "head"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineNoise:
    """What rounding leaves between the trainer's and the server's log-probabilities of sampled tokens under the same
    weights, in nats, as measured on answers of the base.

    bias: mean of log(trainer / server) a token. spread: standard deviation of an answer's mean, times the root of its
    tokens. tokens: of an answer that was measured, on average. temperature: that they were sampled at.
    """

    bias: float
    spread: float
    tokens: float
    temperature: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceSettings:
    """Hyper-parameters of DPO (arXiv 2305.18290), KTO (2402.01306) and the likelihood of corrections.

    dpo_beta, kto_beta: strength of the tie to the reference. liked_weight, disliked_weight: KTO's lambda_D, lambda_U
    for a batch with as many of each; they are balanced by the counts.
    """

    dpo_beta: float = 0.1
    kto_beta: float = 0.1
    liked_weight: float = 1.0
    disliked_weight: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RatedEpisode:
    """reward: in [-1, 1]. replay: rated before, already used by an earlier update.

    group: answers to one prompt by one version share it; "" where there is no other answer to compare with.
    """

    episode: EpisodeTokens
    reward: float
    replay: bool
    group: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PreferredPair:
    """Two answers to one prompt, of which a person preferred `chosen`."""

    chosen: EpisodeTokens
    rejected: EpisodeTokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """Everything an update depends on. It is written to `job.msgpack` in the job folder before training starts.

    parent: the adapter that the update starts from. checkpoint: folder with critic and optimizer state, or None for
    fresh state. probes: the canary probes, to be scored under the parent and under the result.
    objectives: name -> weight; each trains on those of `episodes`, `pairs` and `corrections` that it feeds on.
    noise: between trainer and server on this base; None if it was not measured.
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
    objectives: dict[str, float] = dataclasses.field(default_factory=lambda: {"ppo": 1.0})
    pairs: tuple[PreferredPair, ...] = ()
    corrections: tuple[EpisodeTokens, ...] = ()
    preference: PreferenceSettings = PreferenceSettings()
    noise: EngineNoise | None = None
    plan: TrainPlan = TrainPlan()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pace(Message):
    """Take at most `share` of the time from now on, in (0, 1], by resting between pieces of work. A worker starts with
    1. There is no answer."""

    share: float


JOB_FILE = "job.msgpack"
OUT_FOLDER = "out"  # holds adapter/ (a complete adapter folder), checkpoint/ and result.msgpack; appears by rename
RESULT_FILE = "result.msgpack"  # a TrainResult


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """metrics: finite floats by the field's names (`ppo/approx_kl`, `ppo/clip_frac`, `critic/explained_variance`,
    `kl/live`, `kl/reference`, `lora/norm`, ...). seconds: by stage; they add up to the job's time. dropped: reason ->
    episodes left out. canary, parent_canary: per probe, log-probabilities under the result and under the parent.
    usage: what computing it took, which like seconds differs from run to run: `busy/cores` and `busy/lanes` (shares of
    the time), `bytes/between_ranks`, `ahead/score_s` (seconds that scoring its answers ahead has taken), `tokens/all`
    (of all its answers, prompts included).
    """

    job_id: str
    version: int
    metrics: dict[str, float]
    seconds: dict[str, float]
    dropped: dict[str, int]
    canary: tuple[tuple[float, ...], ...]
    parent_canary: tuple[tuple[float, ...], ...]
    usage: dict[str, float] = dataclasses.field(default_factory=dict)


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
    """`code`: batch_empty, not_finite, adapter_mismatch, out_of_memory, rank_lost (another process of the update died
    or hung), bad_job, engine_error. Nothing was written."""

    job_id: str
    code: str
    message: str
    details: dict[str, Any] = dataclasses.field(default_factory=dict)
