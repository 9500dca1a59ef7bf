"""Who is at the other end of a connection, and what a stopping server tells the requests that still run.

`edged.api.connection` puts both into the `state` of every request's ASGI scope; the rest of the API reads them here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import socket
import struct
from typing import Any, Literal, cast

from starlette.types import Scope

PEER = "edged.peer"
SHUTDOWN = "edged.shutdown"

_UCRED = struct.Struct("=iII")  # struct ucred: pid_t, uid_t, gid_t


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """listener: where the connection came in; `network` is a TCP address that other machines can reach.
    uid: of the process at the other end of a Unix socket, as the kernel saw it at connect; None over TCP."""

    listener: Literal["unix", "loopback", "network"]
    uid: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Shutdown:
    """closing: no new work, streams without end stop now. cut: answers that still run stop now."""

    closing: asyncio.Event
    cut: asyncio.Event


def peer_of_socket(sock: Any) -> Peer:
    """What the kernel knows of a connected socket (a `socket.socket`, or the event loop's view of one)."""
    if sock.family == socket.AF_UNIX:
        _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        return Peer("unix", uid)
    return Peer("loopback" if is_loopback(sock.getsockname()[0]) else "network", None)


def is_loopback(address: str) -> bool:
    """Whether an IP address in text form can be reached from this machine only."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def peer_of(scope: Scope) -> Peer:
    """Who is at the other end of the request's connection."""
    return cast(Peer, scope["state"][PEER])


def shutdown_of(scope: Scope) -> Shutdown:
    """The events by which a long answer learns that the server stops."""
    return cast(Shutdown, scope["state"][SHUTDOWN])
