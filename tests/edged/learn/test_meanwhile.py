"""What is kept up to date while something large is under way."""

from __future__ import annotations

import asyncio

import pytest

from edged.learn.meanwhile import meanwhile


def test_it_is_done_at_once_and_after_each_news_until_the_block_is_left() -> None:
    async def scenario() -> None:
        news, done = asyncio.Event(), asyncio.Semaphore(0)

        async def small() -> None:
            done.release()

        async with asyncio.timeout(10):
            async with meanwhile(news, small):
                await done.acquire()
                for _ in range(3):
                    news.set()
                    await done.acquire()
                assert not news.is_set()
            news.set()
            await asyncio.sleep(0)
            assert done.locked()

    asyncio.run(scenario())


def test_what_the_block_raises_comes_out_and_what_the_small_thing_raises_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async def small() -> None:
            raise OSError("no disk")

        async with meanwhile(asyncio.Event(), small):
            await asyncio.sleep(0)
            raise KeyError

    with pytest.raises(KeyError):
        asyncio.run(scenario())
    assert "is not" in caplog.text
    assert "no disk" in caplog.text
