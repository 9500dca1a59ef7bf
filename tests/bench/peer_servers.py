"""The servers that edged's is compared with, made once and kept in the cache: llama.cpp's own and llama-cpp-python's.

llama.cpp's server is built from the source that the pinned llama-cpp-python ships, with the flags that the Makefile
gives to the library, so that both sides decode with the same kernels. llama-cpp-python's server runs on the very
library that edged runs on; only what it needs besides is installed, in an environment of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

from places import ROOT

SERVER_NEEDS = ("pydantic-settings", "sse-starlette", "starlette-context", "PyYAML")
# As the Makefile builds the library: GCC 12 drops stores that the AMX kernels need.
CXXFLAGS = "-fno-tree-dse -fno-dse"
CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


def pinned_version() -> str:
    """The release of llama-cpp-python in constraints.txt."""
    found = re.search(r"^llama-cpp-python==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None
    return found.group(1)


def ensure_llama_server(cache: Path) -> Path:
    """llama.cpp's server, built if missing (a download of 77 MB and some minutes)."""
    version = pinned_version()
    folder = cache / f"llama-server-{version}"
    if not folder.exists():
        print(f"building llama.cpp's server of llama-cpp-python {version}", file=sys.stderr, flush=True)
        work = cache / "llama-server.tmp"
        shutil.rmtree(work, ignore_errors=True)  # of a build that was cut off
        _build(version, work)
        shutil.rmtree(work / "source")
        shutil.move(work / "build" / "bin", work / "bin")
        shutil.rmtree(work / "build")
        work.rename(folder)
    return folder / "bin" / "llama-server"


def _build(version: str, work: Path) -> None:
    tools = work / "tools"
    venv.create(tools, with_pip=True)
    pip = [str(tools / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", "cmake", "ninja"], check=True)
    requirement = f"llama-cpp-python=={version}"
    subprocess.run([*pip, "download", "--no-deps", "--no-binary", ":all:", "-d", str(work), requirement], check=True)
    with tarfile.open(next(work.glob("*.tar.gz"))) as archive:
        archive.extractall(work / "source", filter="data")
    source = next((work / "source").glob("*/vendor/llama.cpp"))
    environment = os.environ | {
        "PATH": f"{tools / 'bin'}:{os.environ['PATH']}",
        "CXXFLAGS": f"{CXXFLAGS} {os.environ.get('CXXFLAGS', '')}".strip(),
    }
    configure = ["cmake", "-G", "Ninja", "-S", str(source), "-B", str(work / "build"), *CMAKE_OPTIONS]
    subprocess.run(configure, env=environment, check=True, stdout=subprocess.DEVNULL)
    build = ["cmake", "--build", str(work / "build"), "--target", "llama-server", "-j", str(os.cpu_count())]
    subprocess.run(build, env=environment, check=True, stdout=subprocess.DEVNULL)


def ensure_python_server(cache: Path) -> Path:
    """An interpreter that has llama-cpp-python's server, on edged's own build of the library."""
    folder = cache / f"python-server-{pinned_version()}-py{sys.version_info.major}.{sys.version_info.minor}"
    python, stamp = folder / "bin" / "python", folder / "installed"
    if not stamp.exists():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *SERVER_NEEDS], check=True)
        inside = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
        (Path(inside) / "edged-environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
        stamp.touch()
    return python
