"""A daemon on the real model, shared where it may be, and one learning run that every test of learning looks at."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from edged.demo.people import PEOPLE, words_of
from edged.demo.prompts import HELD_OUT, TRAINING

ROUNDS = 6  # of 16 ratings: 96 in all
BATCH = 16
MAX_TOKENS = 64
BASE_SAMPLES = 3  # answers to each held-out question before learning: among them must be some that are short already
SAMPLES = 2
PERSON = PEOPLE["short"]


@dataclasses.dataclass(frozen=True)
class Said:
    """An answer, and what the person thinks of it."""

    completion_id: str
    text: str
    rating: float
    version: int
    finish_reason: str

    @property
    def n_words(self) -> int:
        return len(words_of(self.text))


@dataclasses.dataclass(frozen=True)
class LearningRun:
    """before, after, shuffled: answers to held-out questions by the base, after learning, and after the same number of
    ratings in random order. logprob: mean log-probability under the base of an answer's non-EOS tokens."""

    before: list[Said]
    after: list[Said]
    shuffled: list[Said]
    logprob: dict[str, float]
    updates: list[dict[str, Any]]
    shuffled_updates: list[dict[str, Any]]
    state: Path


class RealDaemon:
    """Asks many questions at once, which is what the server is fast at."""

    def __init__(self, running: Any) -> None:
        self.running = running

    def ask(self, prompts: list[str], seed: int) -> list[Said]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(self._ask, prompts, range(seed, seed + len(prompts))))

    def _ask(self, prompt: str, seed: int) -> Said:
        answer = self.running.chat(prompt, seed=seed, max_tokens=MAX_TOKENS, temperature=0.7)
        choice = answer["choices"][0]
        text = choice["message"]["content"]
        return Said(
            completion_id=answer["id"],
            text=text,
            rating=PERSON.rate(prompt, text, choice["finish_reason"]),
            version=int(answer["system_fingerprint"].rpartition("-v")[2]),
            finish_reason=choice["finish_reason"],
        )

    def learn(self, shuffle: bool) -> None:
        """Six rounds of sixteen ratings, each followed by its update."""
        chance = random.Random(3)
        for round_ in range(ROUNDS):
            prompts = chance.sample(list(TRAINING), BATCH)
            answers = self.ask(prompts, 1000 * (round_ + 1))
            ratings = [answer.rating for answer in answers]
            if shuffle:
                chance.shuffle(ratings)
            before = self.running.status()["learner"]["updates_total"]
            for answer, rating in zip(answers, ratings, strict=True):
                self.running.rate(answer.completion_id, rating)
            self.running.until(lambda before=before: self._settled(before))

    def _settled(self, before: int) -> bool:
        learner = self.running.status()["learner"]
        return learner["updates_total"] > before or learner["state"] == "waiting_for_contrast"

    def logprobs(self, answers: list[Said]) -> dict[str, float]:
        """The trainer's verdict on each answer, by completion id, once it has given all."""
        wanted = {answer.completion_id for answer in answers if answer.text}

        def scored() -> dict[str, float] | None:
            found: dict[str, float] = {}
            after, more = 0, True
            while more:
                page = self.running.client.get("/v1/episodes", params={"after": after, "limit": 500}).json()
                for episode in page["data"]:
                    after = episode["id"]
                    score = episode["score"]
                    if episode["completion_id"] in wanted and score and score["reference_logprob"] is not None:
                        found[episode["completion_id"]] = score["reference_logprob"]
                more = page["has_more"]
            return found if len(found) == len(wanted) else None

        return dict(self.running.until(scored))


@pytest.fixture(scope="session")
def start_real(tmp_path_factory: Any, daemon_class: Any) -> Iterator[Callable[..., Any]]:
    """Start a daemon on the real model: start_real(name, cache=folder of an earlier one, arguments=[...])."""
    root = tmp_path_factory.mktemp("real")
    running: list[Any] = []

    def start(name: str, cache: Path | None = None, arguments: tuple[str, ...] = (), state: Path | None = None) -> Any:
        folder = state or root / name
        folder.mkdir(exist_ok=True)
        if cache is not None:
            shutil.copytree(cache, folder / "cache", copy_function=_link)
        command = [sys.executable, "-m", "edged", "run", "--state-dir", str(folder), *arguments]
        daemon = daemon_class(command, folder, {"HF_HUB_OFFLINE": "1"}, ())
        running.append(daemon)
        return daemon.until_ready()

    yield start
    for daemon in running:
        daemon.end()


def _link(source: str, target: str) -> None:
    """The dequantised base is large and never changes: a second name is enough."""
    Path(target).hardlink_to(source)


@pytest.fixture(scope="session")
def learning_run(start_real: Callable[..., Any]) -> LearningRun:
    """One run with honest ratings and one with shuffled ones, on the same questions."""
    held_out = list(HELD_OUT)
    running = start_real("honest")
    honest = RealDaemon(running)
    before = honest.ask(held_out * BASE_SAMPLES, 10_000)
    honest.learn(shuffle=False)
    after = honest.ask(held_out * SAMPLES, 20_000)
    logprob = honest.logprobs(before + after)
    updates = running.client.get("/v1/updates").json()["data"]
    assert running.stop() == 0

    running = start_real("shuffled", cache=running.state / "cache")
    random_ = RealDaemon(running)
    random_.learn(shuffle=True)
    shuffled = random_.ask(held_out * SAMPLES, 20_000)
    shuffled_updates = running.client.get("/v1/updates").json()["data"]
    assert running.stop() == 0
    return LearningRun(before, after, shuffled, logprob, updates, shuffled_updates, root_of(running))


def root_of(running: Any) -> Path:
    return Path(running.state).parent / "honest"


def describe(run: LearningRun) -> str:
    """The figures of a run, for the log of a test that looks at them."""
    rows = {}
    for name in ("before", "after", "shuffled"):
        answers: list[Said] = getattr(run, name)
        scored = [run.logprob[a.completion_id] for a in answers if a.completion_id in run.logprob]
        rows[name] = {
            "n": len(answers),
            "words": round(statistics.mean(a.n_words for a in answers), 1),
            "rating": round(statistics.mean(a.rating for a in answers), 2),
            "logprob": round(statistics.mean(scored), 2) if scored else None,
        }
    return json.dumps(rows)
