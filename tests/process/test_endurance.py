"""Ten thousand requests, and what the daemon's memory does meanwhile.

Nothing is rated: a rating that waits for its update is kept in memory, half a kilobyte each, until it is used.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.load import UnixConnection

REQUESTS = 10_000
WARM_UP = 3_000  # caches of SQLite and of the allocator fill first
CLIENTS = 4
LOOKS = 100
GROWTH_MAX_BYTES = 5 * 10**6  # over all requests, by the slope of a straight line through the looks


def rss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def ask(socket_path: Path, numbers: range) -> None:
    """Questions of all kinds, one after the other on one connection."""
    connection = UnixConnection(socket_path)
    try:
        for number in numbers:
            body: dict[str, Any] = {
                "messages": [{"role": "user", "content": f"Question {number}?"}],
                "max_tokens": 4 + number % 5,
                "n": 1 + number % 2,
                "store": number % 3 == 0,
                "metadata": {"number": str(number)},
            }
            status, answer = connection.post("/v1/chat/completions", body)
            assert status == 200, answer
    finally:
        connection.close()


def ask_all(socket_path: Path, first: int, last: int) -> None:
    """The questions from `first` to `last`, from several clients at once."""
    failures: list[BaseException] = []

    def run(numbers: range) -> None:
        try:
            ask(socket_path, numbers)
        except BaseException as error:
            failures.append(error)

    clients = [threading.Thread(target=run, args=(range(first + at, last, CLIENTS),)) for at in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert failures == []


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_ten_thousand_requests_leave_the_daemon_as_large_as_it_was(
    start_light: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = start_light()
    socket_path = daemon.state / "edged.sock"
    ask_all(socket_path, 0, WARM_UP)
    numbers, sizes = [], []
    for first in range(0, REQUESTS, REQUESTS // LOOKS):
        ask_all(socket_path, WARM_UP + first, WARM_UP + first + REQUESTS // LOOKS)
        numbers.append(first)
        sizes.append(rss_bytes(daemon.process.pid))
    slope, _ = np.polyfit(numbers, sizes, 1)
    with capsys.disabled():
        print(
            f"\nafter {WARM_UP} requests {sizes[0] / 1e6:.1f} MB, after {REQUESTS} more {sizes[-1] / 1e6:.1f} MB;",
            end=" ",
        )
        print(f"slope {slope * REQUESTS / 1e6:+.2f} MB in {REQUESTS} requests")
    assert slope * REQUESTS < GROWTH_MAX_BYTES
