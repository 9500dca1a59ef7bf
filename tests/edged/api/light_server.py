"""The real server and application over the ports in memory, on a real Unix socket and a real TCP port."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx

from edged.addresses import TcpListen, UnixListen
from edged.api.app import build_app
from edged.api.listen import open_listeners
from edged.api.server import HttpServer
from edged.settings import ApiSection
from tests.edged.api.light_ports import Book, Completions, Episodes, LightAnswers, LightControl, LightKeys

HANG_S = 30.0  # a guard against hanging, far above what anything here takes


@dataclasses.dataclass(frozen=True)
class Light:
    """A running server, its ports, and one client over each kind of socket."""

    book: Book
    answers: LightAnswers
    control: LightControl
    keys: LightKeys
    server: HttpServer
    socket: Path
    url: str
    unix: httpx.AsyncClient
    tcp: httpx.AsyncClient

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def ask(self, **body: Any) -> dict[str, Any]:
        """One whole answer over the Unix socket."""
        answer = await self.unix.post("/v1/chat/completions", json={**HELLO, **body})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())


HELLO: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "Hello"}]}


@contextlib.asynccontextmanager
async def serving(
    folder: Path, *, adapter_folder: Path | None = None, max_connections: int = 512, **settings: Any
) -> AsyncIterator[Light]:
    """A server in the running loop. `settings`: keys of `[api]`."""
    book = Book()
    answers, control, keys = LightAnswers(book), LightControl(adapter_folder), LightKeys()
    section = ApiSection(**settings)
    app = build_app(
        answers=answers,
        feedback=book,
        episodes=Episodes(book),
        completions=Completions(book),
        control=control,
        keys=keys,
        settings=section,
    )
    socket = folder / "s"
    listeners = open_listeners([UnixListen(socket), TcpListen("127.0.0.1", 0)], any_keys=False)
    server = HttpServer(app, listeners, patience_s=lambda: section.read_timeout_s, max_connections=max_connections)
    await server.start()
    url = "http://" + server.addresses[1].removeprefix("tcp:")
    unix = httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(uds=str(socket)), base_url="http://edged", timeout=HANG_S
    )
    tcp = httpx.AsyncClient(base_url=url, timeout=HANG_S)
    try:
        async with unix, tcp:
            yield Light(book, answers, control, keys, server, socket, url, unix, tcp)
    finally:
        await server.drain(0.0)


@contextlib.contextmanager
def serving_in_thread(folder: Path, **settings: Any) -> Iterator[Light]:
    """The same in a thread of its own, for clients that block."""
    started: list[Light] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with serving(folder, **settings) as light:
            started.append(light)
            ready.set()
            await stop.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        finally:
            ready.set()
            loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(HANG_S)
        assert started, "the server did not start"
        yield started[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(HANG_S)
