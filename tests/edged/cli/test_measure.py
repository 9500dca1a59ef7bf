"""The choices on the command line are what the demo and the benchmark have."""

from __future__ import annotations

from edged.bench.run import PARTS
from edged.cli.measure import Part, Preference
from edged.demo.people import PEOPLE


def test_every_person_and_every_part_can_be_chosen() -> None:
    assert {choice.value for choice in Preference} == set(PEOPLE)
    assert {choice.value for choice in Part} - {"all"} == set(PARTS)
