"""The store as a whole: it satisfies its consumers, and a kill at any moment loses nothing that was acknowledged."""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from edged.store.store import Store

ROOT = Path(__file__).parents[3]

# The consumers' Protocols, checked by the type checker: the store never imports them.
_CONFORMANCE = """
from edged.api import ports as api
from edged.learn import ports as learn
from edged.ratings import Ratings
from edged.store.store import Store

def conforms(store: Store) -> None:
    feedback_book: api.FeedbackBook = Ratings(store.feedback, lambda rows: None, lambda: None)
    episode_book: api.EpisodeBook = store.episodes
    key_ring: api.KeyRing = store.keys
    ratings_book: learn.RatingsBook = store.feedback
    episode_shelf: learn.EpisodeShelf = store.episodes
    update_book: learn.UpdateBook = store.updates
    written_book: learn.WrittenBook = store.written
    lineage_book: learn.LineageBook = store.lineage
"""


def test_the_books_are_what_the_api_and_learning_ask_for(tmp_path: Path) -> None:
    snippet = tmp_path / "conformance.py"
    snippet.write_text(_CONFORMANCE, encoding="utf-8")
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", str(snippet)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


# Rates without a pause in eight tasks. Once a rating is acknowledged, its text goes to stdout in one write.
_RATER = """
import asyncio, itertools, os, sys
from pathlib import Path
from edged.records import Episode, NewFeedback
from edged.store.store import Store

async def main():
    store = await Store.open(Path(sys.argv[1]))
    run = sys.argv[2]
    numbers = itertools.count()

    async def rate():
        for number in numbers:
            name = f"{run}-{number}"
            await store.episodes.add(Episode(
                id=0, completion_id=name, choice=0, created_at=1.0, kind="text", model="m", base_sha256="b", version=0,
                messages=None, prompt="p" * 500, prompt_ids=(1,) * 50, completion_ids=(2,) * 50, logprobs=(-1.0,) * 50,
                raw_logprobs=(-1.0,) * 50, text="t", finish_reason="stop", temperature=1.0, top_p=1.0, top_k=0, seed=0,
                max_tokens=None, user=None, metadata={}, caller="c"))
            await store.feedback.add(NewFeedback(
                completion_id=name, choice=0, rating=1.0, correction=None, reason=name, user=None, tags=(),
                source="s", caller="c"), idempotency_key=name)
            os.write(1, f"{name}\\n".encode())

    await asyncio.gather(*[rate() for _ in range(8)])

asyncio.run(main())
"""


def acknowledged_before_kill(path: Path, run: int, delay_s: float) -> list[str]:
    """What a rater acknowledged until it was killed, `delay_s` after its first acknowledgement."""
    rater = subprocess.Popen(
        [sys.executable, "-c", _RATER, str(path), str(run)], stdout=subprocess.PIPE, cwd=ROOT, bufsize=0
    )
    assert rater.stdout is not None
    read = b""
    deadline = None
    while deadline is None or time.monotonic() < deadline:
        left_s = 60.0 if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([rater.stdout], [], [], left_s)
        if ready:
            read += os.read(rater.stdout.fileno(), 65536)
            assert read, "the rater ended by itself"
            deadline = deadline or time.monotonic() + delay_s
    rater.send_signal(signal.SIGKILL)
    rater.wait()
    read += rater.stdout.read()
    rater.stdout.close()
    return read.decode().splitlines()


def test_kill_9_at_random_moments_loses_no_acknowledged_rating_and_doubles_none(tmp_path: Path) -> None:
    path = tmp_path / "edged.db"
    moments = random.Random(8)
    acknowledged: list[str] = []

    async def stored() -> tuple[list[str], int, tuple[int, int]]:
        store = await Store.open(path)
        rows, has_more = await store.feedback.list(completion_id=None, after=None, limit=10**6)
        assert not has_more
        counts = store.episodes.count(), store.feedback.counts()
        await store.close()
        return [row.reason or "" for row in rows], *counts

    for run in range(15):
        acknowledged += acknowledged_before_kill(path, run, moments.uniform(0.0, 0.2))
        names, n_episodes, counts = asyncio.run(stored())
        assert set(acknowledged) <= set(names)
        assert len(names) == len(set(names))
        assert counts == (len(names), len(names))
        assert n_episodes >= len(names)
    assert len(acknowledged) > 15


def test_a_store_opens_as_it_was_closed(tmp_path: Path) -> None:
    async def twice() -> None:
        for _ in range(2):
            store = await Store.open(tmp_path / "edged.db", readers=1)
            assert (store.episodes.count(), store.feedback.counts(), store.feedback.drop_counts()) == (0, (0, 0), {})
            assert (store.updates.count_finished(), store.updates.latest_finished()) == (0, None)
            assert (store.lineage.live().version, store.keys.any_keys()) == (0, False)
            await store.close()
            await store.close()

    asyncio.run(twice())
