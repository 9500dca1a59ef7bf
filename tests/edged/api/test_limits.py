from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import pytest

from edged.api import limits
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
            said = await exchange(light.port, head, *[b"x"] * 7, pause_s=0.05)
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


GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


async def hang_up(connections: Iterable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
    for _, writer in connections:
        writer.transport.abort()
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            await writer.wait_closed()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(0.005)


def test_connections_beyond_the_limit_are_told_to_come_back_while_all_others_are_owed_an_answer(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, max_connections=2) as light:
            light.answers.pause_s = HANG_S
            asking = [asyncio.create_task(light.tcp.post("/v1/chat/completions", json=HELLO)) for _ in range(2)]
            await until(lambda: len(light.answers.running) == 2)
            said = await exchange(light.port, GET)
            assert said.startswith(b"HTTP/1.1 429 ")
            assert b"retry-after: 1" in said.lower()
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            await until(lambda: not light.answers.running)
            assert (await exchange(light.port, GET)).startswith(b"HTTP/1.1 200 ")

    asyncio.run(run())


def test_who_owes_a_request_the_longest_makes_room(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, max_connections=3) as light:
            light.answers.pause_s = 0.2
            asking = asyncio.create_task(light.ask())
            await until(lambda: bool(light.answers.running))
            silent = [await asyncio.open_connection("127.0.0.1", light.port) for _ in range(2)]
            silent[1][1].write(HEAD + b"Content-Length: 100\r\n\r\nhalf")
            await asyncio.sleep(0.05)

            assert (await exchange(light.port, GET)).startswith(b"HTTP/1.1 200 ")
            async with asyncio.timeout(HANG_S):
                with contextlib.suppress(ConnectionResetError):
                    assert await silent[0][0].read() == b""
            assert not silent[1][0].at_eof()
            assert (await asking)["choices"][0]["finish_reason"] == "stop"
            await hang_up(silent)

    asyncio.run(run())


def test_a_reader_that_takes_nothing_is_left_and_one_that_is_slow_is_not(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, read_timeout_s=2.0) as light:
            light.answers.words = ["word " * 100_000] * 20
            body = b'{"messages": [{"role": "user", "content": "x"}], "stream": true}'
            asked = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
            slow, stalled = [await asyncio.open_connection("127.0.0.1", light.port, limit=2**16) for _ in range(2)]
            for _, writer in (slow, stalled):
                writer.write(asked + body)
            taken = b""
            while b"[DONE]" not in taken:
                piece = await slow[0].read(2**20)
                assert piece, "the slow reader was left"
                taken = taken[-16:] + piece
                await asyncio.sleep(0.01)
            await until(lambda: len(light.answers.cancelled) == 1)
            await hang_up((slow, stalled))

    asyncio.run(run())


def test_a_body_in_many_tiny_chunks_is_refused_and_one_in_some_is_not(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            head = HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
            said = await exchange(light.port, head + b"1\r\n \r\n" * 300)
            assert said.startswith(b"HTTP/1.1 400 ")
            assert b'"chunks_too_small"' in said
            said = await exchange(light.port, head + b"1\r\n \r\n" * 200 + b"0\r\n\r\n")
            assert b'"invalid_json"' in said
            said = await exchange(
                light.port, head + b"28\r\n" + b" " * 40 + b"\r\n" + b"28\r\n" + b" " * 40 + b"\r\n0\r\n\r\n"
            )
            assert b'"invalid_json"' in said

    asyncio.run(run())


def test_unfinished_bodies_together_have_a_limit_that_small_ones_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HELD_BYTES_MAX", 0)  # the limit is twice the largest body then

    async def run() -> None:
        async with serving(tmp_path, max_body_bytes=MIB) as light:
            large = HEAD + b"Content-Length: %d\r\n\r\n" % MIB + b" " * (MIB - 1)
            held = [await asyncio.open_connection("127.0.0.1", light.port) for _ in range(3)]
            for _, writer in held:
                writer.write(large)
                await writer.drain()
            async with asyncio.timeout(HANG_S):
                lines = [asyncio.create_task(reader.readline()) for reader, _ in held]
                done, waiting = await asyncio.wait(lines, return_when=asyncio.FIRST_COMPLETED)
            assert [task.result() for task in done] == [b"HTTP/1.1 429 Too Many Requests\r\n"]
            for task in waiting:
                task.cancel()
            await light.ask()
            await hang_up(held)
            await asyncio.sleep(0.05)
            for client in (light.unix, light.tcp):  # what was held is let go
                whole = await client.post("/v1/feedback", content=b" " * MIB)
                assert whole.json()["error"]["code"] == "invalid_json"

    asyncio.run(run())
