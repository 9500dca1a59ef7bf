from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from tests.edged.api.light_server import HANG_S, HELLO, serving

MIB = 2**20


async def exchange(port: int, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """Everything that the server says to these bytes until it hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        async with asyncio.timeout(HANG_S):
            return await reader.read()
    finally:
        writer.close()


HEAD = b"POST /v1/feedback HTTP/1.1\r\nHost: localhost\r\n"


def test_a_body_of_10_mib_is_refused_and_the_client_can_read_why(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            for client in (light.unix, light.tcp):
                answer = await client.post("/v1/chat/completions", content=b"x" * (10 * MIB))
                assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
                assert (await client.post("/v1/chat/completions", json=HELLO)).status_code == 200

    asyncio.run(run())


def test_a_chunked_body_without_a_length_meets_the_same_limit(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:

            async def stream() -> AsyncIterator[bytes]:
                for _ in range(40):
                    yield b"x" * (MIB // 4)

            answer = await light.unix.post("/v1/chat/completions", content=stream())
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
            assert (await light.unix.get("/healthz")).status_code == 200

    asyncio.run(run())


def test_a_body_up_to_the_limit_is_taken(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            padding = " " * (MIB - 200)
            answer = await light.unix.post(
                "/v1/chat/completions", content='{"messages": [{"role": "user", "content": "x"}]}' + padding
            )
            assert answer.status_code == 200

    asyncio.run(run())


def test_a_body_that_drips_is_refused_in_time(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, read_timeout_s=0.3) as light:
            head = HEAD + b"Content-Length: 1000\r\n\r\n"
            said = await exchange(light.port, head, *[b"x"] * 10, pause_s=0.05)
            assert said.startswith(b"HTTP/1.1 408 ")
            assert b'"request_timeout"' in said

    asyncio.run(run())


def test_a_head_that_never_ends_is_hung_up_on(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, read_timeout_s=0.3) as light:
            assert await exchange(light.port, HEAD) == b""
            assert await exchange(light.port) == b""

    asyncio.run(run())


def test_the_head_of_a_second_request_has_the_same_time(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, read_timeout_s=0.3) as light:
            first = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
            said = await exchange(light.port, first, b"GET /healthz HTT", pause_s=0.1)
            assert said.count(b"HTTP/1.1 200 OK") == 1

    asyncio.run(run())


def test_a_head_that_is_too_large_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            said = await exchange(light.port, HEAD + b"X-Long: " + b"x" * 100_000)
            assert said.startswith(b"HTTP/1.1 431 ")
            assert b'"head_too_large"' in said

    asyncio.run(run())


def test_what_is_not_http_gets_an_error_of_the_usual_shape(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            said = await exchange(light.port, b"\x16\x03\x01\x02\x00\x01\x00 hello\r\n\r\n")
            assert said.startswith(b"HTTP/1.1 400 ")
            assert b'"invalid_http"' in said

    asyncio.run(run())


def test_connections_beyond_the_limit_are_told_to_come_back(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, max_connections=2) as light:
            waiting = [await asyncio.open_connection("127.0.0.1", light.port) for _ in range(2)]
            said = await exchange(light.port, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert said.startswith(b"HTTP/1.1 429 ")
            assert b"retry-after: 1" in said.lower()
            for _, writer in waiting:
                writer.close()
                await writer.wait_closed()
            await asyncio.sleep(0.05)
            said = await exchange(light.port, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert said.startswith(b"HTTP/1.1 200 ")

    asyncio.run(run())
