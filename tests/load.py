"""Rating load on a daemon that is killed under it, and what must be there afterwards."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

LOAD_THREADS = 4


class Load:
    """Asks and rates from several threads until the daemon is gone; remembers what was acknowledged."""

    def __init__(self, socket_path: Path, seed: int) -> None:
        self._path = socket_path
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self.acknowledged: list[str] = []
        self.episodes: list[str] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(LOAD_THREADS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            connection = UnixConnection(self._path)
            try:
                while not self._stop.is_set():
                    self._ask_and_rate(connection)
            except (OSError, http.client.HTTPException):
                time.sleep(0.01)  # killed: what was sent last may or may not be there
            finally:
                connection.close()

    def _ask_and_rate(self, connection: UnixConnection) -> None:
        body = {"model": "default", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        status, answer = connection.post("/v1/chat/completions", body)
        if status != 200:
            return
        self.episodes.append(answer["id"])
        body = {"completion_id": answer["id"], "rating": self._random.choice([-1.0, 1.0])}
        status, rated = connection.post("/v1/feedback", body)
        if status == 201:
            self.acknowledged.append(rated["id"])


class UnixConnection(http.client.HTTPConnection):
    """One kept-alive connection; unlike httpx it leaves no socket open when the daemon is killed under it."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = self.getresponse()
        return response.status, json.loads(response.read())


def check_nothing_lost(daemon: Any, acknowledged: list[str], episodes: list[str]) -> None:
    stored = daemon.all_feedback()
    assert len(stored) == len(set(stored))
    assert set(acknowledged) <= set(stored)
    for completion_id in episodes:
        found = daemon.client.get("/v1/feedback", params={"completion_id": completion_id})
        assert found.status_code == 200
        assert len(found.json()["data"]) <= 1
