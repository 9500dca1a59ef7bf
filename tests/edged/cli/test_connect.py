"""Finding the daemon, and what becomes of its answers."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from edged.cli.connect import Client, Peer, find_peer, message_of, opened, refusal, refusal_of_socket
from edged.cli.exits import NO_DAEMON, CommandError, NoDaemon


def test_the_socket_in_var_comes_before_the_system_socket() -> None:
    found = find_peer(None, exists=lambda path: True, why_not=lambda path: None)
    assert found == Peer(socket=Path("var/edged.sock"))


def test_the_system_socket_is_taken_where_var_has_none() -> None:
    found = find_peer(None, exists=lambda path: path.is_absolute(), why_not=lambda path: None)
    assert found == Peer(socket=Path("/run/edged/edged.sock"))


def test_a_socket_that_a_dead_daemon_left_behind_does_not_hide_the_system_socket() -> None:
    found = find_peer(
        None, exists=lambda path: True, why_not=lambda path: None if path.is_absolute() else "Connection refused"
    )
    assert found == Peer(socket=Path("/run/edged/edged.sock"))


def test_if_no_default_socket_answers_the_error_names_the_stale_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "var").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind("var/edged.sock")  # bound, and nobody listens any more
    with pytest.raises(NoDaemon, match=r"no daemon answers at unix:var/edged\.sock: Connection refused") as raised:
        find_peer(None, exists=lambda path: not path.is_absolute())
    assert "edged run" in raised.value.hint


def test_without_any_socket_there_is_no_daemon() -> None:
    with pytest.raises(NoDaemon, match=r"var/edged\.sock") as raised:
        find_peer(None, exists=lambda path: False)
    assert raised.value.code == NO_DAEMON
    assert "edged run" in raised.value.hint


def test_connect_names_a_socket_or_an_url() -> None:
    assert find_peer("unix:/a/b.sock") == Peer(socket=Path("/a/b.sock"))
    assert find_peer("http://127.0.0.1:8437/") == Peer(url="http://127.0.0.1:8437")


@given(st.text(max_size=20))
def test_any_other_connect_is_a_usage_error(text: str) -> None:
    if text.startswith(("unix:", "http://", "https://")):
        return
    with pytest.raises(typer.BadParameter, match="expected unix:PATH"):
        find_peer(text)


def test_an_error_body_of_another_shape_gives_the_fallback() -> None:
    assert message_of({"error": {"message": "no such version"}}, fallback="?") == "no such version"
    for body in ([], None, {"error": "text"}, {"error": {}}, {"detail": "x"}):
        assert message_of(body, fallback="?") == "?"


def test_an_answer_without_json_asks_whether_the_peer_is_edged() -> None:
    answer = httpx.Response(502, text="<html>", request=httpx.Request("GET", "http://box/v1/status"))
    assert "is it edged?" in refusal(answer).message


def test_a_refused_key_says_how_to_pass_one() -> None:
    answer = httpx.Response(401, json={"error": {"message": "no key"}}, request=httpx.Request("GET", "http://box/"))
    assert "--api-key" in refusal(answer).hint


def test_opening_a_dead_socket_reports_no_daemon(tmp_path: Path) -> None:
    with pytest.raises(NoDaemon, match=r"edged\.sock: No such file"), opened(f"unix:{tmp_path}/edged.sock"):
        pass


def test_a_client_speaks_over_the_socket_and_over_tcp(light_daemon) -> None:
    for peer in (Peer(socket=light_daemon.socket), Peer(url=light_daemon.url)):
        client = Client(peer)
        assert client.get("/v1/status")["adapter"]["version"] == 3
        client.close()
    assert refusal_of_socket(light_daemon.socket) is None


def test_a_stream_that_the_daemon_breaks_off_is_an_error(light_daemon) -> None:
    light_daemon.answers.fails_after = 2
    client = Client(Peer(socket=light_daemon.socket))
    question = {"model": "default", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(CommandError, match="the engine died"):
        list(client.events("/v1/chat/completions", question))
    client.close()
