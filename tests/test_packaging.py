"""The wheel: what is in it, what it asks for, and that it runs from a clean environment in an empty folder."""

from __future__ import annotations

import ast
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import tomllib
import zipfile
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("adapters", "edged", "engine")

# Import name -> distribution, where they differ.
DISTRIBUTIONS = {"xdist": "pytest-xdist", "zmq": "pyzmq", "llama_cpp": "llama-cpp-python"}
# Parts of another distribution's interface, pinned by that distribution.
COMES_WITH = {"annotated_types": "pydantic", "pydantic_core": "pydantic", "httpx2": "openai"}

# What a benchmark compares with: in a virtual environment of its own, which the benchmark makes.
PEERS = {"trl", "datasets"}

# Ten times what the first page takes on two busy cores.
START_GUARD_S = 120.0


def packages_on_disk() -> set[str]:
    return {
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    }


def declared(*extras: str) -> set[str]:
    """Names of the distributions that the base and these extras ask for."""
    requirements = list(PROJECT["project"]["dependencies"])
    for extra in extras:
        requirements += PROJECT["project"]["optional-dependencies"][extra]
    return {re.split(r"[^A-Za-z0-9_-]", text, maxsplit=1)[0].lower() for text in requirements}


def third_party(folder: str) -> set[str]:
    """Distributions that the modules under `folder` import."""
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        beside = {other.stem for other in path.parent.glob("*.py")}  # a script imports what lies beside it
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            else:
                names = []
            found.update({name.partition(".")[0] for name in names} - beside)
    found -= {*sys.stdlib_module_names, *PACKAGES}
    return {DISTRIBUTIONS.get(name, COMES_WITH.get(name, name)).replace("_", "-") for name in found}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy: a build in the tree could pick up what an earlier one left there."""
    tree = tmp_path_factory.mktemp("tree")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, tree]
    subprocess.run(command, check=True, timeout=120)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def clean_environment(wheel, tmp_path_factory):
    """A virtual environment that holds the wheel and nothing else of ours.

    Installing torch and llama.cpp once more would take minutes, so third-party packages are read from the environment
    that runs the tests: its folder is added to the path by a .pth file, after the new environment's own. The editable
    install of this source tree does not come along, because Python reads .pth files in site folders only.
    """
    folder = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel]
    subprocess.run(command, check=True, timeout=120)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "third_party.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


# ------------------------------------------------------------------------------------------------------ the project


def test_every_package_is_listed():
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages_on_disk()


def test_everything_imported_is_asked_for():
    assert third_party("adapters") - declared() == set()
    assert third_party("engine") - declared("engine") == set()
    # huggingface_hub: `models pull` says what to install where the engine's packages are absent.
    assert third_party("edged") - declared("demo") - {"huggingface-hub"} == set()
    assert third_party("tests") - declared("engine", "demo", "dev") - {"tests"} - PEERS == set()


def test_everything_asked_for_is_pinned():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines if line and not line.startswith("#")}
    assert declared("engine", "demo", "dev") - pinned == set()


def test_the_pins_are_what_the_tests_run_on():
    from importlib.metadata import version

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    for line in lines:
        if not line.startswith("#"):
            name, _, pin = line.partition("==")
            assert version(name).partition("+")[0] == pin, name


# -------------------------------------------------------------------------------------------------------- the wheel


def test_the_wheel_holds_our_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert {str(Path(name).parent).replace("/", ".") for name in names if name.endswith("/__init__.py")} == (
        packages_on_disk()
    )


def test_the_wheel_holds_the_page(wheel):
    page = ROOT / "edged" / "api" / "page"
    expected = {str(path.relative_to(ROOT)) for path in page.iterdir() if path.is_file()}
    assert expected
    assert expected <= set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_has_the_version_that_the_package_states(wheel):
    import edged

    assert wheel.name.startswith(f"edged-{edged.__version__}-")


def test_the_installed_code_is_the_wheels(clean_environment, tmp_path):
    program = "import adapters, edged, engine; print(edged.__file__, adapters.__file__, engine.__file__)"
    command = [clean_environment / "bin" / "python", "-c", program]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert all(Path(path).is_relative_to(clean_environment) for path in result.stdout.split())


@pytest.mark.real_model
def test_the_installed_daemon_serves_the_page_from_an_empty_folder(clean_environment, tmp_path):
    with (tmp_path / "log").open("w") as log:
        daemon = subprocess.Popen(
            [clean_environment / "bin" / "edged", "run"],
            cwd=tmp_path,
            stdout=log,
            stderr=log,
            env={"PATH": "/usr/bin:/bin"},
        )
    try:
        address = tmp_path / "var" / "edged.sock"
        wait_for_listener(address, daemon, tmp_path / "log")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(address)), timeout=START_GUARD_S) as client:
            page = client.get("http://edged/")
            assert page.status_code == 200
            assert page.headers["content-type"].startswith("text/html")
            assets = re.findall(r'(?:src|href)="([^"]+\.(?:js|css))"', page.text)
            assert assets
            for asset in assets:
                assert client.get(page.url.join(asset)).status_code == 200, asset
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(timeout=START_GUARD_S) == 0, (tmp_path / "log").read_text()
    finally:
        if daemon.poll() is None:
            daemon.kill()
            daemon.wait()


def wait_for_listener(address: Path, daemon: subprocess.Popen[bytes], log: Path) -> None:
    """Return as soon as something accepts connections at the Unix socket."""
    give_up_at = time.monotonic() + START_GUARD_S
    while True:
        assert daemon.poll() is None, log.read_text()
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(address))
            except OSError:
                assert time.monotonic() < give_up_at, log.read_text()
            else:
                return
        time.sleep(0.05)
