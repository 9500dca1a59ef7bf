"""The service manager's side of the daemon, against a socket that plays the manager."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edged.system.notify import Notifier, handed_in_fds, watchdog_every_s

GUARD_S = 30.0


class Manager:
    """A datagram socket, and what came in on it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(GUARD_S)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)

    @property
    def environment(self) -> dict[str, str]:
        return {"NOTIFY_SOCKET": self.address}

    def next(self) -> list[str]:
        """The lines of the next message."""
        return self._socket.recv(4096).decode().split("\n")

    def waiting(self) -> list[list[str]]:
        """The messages that are there already."""
        found = []
        self._socket.setblocking(False)
        try:
            while True:
                found.append(self.next())
        except BlockingIOError:
            return found
        finally:
            self._socket.settimeout(GUARD_S)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    opened = Manager(str(tmp_path / "notify"))
    yield opened
    opened.close()


def test_ready_tells_the_main_process_and_a_status(manager: Manager) -> None:
    notifier = Notifier(manager.environment)
    notifier.ready("v3 live")
    assert manager.next() == ["READY=1", "STATUS=v3 live", f"MAINPID={os.getpid()}"]
    notifier.close()


def test_an_abstract_address_is_reached(tmp_path: Path) -> None:
    manager = Manager(f"@edged-test-{os.getpid()}-{tmp_path.name}")
    notifier = Notifier(manager.environment)
    notifier.stopping("finishing running answers")
    assert manager.next() == ["STOPPING=1", "STATUS=finishing running answers"]
    notifier.close()
    manager.close()


def test_a_status_that_did_not_change_is_not_sent_again(manager: Manager) -> None:
    notifier = Notifier(manager.environment)
    for line in ("idle", "idle", "training", "idle"):
        notifier.status(line)
    assert manager.waiting() == [["STATUS=idle"], ["STATUS=training"], ["STATUS=idle"]]
    notifier.close()


def test_a_reload_carries_the_monotonic_time(manager: Manager) -> None:
    notifier = Notifier(manager.environment)
    before_us = time.monotonic_ns() // 1000
    notifier.reloading()
    reloading, monotonic = manager.next()
    assert reloading == "RELOADING=1"
    assert before_us <= int(monotonic.removeprefix("MONOTONIC_USEC=")) <= time.monotonic_ns() // 1000
    notifier.close()


def test_without_a_manager_every_message_goes_nowhere() -> None:
    notifier = Notifier({})
    notifier.ready("up")
    notifier.status("idle")
    notifier.reloading()
    notifier.stopping("bye")
    notifier.close()
    notifier.close()


def test_a_manager_that_cannot_be_reached_does_not_stop_the_daemon(tmp_path: Path) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "nobody.sock")})
    notifier.ready("ready")
    notifier.close()


def test_a_manager_that_is_gone_does_no_harm(manager: Manager) -> None:
    notifier = Notifier(manager.environment)
    manager.close()
    notifier.status("still here")
    notifier.close()


def test_a_manager_that_reads_nothing_does_not_block(manager: Manager) -> None:
    notifier = Notifier(manager.environment)
    for number in range(2000):
        notifier.status(f"line {number}")
    assert manager.next() == ["STATUS=line 0"]
    notifier.close()


def test_the_watchdog_is_fed_until_close(manager: Manager) -> None:
    async def main() -> None:
        notifier = Notifier(manager.environment)
        notifier.feed_watchdog(asyncio.get_running_loop(), 0.001)
        for _ in range(3):
            assert await asyncio.to_thread(manager.next) == ["WATCHDOG=1"]
        notifier.close()
        manager.waiting()
        await asyncio.sleep(0.02)
        assert manager.waiting() == []

    asyncio.run(main())


def test_a_blocked_loop_does_not_feed_the_watchdog(manager: Manager) -> None:
    async def main() -> None:
        notifier = Notifier(manager.environment)
        notifier.feed_watchdog(asyncio.get_running_loop(), 0.001)
        await asyncio.to_thread(manager.next)
        manager.waiting()
        time.sleep(0.05)  # fifty times the interval, on the loop itself
        assert manager.waiting() == []
        await asyncio.to_thread(manager.next)
        notifier.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("environment", "every_s"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 10.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}, 10.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": ""}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": ""}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "-5"}, None),
        ({"WATCHDOG_USEC": "²"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_is_fed_three_times_in_its_interval(environment: dict[str, str], every_s: float | None) -> None:
    assert watchdog_every_s(environment, 7) == every_s


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"LISTEN_FDS": "2"},
        {"LISTEN_FDS": "2", "LISTEN_PID": "8"},
        {"LISTEN_FDS": "two", "LISTEN_PID": "7"},
        {"LISTEN_FDS": "²", "LISTEN_PID": "7"},
        {"LISTEN_FDS": "0", "LISTEN_PID": "7"},
    ],
)
def test_no_descriptor_is_taken_that_was_not_handed_in(environment: dict[str, str]) -> None:
    assert handed_in_fds(environment, 7) == []


def test_handed_in_sockets_are_taken_and_not_passed_on_to_children(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "handed.sock"))
    listener.listen()
    program = (
        "import os, socket\n"
        "from edged.system.notify import handed_in_fds\n"
        "fds = handed_in_fds({'LISTEN_FDS': '1', 'LISTEN_PID': str(os.getpid())}, os.getpid())\n"
        "print(fds, os.get_inheritable(3), os.path.basename(socket.socket(fileno=fds[0]).getsockname()))\n"
    )

    def at_three() -> None:
        os.dup2(listener.fileno(), 3)

    result = run_with(program, at_three, listener.fileno())
    listener.close()
    assert result == "[3] False handed.sock"


def run_with(program: str, preexec: Callable[[], None], fd: int) -> str:
    """The output of a fresh interpreter that has `fd` as its descriptor 3."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        preexec_fn=preexec,
        pass_fds=(fd, 3),
        capture_output=True,
        text=True,
        check=True,
        timeout=GUARD_S,
    )
    return done.stdout.strip()
