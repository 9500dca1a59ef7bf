"""Ports and socket paths for the daemon of a command."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest

from edged.cli.child import pick_port, running, socket_of
from edged.cli.connect import Peer
from edged.cli.exits import CommandError


def test_a_taken_port_is_replaced_by_a_free_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert pick_port(port) != port
    assert pick_port(0) > 0


def test_a_long_state_folder_is_reached_by_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    with pytest.raises(CommandError, match="107 bytes"):
        socket_of(deep)
    monkeypatch.chdir(deep.parent)
    assert socket_of(deep) == Path("e" * 60) / "edged.sock"


def test_a_daemon_that_is_gone_explains_a_broken_connection_with_its_log(tmp_path: Path) -> None:
    with running(["--model", "nowhere.gguf"], tmp_path) as child:
        with pytest.raises(CommandError, match=r"exit code 78\n.*nowhere\.gguf: no such file"):
            child.await_ready(Peer(socket=tmp_path / "edged.sock"))
        with pytest.raises(CommandError, match="exit code 78"), child.answering():
            raise httpx.ReadError("the connection broke")
