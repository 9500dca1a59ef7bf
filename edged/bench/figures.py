"""A measured figure, its target, and the table of all. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the benchmark.

    Attributes:
        samples: every run's value; the figure is their median. Empty: it could not be measured, `note` says why.
        target: the value that the product promises on two cores, or None for what is only told.
        better: whether the target is a ceiling ("lower") or a floor ("higher").
    """

    part: str
    name: str
    unit: str
    samples: tuple[float, ...]
    target: float | None = None
    better: Literal["lower", "higher"] = "lower"
    note: str = ""

    @property
    def value(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; None where there is none. A figure that could not be measured misses it."""
        if self.target is None:
            return None
        if self.value is None:
            return False
        return self.value <= self.target if self.better == "lower" else self.value >= self.target


def rows(figures: Sequence[Figure]) -> list[list[str]]:
    """The table: part, name, value with unit, spread over the runs, target, verdict."""
    return [
        [
            figure.part,
            figure.name,
            "-" if figure.value is None else f"{shown(figure.value)} {figure.unit}",
            f"{shown(min(figure.samples))} .. {shown(max(figure.samples))}" if len(figure.samples) > 1 else "",
            "" if figure.target is None else f"{'<=' if figure.better == 'lower' else '>='} {figure.target:g}",
            {True: "ok", False: "MISSED", None: ""}[figure.is_met],
            figure.note,
        ]
        for figure in figures
    ]


HEADER = ("part", "figure", "median", "runs", "target", "", "")


def shown(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def as_json(figures: Sequence[Figure], machine: Mapping[str, Any]) -> dict[str, Any]:
    """For scripts: the machine and every figure with all its runs."""
    return {
        "machine": dict(machine),
        "figures": [
            {**dataclasses.asdict(figure), "value": figure.value, "is_met": figure.is_met} for figure in figures
        ],
    }
