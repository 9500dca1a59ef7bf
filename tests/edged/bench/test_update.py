"""How an update's seconds are cut into parts, and the table that is made of them."""

from __future__ import annotations

import pytest

from edged.bench.figures import Figure
from edged.bench.session import Burst
from edged.bench.update import Observed, figures_of

STAGES = {
    "queue": 0.4,
    "start": 0.1,
    "train": 5.0,
    "train/gather": 1.0,
    "train/optimise": 3.0,
    "train/measure": 0.5,
    "train/export": 0.3,
    "train/wait": 0.2,
    "wait": 0.19,
    "gate": 1.5,
    "publish": 0.2,
    "swap": 0.01,
    "total": 7.0,
    "rating_to_live": 7.4,
}
METRICS = {
    "tokens/all": 1300.0,
    "policy/steps": 6.0,
    "bytes/written": 8e6,
    "bytes/between_ranks": 3e6,
    "busy/cores": 0.8,
    "busy/lanes": 0.9,
    "ahead/score_s": 1.7,
}


def observed(verdict: str = "published", seconds: float = 7.5) -> Observed:
    burst = Burst(seconds=seconds, verdict=verdict, version=2, stages=STAGES, metrics=METRICS)
    return Observed(burst=burst, cpu_s=12.0, trainer_peak_bytes=1_200_000_000)


def by_name(figures: list[Figure]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures}


def test_the_table_tells_both_ways_of_rating_every_part_and_the_yield() -> None:
    figures = by_name(figures_of([observed()], [observed(seconds=2.5)], n_cores=2))
    assert figures["16 ratings in a burst -> live"].is_met is False
    assert figures["16 ratings 1 s apart -> live"].is_met is True
    assert figures["of it: train/optimise"].value == 3.0
    assert figures["batch tokens a second of training"].value == pytest.approx(1300 / 5.0)
    assert figures["cores busy from rating to live"].value == pytest.approx(100 * 12.0 / 7.5 / 2)
    assert figures["trainer, peak resident"].is_met is True
    assert figures["written to disk"].value == 8.0
    assert figures["cores that the trainer kept busy"].value == pytest.approx(80.0)
    assert figures["moved between its processes"].value == 3.0
    assert figures["scoring its answers ahead took"].value == 1.7


def test_the_stages_of_the_table_are_those_of_the_record_and_add_up_to_the_whole() -> None:
    figures = figures_of([observed()], [observed()], n_cores=2)
    stages = {one.name.removeprefix("of it: "): one.value for one in figures if one.name.startswith("of it: ")}
    assert stages.keys() == STAGES.keys() - {"train", "total", "rating_to_live"}
    assert sum(value for value in stages.values() if value is not None) == pytest.approx(STAGES["rating_to_live"])


def test_updates_that_were_not_published_are_told_and_not_timed() -> None:
    figures = by_name(figures_of([observed("refused"), observed()], [observed("failed")], n_cores=2))
    assert figures["16 ratings in a burst -> live"].samples == (7.5,)
    assert figures["16 ratings in a burst -> live"].note == "1 of 2 were not published: refused"
    assert figures["16 ratings 1 s apart -> live"].is_met is False
