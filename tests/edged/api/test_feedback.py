from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.api.feedback import BATCHES_MAX, GROUP_BYTES, GROUP_LINES, LINE_MAX_BYTES, REJECTED_SHOWN_MAX, lines_of
from tests.edged.api.light_server import HELLO, Light, serving


async def rate(light: Light, headers: dict[str, str] | None = None, **body: Any) -> tuple[int, dict[str, Any]]:
    answer = await light.unix.post("/v1/feedback", json=body, headers=headers)
    return answer.status_code, answer.json()


@pytest.mark.parametrize(("given_rating", "kept"), [("up", 1.0), ("down", -1.0), (0.25, 0.25), (-1, -1.0), (0, 0.0)])
def test_a_rating_is_a_thumb_or_a_number(tmp_path: Path, given_rating: Any, kept: float) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            completion_id = (await light.ask())["id"]
            status, body = await rate(light, completion_id=completion_id, rating=given_rating)

            assert status == 201
            assert (body["completion_id"], body["choice"], body["rating"]) == (completion_id, 0, kept)
            assert body["replaces"] is None
            assert body["id"] == light.book.rows[0].id

    asyncio.run(run())


@pytest.mark.parametrize("rating", [True, False, 1.01, -2, "good", [], {}, "1"])
def test_anything_else_is_no_rating(tmp_path: Path, rating: Any) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            completion_id = (await light.ask())["id"]
            status, body = await rate(light, completion_id=completion_id, rating=rating)

            assert (status, body["error"]["param"]) == (400, "rating")
            assert not light.book.rows

    asyncio.run(run())


