from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edged.addresses import TcpListen, UnixListen
from edged.api.listen import Listener, ListenError, open_listeners


@contextmanager
def opened(
    *addresses: UnixListen | TcpListen, fds: list[int] | None = None, any_keys: bool = False
) -> Iterator[list[Listener]]:
    listeners = open_listeners(addresses, inherited_fds=fds or [], any_keys=any_keys)
    try:
        yield listeners
    finally:
        for listener in listeners:
            listener.close()


def test_a_unix_socket_is_for_owner_and_group_and_goes_with_its_listener(tmp_path: Path) -> None:
    path = tmp_path / "s"
    old_umask = os.umask(0o077)
    try:
        with opened(UnixListen(path)) as (listener,):
            assert stat.S_IMODE(path.stat().st_mode) == 0o660
            assert listener.address == f"unix:{path}"
    finally:
        os.umask(old_umask)
    assert not path.exists()


def test_a_socket_file_that_a_dead_daemon_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with opened(UnixListen(path)), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_socket_that_somebody_answers_on_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(UnixListen(path)):
        with pytest.raises(ListenError, match="another process answers there"):
            open_listeners([UnixListen(path)], any_keys=False)
        assert path.exists()


def test_a_file_that_is_no_socket_is_never_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(ListenError, match="not a socket"):
        open_listeners([UnixListen(path)], any_keys=False)
    assert path.read_text() == "precious"


def test_the_socket_of_a_successor_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(UnixListen(path)):
        path.unlink()
        successor = open_listeners([UnixListen(path)], any_keys=False)
    assert path.exists()
    successor[0].close()


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ListenError, match="No such file"):
        open_listeners([UnixListen(tmp_path / "none" / "s")], any_keys=False)


def test_loopback_is_bound_without_keys_and_port_0_becomes_a_real_one() -> None:
    with opened(TcpListen("127.0.0.1", 0)) as (listener,):
        assert int(listener.address.rpartition(":")[2]) > 0


def test_localhost_is_bound() -> None:
    with opened(TcpListen("localhost", 0)) as listeners:
        assert listeners


def test_an_address_beyond_loopback_needs_a_key() -> None:
    with pytest.raises(ListenError, match="edged keys create"):
        open_listeners([TcpListen("0.0.0.0", 0)], any_keys=False)
    with opened(TcpListen("0.0.0.0", 0), any_keys=True) as (listener,):
        assert listener.address.startswith("tcp:0.0.0.0:")


def test_a_port_that_is_taken_is_named_and_nothing_stays_open(tmp_path: Path) -> None:
    with opened(TcpListen("127.0.0.1", 0)) as (first,):
        port = int(first.address.rpartition(":")[2])
        with pytest.raises(ListenError, match=f"tcp:127.0.0.1:{port} cannot be bound"):
            open_listeners([UnixListen(tmp_path / "s"), TcpListen("127.0.0.1", port)], any_keys=False)
    assert not (tmp_path / "s").exists()


def test_an_inherited_socket_is_used_and_its_file_is_left(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as handed_in:
        handed_in.bind(str(path))
        handed_in.listen()
        with opened(fds=[os.dup(handed_in.fileno())]) as (listener,):
            assert listener.address == f"unix:{path}"
    assert path.exists()


def test_an_inherited_descriptor_must_be_a_listening_socket(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file, pytest.raises(ListenError, match="is not a socket"):
        open_listeners([], inherited_fds=[file.fileno()], any_keys=False)
    with socket.socket(socket.AF_UNIX) as idle:
        fd = os.dup(idle.fileno())
        with pytest.raises(ListenError, match="not a listening"):
            open_listeners([], inherited_fds=[fd], any_keys=False)


def test_an_inherited_socket_beyond_loopback_needs_a_key_too() -> None:
    with socket.socket(socket.AF_INET) as handed_in:
        handed_in.bind(("0.0.0.0", 0))
        handed_in.listen()
        with pytest.raises(ListenError, match="other machines"):
            open_listeners([], inherited_fds=[os.dup(handed_in.fileno())], any_keys=False)
