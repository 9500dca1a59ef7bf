"""Does it learn from few ratings? `python tests/bench/learning.py [PROPERTY ...] [--seeds 5] [--report]`.

For each property and seed a real daemon starts on the base; a simulated person rates 16 answers a round +1 or -1 by
whether they have the property and are plain language; held-out questions are answered before and after. A seed changes
the order of the questions and the sampling. Per seed it prints

    share    of held-out answers with the property, before and after, and the move in standard errors of the difference
    fluency  mean log-probability under the base of what was learned, less that of the base's own comparable answers
    variety  distinct word pairs of what was learned over those of the base, on equal numbers of pairs
    repeats  share of answers that were given before already, less the base's

and at the end the medians over the seeds against the bars: more than three standard errors, and fluent and varied as
the end-to-end test of learning has it. Exit code 1 if a bar is missed.

A seed takes minutes and all of them hours, so each leaves one line of JSON in `--results`, and what has a line is not
run again: the campaign may be cut off and gone on with. A line counts only for the sources and settings that it was
measured with. `--report` runs nothing and prints what there is.

Two properties have a base share of 0.1 to 0.3. The third is rare, and the box is helped as the settings below say: the
judge is a model fitted to its own ratings, and between rounds of rating it practises with it, once it is good enough.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hashlib
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import httpx
from contest import describe_machine
from places import MODEL, ROOT, cache_folder

from edged.cli.child import running, socket_of
from edged.cli.connect import Peer, open_async_http
from edged.demo import survey
from edged.demo.outcome import Answer
from edged.demo.people import Person, is_plain, words_of
from edged.demo.prompts import HELD_OUT, TRAINING

RATINGS_A_ROUND = 16
HELD_OUT_SAMPLES = 3  # answers to each of 24 held-out questions: 72, of which 60 were asked for
STANDARD_ERRORS = 3.0
FLUENCY_NATS = 0.3
SHARE_OF_BASE = 0.2
REPEATS_MORE = 0.1
COMPARABLE_AT_LEAST = 5
BEFORE_SEED, AFTER_SEED = 1_000_000, 2_000_000
PRACTICE_TIMEOUT_S = 600.0
POLL_S = 0.5

HELPED = """
[reward]
source = "fitted"

[practice]
idle_s = 1.0
max_updates = 2
max_tokens = 96
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Property:
    """What the person likes. has: of text and finish reason. comparable: which of the base's answers are like what is
    liked, so that their fluency can be compared. ratings: how many it may take. settings: of the daemon, as TOML."""

    has: Callable[[str, str], bool]
    comparable: Callable[[str, str], bool]
    ratings: int
    settings: str = ""


def is_short(text: str, finish_reason: str, most_words: int) -> bool:
    """Finished within so many words, and not empty."""
    return finish_reason == "stop" and 0 < len(words_of(text)) <= most_words


def is_personal(text: str, _: str) -> bool:
    """It speaks in the first person."""
    return any(word == "I" or word.startswith(("I'", "I’")) for word in words_of(text))


