"""The documents against the code: the tree in the README, the tests that ARCHITECTURE.md names, and every link."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_tree_in_the_readme_names_every_module():
    tree = (ROOT / "README.md").read_text().partition("## The tree")[2]
    modules = {path.name for package in ("adapters", "edged", "engine") for path in (ROOT / package).rglob("*.py")}
    assert {name for name in modules - {"__init__.py"} if name not in tree} == set()


def test_the_tree_in_the_readme_names_nothing_that_is_not_there():
    tree = (ROOT / "README.md").read_text().partition("## The tree")[2].partition("```\n\n")[0]
    modules = {path.name for package in ("adapters", "edged", "engine") for path in (ROOT / package).rglob("*.py")}
    assert {name for name in re.findall(r"[a-z_]+\.py\b", tree) if name not in modules} == set()


def test_every_test_that_the_failure_table_names_exists():
    named = re.findall(r"`([a-z_/]+\.py)`: `(test_\w+)`", (ROOT / "ARCHITECTURE.md").read_text())
    assert len(named) >= 10
    missing = [test for file, test in named if f"def {test}(" not in (ROOT / "tests" / file).read_text()]
    assert missing == []


def test_every_module_that_the_architecture_names_exists():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = re.findall(r"`((?:api|learn|serve|store|system|demo|generate|score|train)/[a-z_]+)`", text)
    parents = (ROOT / "edged", ROOT / "engine")
    assert [name for name in named if not any((parent / f"{name}.py").exists() for parent in parents)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_to_a_file(document):
    links = re.findall(r"\]\(([^)#:]+)\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []
