"""Medians, targets and the table of the benchmark."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from edged.bench.figures import HEADER, Figure, as_json, rows, shown


def a_figure(*samples: float, **changes: object) -> Figure:
    fields: dict[str, object] = {"part": "serve", "name": "16 clients", "unit": "tokens/s", "samples": samples}
    return Figure(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_figure_is_the_median_of_its_runs() -> None:
    assert a_figure(1.0, 9.0, 2.0).value == 2.0
    assert a_figure().value is None


def test_a_target_is_a_ceiling_or_a_floor_and_a_missing_figure_misses_it() -> None:
    assert a_figure(50.0, target=50.0).is_met
    assert not a_figure(50.1, target=50.0).is_met
    assert a_figure(151.0, target=150.0, better="higher").is_met
    assert not a_figure(149.0, target=150.0, better="higher").is_met
    assert a_figure(target=1.0).is_met is False
    assert a_figure(1.0).is_met is None


def test_the_table_has_a_cell_for_every_heading() -> None:
    table = rows([a_figure(1.0, 2.0, target=3.0), a_figure(note="not reported")])
    assert all(len(row) == len(HEADER) for row in table)
    assert table[0][3:6] == ["1.00 .. 2.00", "<= 3", "ok"]
    assert table[1][2] == "-"


def test_json_carries_every_run_and_the_machine() -> None:
    body = json.loads(json.dumps(as_json([a_figure(1.0, 2.0, target=3.0)], {"cores": 2})))
    assert body["machine"] == {"cores": 2}
    assert body["figures"][0]["samples"] == [1.0, 2.0]
    assert body["figures"][0]["is_met"] is True


@given(st.floats(1e-3, 1e6))
def test_a_shown_number_is_near_the_number(value: float) -> None:
    assert abs(float(shown(value)) - value) <= max(0.005, 0.005 * value) * 1.000001  # what float itself rounds
