"""Does the gate tell bad adapters from good ones? `python tests/bench/gate.py [KIND ...] [--seeds 3] [--report]`.

A battery of candidates of the real model (`gate_candidates.py`), each a first update of the base: collapsed, repeating,
empty, glued, poisoned, over-trained, misfiled (wrong permutation of Q and K, wrong scale), noise of growing norm, NaN;
and clean ones: PPO updates of the demo's three people with the daemon's settings, small updates by examples, small
perturbations. Both gates judge each of them with the daemon's own parts and settings, the deep one also where the fast
one has refused already, so that each is measured by itself.

Printed is who refused what and why, and the rates against the bars: bad ones refused by either gate in 95 %, clean ones
in 5 % at most. Exit code 1 if a bar is missed.

A candidate takes half a minute and all of them half an hour, so each leaves one line of JSON in `--results`, and what
has a line is not made again. A line counts only for the sources that it was measured with. `--report` runs nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from contest import describe_machine
from gate_candidates import KINDS, Kind
from gate_rig import Rig, open_rig
from places import MODEL, ROOT, cache_folder

from edged.base_model import open_base_model
from edged.settings import LearnSection, Settings

BAD_REFUSED_MIN = 0.95
CLEAN_REFUSED_MAX = 0.05
KEPT_METRICS = ("kl/live", "gate/", "deep/")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What both gates said of one candidate. fast, deep: "" where it was let through, else why it was refused."""

    fast: str
    deep: str
    metrics: dict[str, float]
    seconds: dict[str, float]


async def examine(rig: Rig, kind: Kind, version: int, seed: int) -> Outcome:
    """Make one candidate and have it judged."""
    seconds, began = {}, time.perf_counter()
    candidate = await kind.make(rig, version, seed)
    seconds["make"] = time.perf_counter() - began
    fast = await rig.prove(candidate)
    seconds["fast"] = time.perf_counter() - began - seconds["make"]
    deep = await rig.look_at(candidate)
    seconds["deep"] = time.perf_counter() - began - seconds["make"] - seconds["fast"]
    trained = {} if candidate.result is None else candidate.result.metrics
    metrics = trained | fast.metrics | deep.metrics
    return Outcome(
        fast="" if fast.accepted else fast.reason,
        deep=deep.reason if deep.verdict == "refused" else "",
        metrics={name: value for name, value in metrics.items() if name.startswith(KEPT_METRICS)},
        seconds=seconds,
    )


def report(found: dict[tuple[str, int], Outcome], kinds: Sequence[Kind]) -> bool:
    """Print who refused what, and the rates; whether the bars are met."""
    print(f"{'kind':16} {'n':>3} {'fast':>5} {'deep':>5} {'either':>6}")
    totals = {True: [0, 0], False: [0, 0]}
    for kind in kinds:
        ones = [outcome for (name, _), outcome in sorted(found.items()) if name == kind.name]
        either = [outcome for outcome in ones if outcome.fast or outcome.deep]
        fast, deep = sum(bool(one.fast) for one in ones), sum(bool(one.deep) for one in ones)
        print(f"{kind.name:16} {len(ones):3} {fast:5} {deep:5} {len(either):6}  {'bad' if kind.is_bad else 'clean'}")
        totals[kind.is_bad][0] += len(either)
        totals[kind.is_bad][1] += len(ones)
        for reason in sorted({outcome.fast or outcome.deep for outcome in either}):
            print(f"    {reason}")
    (bad, n_bad), (clean, n_clean) = totals[True], totals[False]
    if not (n_bad and n_clean):
        return False
    met = bad >= BAD_REFUSED_MIN * n_bad and clean <= CLEAN_REFUSED_MAX * n_clean
    print(f"bad refused:   {bad} of {n_bad} ({bad / n_bad:.0%}), wanted at least {BAD_REFUSED_MIN:.0%}")
    print(f"clean refused: {clean} of {n_clean} ({clean / n_clean:.0%}), wanted at most {CLEAN_REFUSED_MAX:.0%}")
    return met


def sources() -> str:
    """A hash of the sources as they are, with those of the battery."""
    digest = hashlib.sha256()
    paths = [path for package in ("adapters", "edged", "engine") for path in (ROOT / package).rglob("*.py")]
    for path in sorted([*paths, *Path(__file__).parent.glob("gate*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def load_outcomes(path: Path, code: str) -> dict[tuple[str, int], Outcome]:
    """(kind, seed) -> outcome of the lines of these sources. A last line that was cut off is none."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            kept = json.loads(line)
        except ValueError:
            continue
        if kept["code"] == code:
            found[kept["kind"], kept["seed"]] = Outcome(**kept["outcome"])
    return found


def keep_outcome(path: Path, code: str, kind: str, seed: int, outcome: Outcome) -> None:
    """Add a line, on disk when this returns."""
    kept = {"code": code, "kind": kind, "seed": seed, "outcome": dataclasses.asdict(outcome)}
    with path.open("a") as file:
        file.write("\n" * (file.tell() > 0 and not path.read_bytes().endswith(b"\n")) + json.dumps(kept) + "\n")
        file.flush()
        os.fsync(file.fileno())


async def run(todo: Sequence[tuple[Kind, int]], path: Path, code: str) -> None:
    """Make and judge what has no line yet."""
    cache = cache_folder() / "learning-cache"
    cache.mkdir(exist_ok=True)
    settings = Settings(learn=LearnSection(idle_class=False))  # nobody is served: training need not give way
    model = open_base_model(MODEL, "", cache)
    with tempfile.TemporaryDirectory(prefix="bench-gate-") as folder:
        async with open_rig(settings, model, Path(folder), cache) as rig:
            for version, (kind, seed) in enumerate(todo, start=1):
                outcome = await examine(rig, kind, version, seed)
                keep_outcome(path, code, kind.name, seed, outcome)
                told = outcome.fast or outcome.deep or "let through"
                print(f"{kind.name}, seed {seed}, {sum(outcome.seconds.values()):.0f} s: {told}", flush=True)


def campaign(names: Sequence[str], seeds: int, path: Path, *, code: str, only_report: bool) -> bool:
    """Run what has no line yet, and report; whether there are all and the bars are met."""
    kinds = [kind for kind in KINDS if not names or kind.name in names]
    wanted = [(kind, seed) for seed in range(seeds) for kind in kinds]
    known = load_outcomes(path, code)
    todo = [(kind, seed) for kind, seed in wanted if (kind.name, seed) not in known]
    if todo and not only_report:
        asyncio.run(run(todo, path, code))
        known = load_outcomes(path, code)
    found = {(kind.name, seed): known[kind.name, seed] for kind, seed in wanted if (kind.name, seed) in known}
    if len(found) < len(wanted):
        print(f"{len(found)} of {len(wanted)} candidates are there")
    return report(found, kinds) and len(found) == len(wanted)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(kind.name for kind in KINDS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, help="one line of JSON a candidate; default: in the benchmarks' cache")
    parser.add_argument("--code", help="report lines of these sources; default: of those that are here")
    parser.add_argument("--report", action="store_true", help="run nothing")
    given = parser.parse_args()
    if unknown := set(given.kinds) - {kind.name for kind in KINDS}:
        parser.error(f"no such kind: {', '.join(sorted(unknown))}")
    print(describe_machine())
    lines = given.results or cache_folder() / "gate.jsonl"
    is_met = campaign(given.kinds, given.seeds, lines, code=given.code or sources(), only_report=given.report)
    sys.exit(0 if is_met else 1)
