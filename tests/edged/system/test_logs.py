"""How the daemon logs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from edged.system import logs


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


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


def test_the_requests_themselves_are_not_logged_at_info(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "text")
    logging.getLogger("uvicorn.access").info("GET /v1/status")
    assert capsys.readouterr().err == ""