def test_a_correction_needs_no_rating_but_one_of_them_must_be_there(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            completion_id = (await light.ask())["id"]
            assert (await rate(light, completion_id=completion_id, correction="Hi."))[1]["rating"] is None
            status, body = await rate(light, completion_id=completion_id, correction=" ")
            assert (status, body["error"]["param"]) == (400, "correction")
            status, body = await rate(light, completion_id=completion_id, reason="just so")
            assert (status, body["error"]["param"]) == (400, "rating")

    asyncio.run(run())


def test_rating_again_replaces(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            completion_id = (await light.ask())["id"]
            _, first = await rate(light, completion_id=completion_id, rating="up")
            _, second = await rate(light, completion_id=completion_id, rating="down")

            assert second["replaces"] == first["id"]
            assert second["id"] != first["id"]

    asyncio.run(run())


def test_an_unknown_completion_is_404(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            status, body = await rate(light, completion_id="chatcmpl-none", rating=1)
            assert (status, body["error"]["code"]) == (404, "completion_not_found")

    asyncio.run(run())


def test_an_answer_that_still_runs_cannot_be_rated(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            light.answers.running.add("chatcmpl-now")
            status, body = await rate(light, completion_id="chatcmpl-now", rating=1)
            assert (status, body["error"]["code"]) == (409, "completion_running")

    asyncio.run(run())


def test_an_idempotency_key_repeats_the_answer_or_conflicts(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            completion_id = (await light.ask())["id"]
            key = {"idempotency-key": "k-1"}
            _, first = await rate(light, key, completion_id=completion_id, rating=1)
            status, again = await rate(light, key, completion_id=completion_id, rating=1)
            assert (status, again) == (201, first)
            status, body = await rate(light, key, completion_id=completion_id, rating=-1)
            assert (status, body["error"]["code"]) == (409, "idempotency_conflict")
            status, body = await rate(light, {"idempotency-key": "k" * 256}, completion_id=completion_id, rating=1)
            assert (status, body["error"]["param"]) == (400, "Idempotency-Key")

    asyncio.run(run())


def test_ratings_are_listed_in_pages_and_shown_one_by_one(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            completion_id = (await light.ask(n=3))["id"]
            ids = [(await rate(light, completion_id=completion_id, choice=i, rating=i / 2))[1]["id"] for i in range(3)]
            first = (await light.unix.get("/v1/feedback", params={"limit": 2})).json()
            rest = (await light.unix.get("/v1/feedback", params={"after": ids[1]})).json()
            shown = (await light.unix.get(f"/v1/feedback/{ids[2]}")).json()

            assert ([row["id"] for row in first["data"]], first["has_more"]) == (ids[:2], True)
            assert ([row["id"] for row in rest["data"]], rest["has_more"]) == (ids[2:], False)
            assert shown["rating"] == 1.0
            assert (await light.unix.get("/v1/feedback/none")).json()["error"]["code"] == "feedback_not_found"
            assert (await light.unix.get("/v1/feedback?after=none")).status_code == 404

    asyncio.run(run())


def ndjson(*lines: Any) -> bytes:
    return b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)


async def send_batch(light: Light, content: Any, **headers: str) -> dict[str, Any]:
    answer = await light.unix.post("/v1/feedback/batch", content=content, headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_batch_keeps_the_good_lines_and_names_the_bad_ones(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            good = {"completion_id": (await light.ask())["id"], "rating": "up"}
            light.answers.running.add("chatcmpl-now")
            report = await send_batch(
                light,
                ndjson(
                    good,
                    b"not json\n",
                    {**good, "rating": 7},
                    b"\n",
                    {**good, "completion_id": "chatcmpl-none"},
                    {**good, "completion_id": "chatcmpl-now"},
                    b"\xff\xfe\n",
                    good,
                ),
            )

            assert (report["accepted"], report["rejected_total"]) == (2, 5)
            assert [(entry["line"], entry["error"]["code"]) for entry in report["rejected"]] == [
                (2, "invalid_json"),
                (3, "invalid_value"),
                (5, "completion_not_found"),
                (6, "completion_running"),
                (7, "invalid_json"),
            ]

    asyncio.run(run())


def test_a_batch_has_no_limit_on_the_whole_and_commits_in_groups(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, max_body_bytes=1024) as light:
            good = {"completion_id": (await light.ask())["id"], "rating": 1}
            line = ndjson(good)

            async def stream() -> AsyncIterator[bytes]:
                for _ in range(600):
                    yield line[:10]
                    yield line[10:]

            report = await send_batch(light, stream())

            assert (report["accepted"], report["rejected"]) == (600, [])
            assert light.book.commits == [GROUP_LINES, GROUP_LINES, 600 - 2 * GROUP_LINES]

    asyncio.run(run())


def test_a_group_of_long_lines_is_stored_before_it_is_full(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            good = {"completion_id": (await light.ask())["id"], "rating": 1, "correction": "x" * (GROUP_BYTES // 4)}
            report = await send_batch(light, ndjson(good) * 10)

            assert report["accepted"] == 10
            assert light.book.commits == [4, 4, 2]

    asyncio.run(run())


def test_so_many_batches_at_once_and_no_more(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            whole = asyncio.Event()
            started = 0

            async def slow() -> AsyncIterator[bytes]:
                nonlocal started
                yield b"\n"
                started += 1
                await whole.wait()
                yield b"\n"

            batches = [asyncio.create_task(send_batch(light, slow())) for _ in range(BATCHES_MAX)]
            while started < BATCHES_MAX:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            refused = await light.unix.post("/v1/feedback/batch", content=b"\n")
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_batches")
            whole.set()
            assert all(report["accepted"] == 0 for report in await asyncio.gather(*batches))
            assert (await light.unix.post("/v1/feedback/batch", content=b"\n")).status_code == 200

    asyncio.run(run())


def test_one_line_has_a_limit_and_the_lines_after_it_count(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            good = {"completion_id": (await light.ask())["id"], "rating": 1}
            report = await send_batch(light, b"x" * (3 * LINE_MAX_BYTES) + b"\n" + ndjson(good))

            assert report["accepted"] == 1
            assert [(e["line"], e["error"]["code"]) for e in report["rejected"]] == [(1, "line_too_large")]

    asyncio.run(run())


def test_the_list_of_bad_lines_is_bounded_and_the_rest_is_counted(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            report = await send_batch(light, b"{}\n" * (REJECTED_SHOWN_MAX + 7))

            assert len(report["rejected"]) == REJECTED_SHOWN_MAX
            assert report["rejected_total"] == REJECTED_SHOWN_MAX + 7

    asyncio.run(run())


def test_a_batch_that_is_sent_twice_with_one_key_is_stored_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            good = {"completion_id": (await light.ask())["id"], "rating": 1}
            for _ in range(2):
                report = await send_batch(light, ndjson(good, {**good, "rating": -1}), **{"Idempotency-Key": "b-1"})
                assert report["accepted"] == 2

            assert len(light.book.rows) == 2

    asyncio.run(run())


def test_a_batch_that_stops_coming_says_what_is_stored(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, read_timeout_s=0.2) as light:
            good = {"completion_id": (await light.ask())["id"], "rating": 1}

            async def stall() -> AsyncIterator[bytes]:
                yield ndjson(good)
                await asyncio.sleep(2)
                yield ndjson(good)

            answer = await light.unix.post("/v1/feedback/batch", content=stall())

            assert answer.status_code == 408
            assert "1 ratings" in answer.json()["error"]["message"]
            assert len(light.book.rows) == 1

    asyncio.run(run())


def test_a_preference_names_two_different_answers(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            pair = {"messages": HELLO["messages"], "chosen": "Hi.", "rejected": "Go away."}
            stored = await light.unix.post("/v1/preferences", json=pair)
            same = await light.unix.post("/v1/preferences", json={**pair, "rejected": "Hi."})

            assert stored.status_code == 201
            assert stored.json()["chosen"] == "Hi."
            assert light.book.preferences[0].caller.startswith("uid:")
            assert (same.status_code, same.json()["error"]["param"]) == (400, "rejected")
            for field, changes in (
                ("rejected", {"rejected": "Hi. "}),
                ("chosen", {"chosen": " \n"}),
                ("messages", {"messages": [*HELLO["messages"], {"role": "assistant", "content": "Hm."}]}),
            ):
                odd = await light.unix.post("/v1/preferences", json={**pair, **changes})
                assert (odd.status_code, odd.json()["error"]["param"]) == (400, field)

    asyncio.run(run())


@given(st.lists(st.binary(max_size=30)), st.integers(1, 20))
def test_lines_are_those_of_the_whole_however_it_is_cut(pieces: list[bytes], max_bytes: int) -> None:
    async def stream() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def collect() -> list[bytes | None]:
        return [line async for line in lines_of(stream(), max_bytes)]

    whole = b"".join(pieces)
    expected = whole.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    assert asyncio.run(collect()) == [line if len(line) <= max_bytes else None for line in expected]
