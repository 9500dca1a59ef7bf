"""Addresses that the daemon listens on: a Unix socket, or TCP.

Nothing here opens one (`edged.api.listen`).
"""

from __future__ import annotations

import dataclasses
import ipaddress
from pathlib import Path

# sockaddr_un.sun_path holds 108 bytes with the closing zero.
UNIX_PATH_MAX_BYTES = 107


@dataclasses.dataclass(frozen=True, slots=True)
class UnixListen:
    """A Unix socket to listen on."""

    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclasses.dataclass(frozen=True, slots=True)
class TcpListen:
    """A TCP address to listen on. Port 0 takes a free one."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. A name other than `localhost` counts as reachable from outside."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"


Listen = UnixListen | TcpListen


def parse_listen(text: str) -> Listen:
    """The address of `unix:PATH`, `tcp:HOST:PORT` or `tcp:[IPV6]:PORT`. Raises ValueError with what is expected."""
    scheme, _, rest = text.partition(":")
    if scheme == "unix":
        if not rest or "\0" in rest:
            raise ValueError("a path after unix:")
        if len(rest.encode("utf-8", "surrogateescape")) > UNIX_PATH_MAX_BYTES:
            raise ValueError(f"a socket path of at most {UNIX_PATH_MAX_BYTES} bytes")
        return UnixListen(Path(rest))
    if scheme != "tcp":
        raise ValueError("unix:PATH or tcp:HOST:PORT")
    host, colon, port = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 address in brackets, as in tcp:[::1]:8437")
    if not colon or not host or not host.isprintable() or any(c in host for c in "/[]@ "):
        raise ValueError("tcp:HOST:PORT with a host name or address")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise ValueError("a port from 0 to 65535")
    return TcpListen(host, int(port))
