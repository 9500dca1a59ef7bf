"""A light daemon for clients: the real HTTP server and routes of `edged.api` over the ports in memory."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from edged.addresses import TcpListen, UnixListen
from edged.api.app import build_app
from edged.api.listen import open_listeners
from edged.api.server import HttpServer
from edged.settings import ApiSection

START_GUARD_S = 30.0
TURNS_TO_ACCEPT = 10


def _light_ports() -> ModuleType:
    name = "edged_light_ports"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "api" / "light_ports.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LightDaemon:
    """`socket` and `url`: where it listens. The other fields are its ports, to be set up and looked at by a test."""

    socket: Path
    url: str
    book: Any
    answers: Any
    control: Any
    keys: Any

    @property
    def connect(self) -> str:
        return f"unix:{self.socket}"


@pytest.fixture
def light_daemon(tmp_path: Path) -> Iterator[LightDaemon]:
    """Listens on a Unix socket in `tmp_path` and on a free TCP port until the test ends."""
    ports = _light_ports()
    book, control, keys = ports.Book(), ports.LightControl(tmp_path), ports.LightKeys()
    answers = ports.LightAnswers(book)
    socket = tmp_path / "edged.sock"
    listeners = open_listeners([UnixListen(socket), TcpListen("127.0.0.1", 0)], any_keys=False)
    url = listeners[1].address.replace("tcp:", "http://")
    app = build_app(
        answers=answers,
        feedback=book,
        episodes=ports.Episodes(book),
        completions=ports.Completions(book),
        control=control,
        keys=keys,
        settings=ApiSection(),
    )
    loop = asyncio.new_event_loop()
    started = threading.Event()
    stop = asyncio.Event()

    async def serve() -> None:
        server = HttpServer(app, listeners, patience_s=lambda: 30.0)
        await server.start()
        started.set()
        await stop.wait()
        for _ in range(TURNS_TO_ACCEPT):  # a connection of the test's last moment becomes one that drain knows
            await asyncio.sleep(0)
        await server.drain(1.0)
        await asyncio.sleep(0.01)  # aborted transports close in the next turn of the loop

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="light-daemon")
    thread.start()
    try:
        assert started.wait(START_GUARD_S)
        yield LightDaemon(socket=socket, url=url, book=book, answers=answers, control=control, keys=keys)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(START_GUARD_S)
        loop.close()