# Of the base's answers 0.21 are personal, 0.12 brief and 0.03 terse (72 answers at temperature 0.7, at most 96 tokens).
PROPERTIES = {
    "personal": Property(has=is_personal, comparable=is_personal, ratings=64),
    "brief": Property(
        has=lambda text, finish: is_short(text, finish, 36),
        comparable=lambda text, finish: is_short(text, finish, 36),
        ratings=64,
    ),
    "terse": Property(
        has=lambda text, finish: is_short(text, finish, 12),
        comparable=lambda text, finish: is_short(text, finish, 36),
        ratings=128,
        settings=HELPED,
    ),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One seed. errors: the move in standard errors. fluency: nats a token, after less base. variety: of distinct word
    pairs, after over base. repeats: share of repeated answers, after less before. practised: updates of practice."""

    before: float
    after: float
    errors: float
    fluency: float
    variety: float
    repeats: float
    published: int
    refused: int
    practised: int


async def learn(liked: Property, seed: int, peer: Peer) -> Outcome:
    """One course of ratings on a fresh daemon."""

    def rate(_: str, text: str, finish_reason: str) -> float:
        return 1.0 if is_plain(text) and liked.has(text, finish_reason) else -1.0

    person = Person(name="bench", likes="the property", rate=rate)
    async with open_async_http(peer) as http:

        async def ask(prompts: Sequence[str], first_seed: int, tag: str) -> list[Answer]:
            answers: list[Answer] = []
            for start in range(0, len(prompts), RATINGS_A_ROUND):
                bundle = prompts[start : start + RATINGS_A_ROUND]
                answers += await survey.ask(http, person, bundle, seed=first_seed + start, tag=tag, show=_silent)
            return answers

        held_out = HELD_OUT * HELD_OUT_SAMPLES
        before = await ask(held_out, BEFORE_SEED * (seed + 1), "before")
        verdicts = []
        questions = _questions(liked.ratings, seed)
        for start in range(0, liked.ratings, RATINGS_A_ROUND):
            updates = (await survey.status(http))["learner"]["updates_total"]
            rated = await ask(questions[start : start + RATINGS_A_ROUND], 10_000 * (seed + 1) + start, "round")
            await survey.rate(http, rated)
            update = await survey.await_update(http, updates, show=_silent)
            verdicts.append(None if update is None else update["verdict"])
            await _let_practise(http, start + RATINGS_A_ROUND)
        practised = (await survey.status(http))["practice"]["updates"]
        after = await ask(held_out, AFTER_SEED * (seed + 1), "after")
        scores = await survey.await_scores(http, before + after, show=_silent)
    logprobs = {name: score.logprob for name, score in scores.items() if score.logprob is not None}
    return judge(liked, before, after, logprobs, verdicts, practised)


async def _let_practise(http: httpx.AsyncClient, n_rated: int) -> None:
    """Wait until practice has made its updates, or has found its judge not good enough after `n_rated` ratings."""
    give_up_at = time.monotonic() + PRACTICE_TIMEOUT_S
    while time.monotonic() < give_up_at:
        practice = (await survey.status(http))["practice"]
        fitted = practice["fitted"]
        if practice["state"] in ("off", "limit") or (
            fitted is not None and not fitted["in_use"] and fitted["ratings"] >= n_rated
        ):
            return
        await asyncio.sleep(POLL_S)


def judge(
    liked: Property,
    before: Sequence[Answer],
    after: Sequence[Answer],
    logprobs: dict[str, float],
    verdicts: Sequence[str | None],
    practised: int = 0,
) -> Outcome:
    """The figures of a seed. logprobs: by completion id, under the base."""
    had = [float(answer.rating > 0) for answer in before]
    has = [float(answer.rating > 0) for answer in after]
    error = math.sqrt(statistics.variance(had) / len(had) + statistics.variance(has) / len(has))
    move = statistics.fmean(has) - statistics.fmean(had)
    base = [answer for answer in before if liked.comparable(answer.text, answer.finish_reason)]
    if len(base) < COMPARABLE_AT_LEAST:
        base = list(before)
    texts = [answer.text for answer in after]
    return Outcome(
        before=statistics.fmean(had),
        after=statistics.fmean(has),
        errors=move / error if error else math.inf if move > 0 else 0.0,
        fluency=_fluency(after, logprobs) - _fluency(base, logprobs),
        variety=_variety([answer.text for answer in before], texts),
        repeats=repeated_share(texts) - repeated_share([answer.text for answer in before]),
        published=verdicts.count("published"),
        refused=verdicts.count("refused"),
        practised=practised,
    )


def distinct_pairs(pairs: Sequence[tuple[str, str]]) -> float:
    """Different pairs / pairs; 1 where there is none."""
    return len(set(pairs)) / len(pairs) if pairs else 1.0


def _variety(before: Sequence[str], after: Sequence[str]) -> float:
    old, new = ([pair for text in texts for pair in pairwise(text.lower().split())] for texts in (before, after))
    n = min(len(old), len(new))  # the more text, the fewer of its pairs are new
    return distinct_pairs(new[:n]) / distinct_pairs(old[:n])


def repeated_share(texts: Sequence[str]) -> float:
    """Share of the answers that are the same as an earlier one."""
    return 1 - len(set(texts)) / len(texts)


def _fluency(answers: Sequence[Answer], logprobs: dict[str, float]) -> float:
    return statistics.fmean(logprobs[answer.completion_id] for answer in answers if answer.completion_id in logprobs)


def _questions(n: int, seed: int) -> list[str]:
    """`n` training questions in a seed's own order; each comes once before any comes again."""
    chance = random.Random(seed)
    queue: list[str] = []
    while len(queue) < n:
        queue += chance.sample(TRAINING, len(TRAINING))
    return queue[:n]


def _silent(_: str) -> None:
    """Nothing is shown."""


def run_seed(liked: Property, seed: int, settings: str) -> Outcome:
    """Start a daemon in a folder of its own, and let it learn."""
    with tempfile.TemporaryDirectory(prefix="bench-learning-") as name:
        folder = Path(name) / "state"
        folder.mkdir()
        # One dequantised base for all seeds: it never changes, and making it takes longer than a start.
        cache = cache_folder() / "learning-cache"
        cache.mkdir(exist_ok=True)
        (folder / "cache").symlink_to(cache)
        socket = socket_of(folder)
        config = Path(name) / "edged.toml"
        config.write_text(settings)
        arguments = ["--model", MODEL, "--listen", f"unix:{socket}", "--config", str(config)]
        with running(arguments, folder) as child:
            child.await_ready(Peer(socket=socket))
            with child.answering():
                return asyncio.run(learn(liked, seed, Peer(socket=socket)))


def report(name: str, outcomes: Sequence[Outcome]) -> bool:
    """Print the medians against the bars; whether all are met."""
    median = {
        field.name: statistics.median(getattr(outcome, field.name) for outcome in outcomes)
        for field in dataclasses.fields(Outcome)
    }
    bars = {
        "errors": (median["errors"] > STANDARD_ERRORS, f"> {STANDARD_ERRORS:g}"),
        "fluency": (median["fluency"] > -FLUENCY_NATS, f"> -{FLUENCY_NATS:g}"),
        "variety": (median["variety"] > 1 - SHARE_OF_BASE, f"> {1 - SHARE_OF_BASE:g}"),
        "repeats": (median["repeats"] <= REPEATS_MORE, f"<= {REPEATS_MORE:g}"),
    }
    print(
        f"{name}: median of {len(outcomes)} seeds after {PROPERTIES[name].ratings} ratings: share "
        f"{median['before']:.2f} -> {median['after']:.2f}"
    )
    for figure, (met, bar) in bars.items():
        print(f"  {figure:8} {median[figure]:7.2f}  {bar:6}  {'met' if met else 'MISSED'}")
    return all(met for met, _ in bars.values())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What an outcome was measured with; two of the same are comparable. code, settings: hashes."""

    property: str
    ratings: int
    code: str
    settings: str


def course_of(name: str, settings: str) -> Course:
    """Of the sources as they are."""
    digest = hashlib.sha256()
    for package in ("adapters", "edged", "engine"):
        for path in sorted((ROOT / package).rglob("*.py")):
            digest.update(path.read_bytes())
    hashed = hashlib.sha256(settings.encode()).hexdigest()
    return Course(property=name, ratings=PROPERTIES[name].ratings, code=digest.hexdigest()[:12], settings=hashed[:12])


def load_outcomes(path: Path, course: Course) -> dict[int, Outcome]:
    """Seed -> outcome of the lines that belong to the course. A last line that was cut off is none."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            kept = json.loads(line)
        except ValueError:
            continue
        if kept["course"] == dataclasses.asdict(course):
            found[kept["seed"]] = Outcome(**kept["outcome"])
    return found


def keep_outcome(path: Path, course: Course, seed: int, outcome: Outcome) -> None:
    """Add a line, on disk when this returns."""
    kept = {"course": dataclasses.asdict(course), "seed": seed, "outcome": dataclasses.asdict(outcome)}
    with path.open("a") as file:
        file.write("\n" * (file.tell() > 0 and not path.read_bytes().endswith(b"\n")) + json.dumps(kept) + "\n")
        file.flush()
        os.fsync(file.fileno())


def campaign(name: str, seeds: int, settings: str | None, results: Path, *, only_report: bool) -> bool:
    """Run the seeds that have no line yet, and report; whether there are all and the bars are met."""
    text = PROPERTIES[name].settings if settings is None else settings
    course = course_of(name, text)
    known = load_outcomes(results, course)
    for seed in range(seeds):
        if seed not in known and not only_report:
            known[seed] = run_seed(PROPERTIES[name], seed, text)
            keep_outcome(results, course, seed, known[seed])
        if seed in known:
            print(f"{name}, seed {seed}: {json.dumps(dataclasses.asdict(known[seed]))}", flush=True)
    outcomes = [known[seed] for seed in range(seeds) if seed in known]
    if len(outcomes) < seeds:
        print(f"{name}: {len(outcomes)} of {seeds} seeds are there")
    return bool(outcomes) and report(name, outcomes) and len(outcomes) == seeds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("properties", nargs="*", metavar="|".join(PROPERTIES), help="default: all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--config", type=Path, help="settings for the daemon instead of the property's own")
    parser.add_argument("--results", type=Path, help="one line of JSON a seed; default: in the benchmarks' cache")
    parser.add_argument("--report", action="store_true", help="run nothing")
    given = parser.parse_args()
    if unknown := set(given.properties) - set(PROPERTIES):
        parser.error(f"no such property: {', '.join(sorted(unknown))}")
    print(describe_machine())
    chosen = None if given.config is None else given.config.read_text()
    lines = given.results or cache_folder() / "learning.jsonl"
    met = [
        campaign(one, given.seeds, chosen, lines, only_report=given.report) for one in given.properties or PROPERTIES
    ]
    sys.exit(0 if all(met) else 1)
