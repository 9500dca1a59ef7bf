"""The episodes that both sides of a comparison train on: sampled once by the serve worker, and kept as a JSON file.

Four questions with four answers each of at most 48 tokens, so that one set serves PPO, GRPO (groups of four) and DPO
(two pairs a group). Within a group the shortest answer is liked most: rewards fall evenly from +1 to -1 with the rank.
Seeds are fixed, but the processor's kernels are not, so another machine samples other answers of the same kind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from pathlib import Path

from sampling import Worker

from engine import protocol
from engine.protocol import AdapterRef, EpisodeTokens, PreferredPair, RatedEpisode

QUESTIONS = (
    "Why do leaves change colour in autumn?",
    "How do I keep bread fresh?",
    "Why does ice float on water?",
    "How can I fall asleep faster?",
)
ANSWERS = 4
MAX_TOKENS = 48
TEMPERATURE = 0.7
BASE = AdapterRef(version=0, folder=None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One answer. group: the number of its question. reward: in [-1, 1]."""

    group: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    reward: float


def sample_episodes(model: Path, threads: int) -> list[Sampled]:
    """Ask the serve worker for all answers at once."""
    start = protocol.StartServe(
        model_path=str(model),
        adapter=BASE,
        slots=len(QUESTIONS) * ANSWERS,
        context_tokens=4096,
        threads=threads,
        probes=(protocol.ProbeText(user="Hello", assistant="Hello!"),),
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Worker(Path(folder), start)) as worker:
        for group, question in enumerate(QUESTIONS):
            worker.send(
                protocol.Generate(
                    request_id=str(group),
                    messages=(protocol.ChatMessage(role="user", content=question),),
                    prompt=None,
                    n=ANSWERS,
                    sampling=protocol.Sampling(temperature=TEMPERATURE, max_tokens=MAX_TOKENS, seed=100 * (group + 1)),
                )
            )
        prompts: dict[str, tuple[int, ...]] = {}
        choices: dict[str, list[protocol.ChoiceDone]] = {}
        n_open = len(QUESTIONS)
        while n_open:
            match worker.receive():
                case protocol.Begun() as begun:
                    prompts[begun.request_id] = begun.prompt_ids
                case protocol.ChoiceDone() as done:
                    choices.setdefault(done.request_id, []).append(done)
                case protocol.RequestDone():
                    n_open -= 1
                case protocol.RequestFailed() as failed:
                    raise RuntimeError(f"{failed.code}: {failed.message}")
    return [
        Sampled(
            group=int(request),
            prompt_ids=prompts[request],
            completion_ids=choice.completion_ids,
            logprobs=choice.logprobs,
            reward=1.0 - 2.0 * rank / (ANSWERS - 1),
        )
        for request in sorted(prompts)
        for rank, choice in enumerate(sorted(choices[request], key=lambda choice: (len(choice.text), choice.choice)))
    ]


def ensure_episodes(path: Path, model: Path) -> Path:
    """`path`, written first if it is missing."""
    if not path.exists():
        sampled = sample_episodes(model, len(os.sched_getaffinity(0)))
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps([dataclasses.asdict(one) for one in sampled]))
        temporary.rename(path)
    return path


def load_episodes(path: Path) -> list[Sampled]:
    """The episodes in the file, group by group, best first."""
    return [
        Sampled(
            group=one["group"],
            prompt_ids=tuple(one["prompt_ids"]),
            completion_ids=tuple(one["completion_ids"]),
            logprobs=tuple(one["logprobs"]),
            reward=one["reward"],
        )
        for one in json.loads(path.read_text())
    ]


def rated_episodes(sampled: list[Sampled], first_id: int, adapter: AdapterRef = BASE) -> tuple[RatedEpisode, ...]:
    """As a job names them, numbered from `first_id`: other numbers are other episodes to the trainer's cache."""
    return tuple(
        RatedEpisode(
            episode=tokens_of(one, first_id + i, adapter), reward=one.reward, replay=False, group=f"group-{one.group}"
        )
        for i, one in enumerate(sampled)
    )


def preferred_pairs(sampled: list[Sampled], first_id: int) -> tuple[PreferredPair, ...]:
    """Best over worst and second over third of each group, at temperature 1, as DPO takes them."""
    tokens = [tokens_of(one, first_id + i, BASE, temperature=1.0) for i, one in enumerate(sampled)]
    groups = [tokens[i : i + ANSWERS] for i in range(0, len(tokens), ANSWERS)]
    return tuple(
        PreferredPair(chosen=group[rank], rejected=group[-1 - rank]) for group in groups for rank in range(ANSWERS // 2)
    )


def tokens_of(one: Sampled, episode_id: int, adapter: AdapterRef, temperature: float = TEMPERATURE) -> EpisodeTokens:
    """What the trainer sees of an answer."""
    return EpisodeTokens(
        episode_id=episode_id,
        prompt_ids=one.prompt_ids,
        completion_ids=one.completion_ids,
        logprobs=one.logprobs,
        temperature=temperature,
        adapter=adapter,
    )
