"""What the table says of the machine."""

from __future__ import annotations

from edged.bench.run import describe_machine


def test_the_load_that_is_told_is_the_one_from_before_the_run() -> None:
    machine = describe_machine("smollm2-135m", 0.712)
    assert (machine["model"], machine["load_before"]) == ("smollm2-135m", 0.71)
    assert machine["cores"] >= 1
