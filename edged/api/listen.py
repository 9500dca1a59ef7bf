"""Sockets to listen on: bound here, or handed in by systemd.

- A Unix socket is made with mode 0660: whoever may open the file is trusted. A file left by a daemon that died is
  replaced; one that somebody answers on is not.
- A TCP address that other machines can reach is refused while no API key exists.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

from edged.addresses import Listen, TcpListen, UnixListen
from edged.api.peer import is_loopback

UNIX_MODE = 0o660
BACKLOG = 512
PROBE_TIMEOUT_S = 1.0
# A machine that has said nothing for a minute is asked, and is gone if it does not answer for another half.
KEEP_ALIVE_AFTER_S, KEEP_ALIVE_EVERY_S, KEEP_ALIVE_TRIES = 60, 10, 3


class ListenError(Exception):
    """An address cannot be listened on. The message says why and what to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Listener:
    """A socket that listens. `path`: its file, if we made it; `inode` tells ours from one that came after it."""

    sock: socket.socket
    path: Path | None
    inode: int

    @property
    def address(self) -> str:
        """As clients name it: `unix:PATH` or `tcp:HOST:PORT`."""
        name = self.sock.getsockname()
        if self.sock.family == socket.AF_UNIX:
            return f"unix:{name}"
        host = f"[{name[0]}]" if ":" in name[0] else name[0]
        return f"tcp:{host}:{name[1]}"

    def close(self) -> None:
        """Stop listening and remove the socket's file, unless another daemon has put its own in its place."""
        self.sock.close()
        if self.path is not None:
            with contextlib.suppress(FileNotFoundError):
                if self.path.stat().st_ino == self.inode:
                    self.path.unlink()


def open_listeners(addresses: Sequence[Listen], *, inherited_fds: Sequence[int] = (), any_keys: bool) -> list[Listener]:
    """Bind every address and adopt every inherited descriptor, or none of them.

    Args:
        addresses: from the configuration. `localhost` is every loopback address that the machine has.
        inherited_fds: listening sockets that systemd passed in; they are ours to close, their files are not.
        any_keys: whether an API key exists.
    Raises:
        ListenError
    """
    listeners: list[Listener] = []
    try:
        for fd in inherited_fds:
            listeners.append(_adopt(fd, any_keys))
        for address in addresses:
            match address:
                case UnixListen():
                    listeners.append(_bind_unix(address.path))
                case TcpListen():
                    listeners.extend(_bind_tcp(address, any_keys))
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _bind_unix(path: Path) -> Listener:
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # bind() gives the file the socket's own mode: closed to others from its first moment, then opened to the group.
        os.fchmod(sock.fileno(), 0o600)
        sock.bind(str(path))
        path.chmod(UNIX_MODE)
        sock.listen(BACKLOG)
        return Listener(sock, path, path.stat().st_ino)
    except OSError as error:
        sock.close()
        raise ListenError(f"unix:{path} cannot be bound: {error.strerror or error}") from error


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ListenError(f"unix:{path} cannot be looked at: {error.strerror}") from error
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"unix:{path}: a file that is not a socket is in the way; remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            raise ListenError(f"unix:{path} exists and cannot be tried: {error.strerror or error}") from error
    raise ListenError(f"unix:{path}: another process answers there; stop it or choose another path")


def _bind_tcp(address: TcpListen, any_keys: bool) -> list[Listener]:
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ListenError(f"{address}: the host is not known: {error.strerror}") from error
    places = list(dict.fromkeys((family, place) for family, _, _, _, place in found))
    for _, place in places:
        _check_reach(str(place[0]), str(address), any_keys)
    listeners: list[Listener] = []
    for family, place in places:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _notice_the_lost(sock)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(place)
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            if address.host == "localhost" and family == socket.AF_INET6 and len(places) > 1:
                continue  # a machine without IPv6 may still have ::1 in /etc/hosts
            for listener in listeners:
                listener.close()
            raise ListenError(f"{address} cannot be bound: {error.strerror or error}") from error
        listeners.append(Listener(sock, None, 0))
    return listeners


def _adopt(fd: int, any_keys: bool) -> Listener:
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise ListenError(f"inherited descriptor {fd} is not a socket: {error.strerror or error}") from error
    try:
        if sock.type != socket.SOCK_STREAM or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise ListenError(f"inherited descriptor {fd} is not a listening stream socket; check the .socket unit")
        if sock.family != socket.AF_UNIX:
            _check_reach(str(sock.getsockname()[0]), f"inherited descriptor {fd}", any_keys)
            _notice_the_lost(sock)
    except BaseException:
        sock.close()
        raise
    return Listener(sock, None, 0)


def _notice_the_lost(sock: socket.socket) -> None:
    """Have the kernel end connections whose other machine is gone without a word; accepted sockets inherit this."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_AFTER_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_ALIVE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEP_ALIVE_TRIES)


def _check_reach(host: str, address: str, any_keys: bool) -> None:
    if not any_keys and not is_loopback(host):
        raise ListenError(
            f"{address} can be reached from other machines, and there is no API key yet; "
            "start without it, make one with `edged keys create NAME`, and start again"
        )
