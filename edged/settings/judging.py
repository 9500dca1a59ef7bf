"""Who judges answers and adapters: `[reward]`, `[practice]` and `[gate]`."""

from __future__ import annotations

import re
import urllib.parse
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from edged.settings.keys import Section, key, list_key


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
    clip: float = key(
        1.0,
        "Rewards are cut to plus or minus this, in rating units; ratings that are equal then wait for contrast.",
        gt=0,
        le=100,
        live=True,
    )
    source: Literal["feedback", "function", "http", "classifier", "fitted"] = key(
        "feedback",
        'Judge of answers that nobody has rated; "feedback": none. With one the box practises while it is idle.',
    )
    function: str = key(
        "",
        "The function, as module:function; it takes a list of answers and gives a number or None for each.",
        pattern=r"^$|^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$",
        expected="module:function",
    )
    function_folder: str = key("", "Folder that its module lies in; empty: it is installed beside edged.")
    url: Annotated[str, AfterValidator(_as_web_address)] = key(
        "",
        "Address of the reward service, http:// or https://.",
        expected="an address that begins with http:// or https://",
    )
    classifier: str = key("", "Folder of the classifier: a transformers sequence classifier with its tokenizer.")
    classifier_label: str = key(
        "", "Label whose probability is the reward; empty: the only output, or the second of two."
    )
    classifier_reads: Literal["conversation", "answer"] = key(
        "conversation", "What the classifier is shown: the conversation with the answer, or the answer alone."
    )
    fitted_ratings_min: int = key(
        32, "Rated answers from which on the fitted model may be used.", ge=10, le=1_000_000, live=True
    )
    fitted_accuracy_min: float = key(
        0.65,
        "Share of held-out pairs that it must put in the right order to be used; 0.5 is chance.",
        ge=0.5,
        lt=1,
        live=True,
    )
    batch: int = key(16, "Answers that the judge is asked about at once.", ge=1, le=1024, live=True)
    timeout_s: float = key(
        30.0, "Seconds for such a batch; a judge that takes longer is killed.", ge=0.1, le=3600, live=True
    )
    start_timeout_s: float = key(120.0, "Seconds in which the judge must be ready.", ge=1, le=3600)


class PracticeSection(Section):
    """What the box does while nobody needs it, if `[reward] source` names a judge."""

    idle_s: float = key(
        30.0, "Seconds without a request or an update after which it begins.", ge=0, le=86_400, live=True
    )
    round_prompts: int = key(4, "Different prompts that a round answers.", ge=1, le=1024, live=True)
    group_size: int = key(4, "Answers to each of them, which are compared.", ge=2, le=64, live=True)
    max_tokens: int = key(128, "Tokens of such an answer at most.", ge=1, le=2**20, live=True)
    max_updates: int = key(
        8,
        "Practice updates in a row without a rating by a person; then it waits for one.",
        ge=1,
        le=1_000_000,
        live=True,
    )
    prompts_file: str = key("", "Prompts, one a line, besides those of users' latest requests; empty: none.", live=True)


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
    norm_max: float = key(100.0, "Largest norm of the whole adapter (scaled B A, Frobenius).", gt=0, live=True)
    live_kl_max: float = key(0.5, "Largest mean KL to the live adapter, in nats per token.", gt=0, le=100, live=True)
    canary_gap_max: float = key(
        0.25, "Largest mean gap between trainer and server on the canary, in nats per token.", gt=0, le=100, live=True
    )
    fluency_drop: float = key(
        0.8, "Nats per token that probe answers may lose under the base, against the live adapter.", gt=0, live=True
    )
    fluency_floor: float = key(
        1.5, "Nats per token that probe answers may lose under the base, against the base itself.", gt=0, live=True
    )
    distinct_drop: float = key(
        0.4,
        "Share of distinct token pairs that probe answers may lose, against the live adapter.",
        gt=0,
        le=1,
        live=True,
    )
    fluency_prompts: tuple[Annotated[str, Field(min_length=1)], ...] = list_key(
        _FLUENCY_PROMPTS, "Questions that every candidate answers before it is served.", live=True, min_length=1
    )
    fluency_tokens: int = key(24, "Tokens of each probe answer at most.", ge=4, le=512, live=True)
    deep: bool = key(
        True,
        "Look at what went live once more, in idle time, over more answers; a version that is worse is rolled back.",
        live=True,
    )
    deep_tokens: int = key(
        4096, "Tokens sampled to look at one version at most, those of the one before included.", ge=1024, live=True
    )
