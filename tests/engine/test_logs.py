"""How a worker logs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from engine import logs


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of one record of each level."""
    logs.configure()
    logging.getLogger("engine.generate").info("loaded in %d s", 2)
    logging.getLogger("engine.generate").error("not “finite”")
    return capsys.readouterr().err.splitlines()


def test_without_a_word_a_worker_logs_text_from_info_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(logs.ENV_LOG_LEVEL, raising=False)
    monkeypatch.delenv(logs.ENV_LOG_FORMAT, raising=False)
    first, second = said(capsys)
    assert first.endswith("INFO    engine.generate: loaded in 2 s")
    assert second.endswith("ERROR   engine.generate: not “finite”")


def test_a_worker_logs_as_the_environment_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(logs.ENV_LOG_LEVEL, "error")
    monkeypatch.setenv(logs.ENV_LOG_FORMAT, "json")
    (line,) = said(capsys)
    entry = json.loads(line)
    assert entry.pop("time") > 1e9
    assert entry == {"level": "error", "logger": "engine.generate", "message": "not “finite”"}
