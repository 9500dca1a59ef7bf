"""Events to many readers: order, bounded queues, and the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from edged.system.broadcast import QUEUE_EVENTS, Broadcast, Event


async def joined(events: Broadcast) -> tuple[AsyncIterator[Event], asyncio.Task[Event]]:
    """A reader that waits for its first event."""
    reader = events.subscribe()
    first = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0)
    return reader, first


def test_every_reader_gets_every_event_in_order() -> None:
    async def main() -> None:
        events = Broadcast()
        readers = [await joined(events) for _ in range(3)]
        for number in range(5):
            events.publish("status", {"number": number})
        events.close()
        for reader, first in readers:
            got = [await first, *[event async for event in reader]]
            assert got == [("status", {"number": number}) for number in range(5)]

    asyncio.run(main())


def test_a_slow_reader_loses_its_oldest_events_only() -> None:
    async def main() -> None:
        events = Broadcast()
        slow, first = await joined(events)
        events.publish("n", {"number": 0})
        await first
        fast, pending = await joined(events)
        for number in range(1, QUEUE_EVENTS + 11):
            events.publish("n", {"number": number})
            assert (await pending)[1]["number"] == number
            pending = asyncio.ensure_future(anext(fast))
            await asyncio.sleep(0)
        kept = [(await anext(slow))[1]["number"] for _ in range(QUEUE_EVENTS)]
        assert kept == list(range(11, QUEUE_EVENTS + 11))
        pending.cancel()

    asyncio.run(main())


def test_close_ends_every_reader_after_what_it_has_not_read_yet() -> None:
    async def main() -> None:
        events = Broadcast()
        reader, first = await joined(events)
        events.publish("a", {})
        events.publish("b", {})
        events.close()
        events.close()
        assert [(await first)[0], *[name async for name, _ in reader]] == ["a", "b"]

    asyncio.run(main())


def test_close_reaches_a_reader_whose_queue_is_full() -> None:
    async def main() -> None:
        events = Broadcast()
        reader, first = await joined(events)
        events.publish("first", {})
        await first
        for _ in range(QUEUE_EVENTS):
            events.publish("more", {})
        events.close()
        assert len([event async for event in reader]) == QUEUE_EVENTS - 1

    asyncio.run(main())


def test_a_reader_that_comes_after_close_ends_at_once() -> None:
    async def main() -> None:
        events = Broadcast()
        events.close()
        assert [event async for event in events.subscribe()] == []

    asyncio.run(main())


def test_a_reader_that_left_costs_nothing() -> None:
    async def main() -> None:
        events = Broadcast()
        _, first = await joined(events)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert events._queues == set()

    asyncio.run(main())
