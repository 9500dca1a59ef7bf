"""The reference on a real store and real adapter files: when it moves, what is written down, and what it ties."""

from __future__ import annotations

from typing import Any

import pytest

from edged.learn.anchor import Rules
from edged.learn.reference import Reference
from edged.refusal import Refused


class Watched:
    """The reference of a box, and how often it moved."""

    def __init__(self, box: Any, ratings: int = 4) -> None:
        self.moves = 0
        self.rules = Rules(configured=0, ratings=ratings)
        self.reference = Reference(
            box.store.anchors,
            box.store.lineage,
            box.folders,
            rules=lambda: self.rules,
            base_sha256=box.BASE_SHA256,
            on_moved=self._moved,
        )

    def _moved(self) -> None:
        self.moves += 1


async def publish(box: Any) -> int:
    """A version that is live; its number."""
    update, job = await box.plan()
    finished = await box.updater.carry(update, job, None)
    assert finished.verdict == "published"
    return int(finished.version)


def test_a_live_version_that_has_earned_it_becomes_the_reference_and_is_kept(in_box: Any) -> None:
    async def scenario(box: Any) -> None:
        watched = Watched(box)
        await box.rate(1.0, -1.0)
        version = await publish(box)
        await box.rate(1.0, 1.0, -1.0, version=version)
        await watched.reference.consider()
        assert (watched.moves, watched.reference.version()) == (0, 0)
        await box.rate(1.0, version=version)
        await watched.reference.consider()
        assert (watched.moves, watched.reference.version()) == (1, version)
        anchor = watched.reference.anchor()
        assert (anchor.ratings, anchor.mean_rating, anchor.before) == (4, 0.5, 0)
        assert (await box.store.lineage.get(version)).kept
        with pytest.raises(Refused, match="reference of the KL penalty"):
            await box.store.lineage.set_kept(False, version=version, caller=box.OPERATOR)
        assert [entry.action for entry in await box.store.audit.list(10)].count("anchor") == 1

    async def after_a_restart(box: Any) -> None:
        watched = Watched(box)
        assert watched.reference.version() == 1
        watched.rules = Rules(configured=0, ratings=0)
        assert watched.reference.version() == 0

    in_box(scenario)
    in_box(after_a_restart)


def test_a_live_version_that_pleases_less_does_not(in_box: Any) -> None:
    async def scenario(box: Any) -> None:
        watched = Watched(box)
        await box.rate(1.0, 1.0, 1.0)
        version = await publish(box)
        await box.rate(1.0, 1.0, -1.0, -1.0, version=version)
        await watched.reference.consider()
        assert (watched.moves, watched.reference.version()) == (0, 0)

    in_box(scenario)


def test_a_version_whose_files_are_gone_does_not(in_box: Any) -> None:
    async def scenario(box: Any) -> None:
        watched = Watched(box)
        version = await publish(box)
        await box.rate(1.0, 1.0, 1.0, 1.0, version=version)
        box.folders.withdraw(version)
        await watched.reference.consider()
        assert watched.reference.version() == 0

    in_box(scenario)
