from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path

import pytest
import uvloop

from edged.api.peer import is_loopback
from tests.edged.api.light_server import HANG_S, HELLO, Light, serving


async def until_running(light: Light, n: int = 1) -> None:
    async with asyncio.timeout(HANG_S):
        while len(light.answers.running) < n:
            await asyncio.sleep(0.005)


def test_draining_lets_running_answers_finish(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            light.answers.pause_s = 0.05
            whole = asyncio.create_task(light.ask())
            await until_running(light)
            await light.server.drain(HANG_S)

            assert (await whole)["choices"][0]["finish_reason"] == "stop"
            assert not light.socket.exists()
            with pytest.raises(OSError, match=r"."):
                socket.create_connection(("127.0.0.1", light.port), timeout=1).close()

    asyncio.run(run())


def test_draining_cuts_what_does_not_finish_and_says_so(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            light.answers.words = ["word"] * 10_000
            light.answers.pause_s = 0.01
            whole = asyncio.create_task(light.unix.post("/v1/chat/completions", json=HELLO))
            stream = asyncio.create_task(light.tcp.post("/v1/chat/completions", json={**HELLO, "stream": True}))
            await until_running(light, 2)
            await light.server.drain(0.05)

            cut = await whole
            assert (cut.status_code, cut.json()["error"]["code"]) == (503, "shutting_down")
            assert int(cut.headers["retry-after"]) >= 1
            last = (await stream).text.strip().rpartition("\n\n")[2]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
            assert len(light.answers.cancelled) == 2

    asyncio.run(run())


def test_streams_of_events_end_at_once_when_draining(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light, light.unix.stream("GET", "/v1/events") as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            async with asyncio.timeout(HANG_S / 2):
                await light.server.drain(HANG_S)
                assert [line async for line in lines if line] == []

    asyncio.run(run())


def test_it_leaves_signals_to_the_daemon(tmp_path: Path) -> None:
    async def run() -> None:
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        async with serving(tmp_path):
            assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before

    asyncio.run(run())


def test_it_serves_on_uvloop_with_peer_credentials(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            await light.ask()
            assert light.answers.asked[0].caller.name == f"uid:{os.getuid()}"
            assert (await light.tcp.get("/v1/status")).status_code == 200

    uvloop.run(run())


def test_answers_have_a_date(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            assert "date" in (await light.unix.get("/healthz")).headers

    asyncio.run(run())


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_loopback_addresses(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.168.1.1", "::ffff:10.0.0.1", "fe80::1%eth0"])
def test_addresses_that_others_can_reach(address: str) -> None:
    assert not is_loopback(address)
