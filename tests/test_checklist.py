"""docs/checklist.md against the tests: every item once, and proved by tests that are there, or said not to apply."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "checklist.md").read_text()

# Family -> how many items it has, so that none can get lost.
FAMILIES = {
    "TOK": 4,
    "MASK": 6,
    "LP": 8,
    "KL": 5,
    "RW": 2,
    "GAE": 4,
    "GRPO": 4,
    "RLOO": 1,
    "PPO": 8,
    "IS": 3,
    "DPO": 3,
    "KTO": 1,
    "EDIT": 1,
    "CR": 6,
    "LORA": 10,
    "SYNC": 7,
    "STALE": 1,
    "OFF": 1,
    "RES": 1,
}
IDS = [f"T-{family}-{number}" for family, count in FAMILIES.items() for number in range(1, count + 1)]
NOT_APPLICABLE = "Does not apply: "

ROWS = re.findall(r"^\| (T-[A-Z]+-\d+) \| (.+?) \| (.+) \|$", PAGE, re.MULTILINE)


def names_in(path: Path) -> set[str]:
    return {
        f"{path.relative_to(TESTS)}::{node.name}"
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


EXISTING = set().union(*map(names_in, TESTS.rglob("test_*.py")))


def items_in(test: str) -> list[str]:
    """The ids that a test carries in its name: test_t_tok_3_t_lp_7_an_unusable... -> T-TOK-3, T-LP-7."""
    found = re.match(r"test_((?:t_[a-z]+_\d+_)+)", test.partition("::")[2])
    return [f"T-{family.upper()}-{n}" for family, n in re.findall(r"t_([a-z]+)_(\d+)_", found[1])] if found else []


def proofs(cell: str) -> list[str]:
    return re.findall(r"`([^`]+::[^`]+)`", cell)


def test_every_item_is_on_the_page_exactly_once() -> None:
    assert [item for item, _, _ in ROWS] == IDS


@pytest.mark.parametrize(("item", "_what", "cell"), ROWS, ids=[row[0] for row in ROWS])
def test_an_item_is_proved_by_tests_that_exist_or_says_why_it_does_not_apply(item: str, _what: str, cell: str) -> None:
    if cell.startswith(NOT_APPLICABLE):
        assert len(cell) > len(NOT_APPLICABLE) + 40, f"{item}: a reason is wanted"
        assert "::" not in cell
    else:
        assert proofs(cell), f"{item} names no test"
        assert cell == "<br>".join(f"`{test}`" for test in proofs(cell))
        assert set(proofs(cell)) <= EXISTING


def test_every_test_that_carries_an_id_stands_in_the_row_of_that_item() -> None:
    listed = {item: set(proofs(cell)) for item, _, cell in ROWS}
    carried = {(item, test) for test in EXISTING for item in items_in(test)}
    assert {(item, test) for item, test in carried if test not in listed.get(item, ())} == set()


def test_every_test_that_the_page_names_is_there() -> None:
    assert set(proofs(PAGE)) - EXISTING == set()
