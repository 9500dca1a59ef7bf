"""What an update is: `[lora]` and `[learn]`, and which objectives learn from what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from edged.settings.keys import Section, key
from engine.protocol import OBJECTIVES, BaseWeights


class LoraSection(Section):
    """What an adapter that begins on the base is made of; a live version keeps its own (`edged.learn.profile`)."""

    rank: int = key(8, "Rank of every adapted matrix.", ge=1, le=256)
    alpha: float = key(16.0, "Scale of the adapter: its output is multiplied by alpha / rank.", gt=0, le=1024)
    layers: Literal["auto", "top_third", "all"] | Annotated[int, Field(ge=1)] = key(
        "auto",
        'Adapted blocks: "top_third", "all", how many of the topmost ones, or "auto": third on a CPU, all on a GPU.',
        expected='"auto", "top_third", "all" or a whole number >= 1',
    )


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
    enabled: bool = key(True, "Whether ratings make updates; false: only serve and record.")
    batch_ratings: int = key(16, "Newly rated answers that make an update.", ge=1, le=4096, live=True)
    max_wait_s: float = key(
        900.0, "Seconds after which a smaller batch is used, from its first rating.", ge=0, le=604_800, live=True
    )
    max_batch: int = key(64, "Rated answers in one update at most, older ones included.", ge=2, le=8192, live=True)
    replay_ratio: float = key(0.5, "Older rated answers for each new one.", ge=0, le=8, live=True)
    staleness: int = key(
        8,
        "Published versions that may lie between an answer's version and the live one for it to be trained on.",
        ge=0,
        live=True,
    )
    reference: int = key(
        0, "Version that the KL penalty pulls towards at first; 0: the base model.", ge=0, lt=2**31, live=True
    )
    reanchor_ratings: int = key(
        128,
        "Ratings of a live version, liked no less than the reference, that make it the reference; 0: never.",
        ge=0,
        live=True,
    )
    objectives: Objectives = key(
        {"ppo": 1.0},
        "What is minimised: name = weight, of " + ", ".join(OBJECTIVES) + ". Pairs feed dpo, corrections dpo and sft.",
        live=True,
    )
    dpo_beta: float = key(0.1, "Tie of DPO to the reference.", gt=0, le=10, live=True)
    kto_beta: float = key(0.1, "Tie of KTO to the reference.", gt=0, le=10, live=True)
    liked_weight: float = key(
        1.0,
        "Weight of all liked answers of a batch in KTO, however many they are.",
        ge=1e-3,
        le=1e3,
        live=True,
    )
    disliked_weight: float = key(
        1.0,
        "Weight of all disliked answers; liked : disliked is held within 1 and 4/3, as the KTO paper advises.",
        ge=1e-3,
        le=1e3,
        live=True,
    )
    learning_rate: float = key(2e-3, "Step size of the adapter.", gt=0, le=1, live=True)
    critic_learning_rate: float = key(1e-3, "Step size of the critic.", gt=0, le=1, live=True)
    epochs: int = key(2, "Passes over the batch in one update.", ge=1, le=32, live=True)
    minibatches: int = key(2, "Optimizer steps in one pass.", ge=1, le=64, live=True)
    clip_low: float = key(0.2, "How far the probability ratio may fall below 1.", gt=0, lt=1, live=True)
    clip_high: float = key(0.28, "How far the probability ratio may rise above 1.", gt=0, le=10, live=True)
    dual_clip: float = key(
        3.0, "Bound on the loss of a token of a disliked answer, in advantages.", gt=1, le=1000, live=True
    )
    value_clip: float = key(0.2, "How far a value may move in one update, in reward units.", gt=0, le=100, live=True)
    value_coef: float = key(0.5, "Weight of the critic's loss.", ge=0, le=100, live=True)
    gamma: float = key(1.0, "Discount of rewards for each token.", ge=0, le=1, live=True)
    gae_lambda: float = key(1.0, "Lambda of generalised advantage estimation.", ge=0, le=1, live=True)
    kl_coef: float = key(0.1, "Weight of the KL penalty towards the reference, per nat.", ge=0, le=100, live=True)
    kl_estimator: Literal["k1", "k2", "k3"] = key("k2", "Estimator of that KL from sampled tokens.", live=True)
    kl_in: Literal["loss", "reward"] = key(
        "loss", "Where the penalty stands; in the reward it is always k1.", live=True
    )
    kl_target: float = key(
        0.0,
        "KL to the reference that kl_coef is steered towards, in nats; 0: kl_coef stays.",
        ge=0,
        le=100,
        live=True,
    )
    entropy_coef: float = key(0.0, "Weight of the policy's entropy, per nat.", ge=0, le=10, live=True)
    live_kl_max: float = key(0.3, "KL to the live adapter that ends an update early, in nats.", gt=0, le=100, live=True)
    importance_cap: float = key(2.0, "Largest weight of an answer by an older adapter.", ge=1, le=100, live=True)
    drift_max: float = key(
        1.0,
        "Nats per token by which sampler and live adapter may differ about an older answer; beyond, it is left out.",
        gt=0,
        le=20,
        live=True,
    )
    max_grad_norm: float = key(1.0, "Gradients are scaled down to this norm.", gt=0, le=1000, live=True)
    critic: Literal["head", "lora"] = key(
        "head", "A value head on frozen features, or an adapter of its own with one.", live=True
    )
    critic_warmup_steps: int = key(30, "Critic-only steps before the first update.", ge=0, le=10_000, live=True)
    weight_decay: float = key(
        0.0, "Weight decay of the adapter, per step and unit of step size.", ge=0, le=1, live=True
    )
    dtype: Literal["auto", "bfloat16", "float32"] = key("auto", "Number format of the base model in the trainer.")
    base_weights: BaseWeights = key(
        "auto",
        'How the trainer holds the base: unpacked once, or "quantised", as in its file: smaller and slower; "auto": '
        "quantised on a GPU that unpacked weights would fill by more than half.",
    )
    fuse: bool = key(False, "Compile small operations of the trainer into fewer; for GPUs, takes seconds at its start.")
    threads: int = key(0, "CPU threads of the train worker; 0: chosen from the machine.", ge=0, le=1024)
    idle_class: bool = key(True, "Train on the CPU only in time that nothing else wants (SCHED_IDLE).")
    min_share: float = key(
        0.1,
        "Share of the time that training keeps while it slows answers down; while nobody asks it has all.",
        gt=0,
        le=1,
        live=True,
    )
    start_timeout_s: float = key(300.0, "Seconds in which the train worker must be ready.", ge=1, le=7200)
    hang_timeout_s: float = key(120.0, "Seconds of silence after which it is killed and started again.", ge=3, le=7200)
    max_attempts: int = key(3, "Tries of one update before it is put off.", ge=1, le=100, live=True)
    seed: int = key(
        0, "Seed of all updates; the same ratings and seed give the same adapter.", ge=0, lt=2**31, live=True
    )
