"""How an update's seconds are cut into parts, and the table that is made of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.bench.figures import Figure
from edged.bench.session import Burst
from edged.bench.update import Observed, figures_of, shares

STAGES = {
    "start": 0.1,
    "train": 5.0,
    "train/gather": 1.0,
    "train/optimise": 3.0,
    "train/measure": 0.5,
    "gate": 1.5,
    "publish": 0.2,
    "swap": 0.01,
    "total": 7.0,
    "rating_to_live": 7.4,
}
METRICS = {"tokens": 700.0, "tokens/prompt": 600.0, "policy/steps": 6.0, "bytes/written": 8e6}


def observed(verdict: str = "published", seconds: float = 7.5) -> Observed:
    burst = Burst(seconds=seconds, verdict=verdict, version=2, stages=STAGES, metrics=METRICS)
    return Observed(burst=burst, cpu_s=12.0, trainer_peak_bytes=1_200_000_000)


def by_name(figures: list[Figure]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures}


def test_the_parts_of_an_update_are_disjoint_and_add_up() -> None:
    parts = shares(STAGES)
    assert sum(parts.values()) == pytest.approx(7.4)
    assert parts["waiting"] == pytest.approx(0.4)
    assert parts["train/other"] == pytest.approx(0.5)
    assert parts["other"] == pytest.approx(7.0 - 0.1 - 5.0 - 1.5 - 0.2 - 0.01)
    assert not {"train", "total", "rating_to_live"} & set(parts)


@given(st.dictionaries(st.sampled_from(sorted(STAGES)), st.floats(0.0, 100.0)))
def test_whatever_the_daemon_reports_the_parts_add_up_to_the_whole(changed: dict[str, float]) -> None:
    stages = {**STAGES, **changed}
    assert math.isclose(sum(shares(stages).values()), stages["rating_to_live"], abs_tol=1e-9)


def test_the_table_tells_both_ways_of_rating_every_part_and_the_yield() -> None:
    figures = by_name(figures_of([observed()], [observed(seconds=2.5)], n_cores=2))
    assert figures["16 ratings in a burst -> live"].is_met is False
    assert figures["16 ratings 1 s apart -> live"].is_met is True
    assert figures["of it: train/optimise"].value == 3.0
    assert figures["batch tokens a second of training"].value == pytest.approx(1300 / 5.0)
    assert figures["cores busy meanwhile"].value == pytest.approx(100 * 12.0 / 7.5 / 2)
    assert figures["trainer, peak resident"].is_met is True
    assert figures["written to disk"].value == 8.0


def test_updates_that_were_not_published_are_told_and_not_timed() -> None:
    figures = by_name(figures_of([observed("refused"), observed()], [observed("failed")], n_cores=2))
    assert figures["16 ratings in a burst -> live"].samples == (7.5,)
    assert figures["16 ratings in a burst -> live"].note == "1 of 2 were not published: refused"
    assert figures["16 ratings 1 s apart -> live"].is_met is False
