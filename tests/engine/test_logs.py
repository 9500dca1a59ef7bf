"""How daemon and workers log."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import gguf
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
    logs.configure_from_environment()
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


def test_json_gives_one_object_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json")
    logging.getLogger("edged.learn").info("update %d\nis “done”", 3)
    (line,) = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert entry.pop("time") > 1e9
    assert entry == {"level": "info", "logger": "edged.learn", "message": "update 3\nis “done”"}


def test_json_carries_the_exception(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json")
    try:
        raise ValueError("bad figure")
    except ValueError:
        logging.getLogger("edged").exception("it failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["exception"].endswith("ValueError: bad figure")


def test_text_names_level_and_logger(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "text")
    logging.getLogger("edged.serve").warning("slow")
    assert capsys.readouterr().err.rstrip().endswith("WARNING edged.serve: slow")


def test_what_is_below_the_level_is_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("warning", "text")
    logging.getLogger("edged").info("detail")
    assert capsys.readouterr().err == ""


def test_configuring_again_replaces_the_handler(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "text")
    logs.configure("info", "json")
    logging.getLogger("edged").info("once")
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_that_an_adapter_file_was_written_is_not_told_by_the_library_each_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    logs.configure("info", "text")
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.close()
    assert capsys.readouterr().err == ""


def test_the_requests_themselves_are_not_logged_at_info(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "text")
    logging.getLogger("uvicorn.access").info("GET /v1/status")
    assert capsys.readouterr().err == ""
