"""Runs verbs of the command line in this process, in an empty folder, with nothing of the caller's environment."""

from __future__ import annotations

import dataclasses
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edged.cli import main


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """A finished verb: exit code and what it printed."""

    returncode: int
    stdout: str
    stderr: str


Cli = Callable[..., Done]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """`cli("status", "--json", input="...", env={...})`."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(("EDGED_", "STATE_DIRECTORY")):
            monkeypatch.delenv(name)

    def run(*arguments: str, input: str = "", env: dict[str, str] | None = None) -> Done:
        with monkeypatch.context() as patched:
            for name, value in (env or {}).items():
                patched.setenv(name, value)
            patched.setattr(sys, "argv", ["edged", *arguments])
            patched.setattr(sys, "stdin", io.StringIO(input))
            capsys.readouterr()
            with pytest.raises(SystemExit) as ended:
                main()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return Done(code or 0, *capsys.readouterr())

    return run
