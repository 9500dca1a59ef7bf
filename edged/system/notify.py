"""The service manager's side of a daemon: readiness, status, watchdog and handed-in sockets (sd_notify(3)).

Without NOTIFY_SOCKET every message goes nowhere, so callers need no ifs. The watchdog is fed from the event loop
itself: a loop that is blocked stops feeding it, which is the point.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping

log = logging.getLogger(__name__)

FIRST_FD = 3  # SD_LISTEN_FDS_START


class Notifier:
    """Sends state to the service manager named by NOTIFY_SOCKET in `environment`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._socket: socket.socket | None = None
        self._last_status = ""
        self._feeding: asyncio.TimerHandle | None = None
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
            try:
                self._socket.connect("\0" + address[1:] if address.startswith("@") else address)
            except OSError as error:
                log.warning("NOTIFY_SOCKET %s cannot be reached, so nobody hears of readiness: %s", address, error)
                self.close()

    def _send(self, *lines: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.send("\n".join(lines).encode())
        except OSError:
            return  # the manager's queue is full or it is gone; the next message carries the newer state

    def ready(self, status: str) -> None:
        self._send("READY=1", f"STATUS={status}", f"MAINPID={os.getpid()}")

    def status(self, status: str) -> None:
        """One line for `systemctl status`; repeated lines are not sent."""
        if status != self._last_status:
            self._last_status = status
            self._send(f"STATUS={status}")

    def reloading(self) -> None:
        """A reload begins; it ends with the next `ready`. RELOADING needs the monotonic time in microseconds."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={_monotonic_us()}")

    def stopping(self, status: str) -> None:
        self._send("STOPPING=1", f"STATUS={status}")

    def feed_watchdog(self, loop: asyncio.AbstractEventLoop, every_s: float) -> None:
        """Feed the watchdog from `loop` until `close`."""
        self._send("WATCHDOG=1")
        self._feeding = loop.call_later(every_s, self.feed_watchdog, loop, every_s)

    def close(self) -> None:
        if self._feeding is not None:
            self._feeding.cancel()
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def watchdog_every_s(environment: Mapping[str, str], pid: int) -> float | None:
    """How often to feed the watchdog: a third of WATCHDOG_USEC, if it is meant for `pid`; else None."""
    text = environment.get("WATCHDOG_USEC", "")
    if not text.isdecimal() or int(text) == 0:
        return None
    if environment.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    return int(text) / 1e6 / 3


def handed_in_fds(environment: Mapping[str, str], pid: int) -> list[int]:
    """The listening descriptors of socket activation, the caller's to close; [] if there are none for `pid`."""
    count = environment.get("LISTEN_FDS", "")
    if environment.get("LISTEN_PID") != str(pid) or not count.isdecimal():
        return []
    fds = list(range(FIRST_FD, FIRST_FD + int(count)))
    for fd in fds:
        os.set_inheritable(fd, False)
    return fds


def _monotonic_us() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
