"""What takes the place of a version that cannot be served, and when it makes way again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from edged.fallback import Fallback
from edged.records import Caller, Live
from edged.refusal import Refused
from edged.swap import STOPGAP

OPERATOR = Caller(name="uid:0", scopes=frozenset({"admin"}))


class LightLineage:
    """A live history in memory."""

    def __init__(self, *versions: int) -> None:
        self.rows: list[Live] = []
        self.overtaken_by: int | None = None
        for version in versions:
            self.add(version, "learner")

    def add(self, version: int, caller: str, *, pinned: bool = False) -> None:
        at = float(len(self.rows))
        self.rows.append(Live(version=version, since=at, why="promoted", caller=caller, pinned=pinned))

    def live(self) -> Live:
        return self.rows[-1]

    async def history(self, limit: int) -> list[Live]:
        return self.rows[::-1][:limit]

    async def set_live(
        self, version: int, *, why: str, caller: Caller, if_live: int | None, now: float, pinned: bool | None = None
    ) -> Live:
        if self.overtaken_by is not None:
            self.add(self.overtaken_by, "uid:0")
            self.overtaken_by = None
        if if_live != self.live().version:
            raise Refused(409, "live_changed", f"version {self.live().version} is live, not {if_live}")
        self.add(version, caller.name, pinned=bool(pinned))
        return self.live()


class LightFiles:
    """`damaged`: versions whose files cannot be served."""

    def __init__(self, *damaged: int) -> None:
        self.damaged = set(damaged)
        self.current: int | None = None

    def complaint_about(self, version: int) -> str | None:
        return f"v{version} is damaged" if version in self.damaged else None

    def write_current(self, version: int) -> None:
        self.current = version


def with_history(
    scenario: Callable[[Fallback, LightLineage, LightFiles], Awaitable[None]], *versions: int, damaged: set[int]
) -> None:
    lineage, files = LightLineage(*versions), LightFiles(*damaged)
    asyncio.run(scenario(Fallback(lineage, files), lineage, files))  # type: ignore[arg-type]


@pytest.mark.parametrize(("damaged", "served"), [(set(), 3), ({3}, 2), ({3, 2}, 1), ({3, 2, 1}, 0), ({2}, 3)])
def test_the_nearest_version_that_is_whole_is_served(damaged: set[int], served: int) -> None:
    async def scenario(fallback: Fallback, lineage: LightLineage, files: LightFiles) -> None:
        live = await fallback.servable()
        assert live.version == lineage.live().version == served
        assert (live.caller, files.current) == ((STOPGAP, served) if served != 3 else ("learner", None))
        files.damaged.clear()
        assert (await fallback.servable()).version == 3

    with_history(scenario, 0, 1, 2, 3, damaged=damaged)


def test_what_the_engine_refused_is_tried_again_once_somebody_makes_it_live_again() -> None:
    async def scenario(fallback: Fallback, lineage: LightLineage, files: LightFiles) -> None:
        fallback.condemn(2, "it gives NaN")
        for _ in range(3):
            assert (await fallback.servable()).version == 1
        lineage.add(2, OPERATOR.name)
        assert (await fallback.servable()).version == 2
        fallback.condemn(2, "it gives NaN")
        assert (await fallback.servable()).version == 1

    with_history(scenario, 0, 1, 2, damaged=set())


def test_a_stopgap_keeps_the_pin() -> None:
    async def scenario(fallback: Fallback, lineage: LightLineage, files: LightFiles) -> None:
        lineage.add(2, OPERATOR.name, pinned=True)
        live = await fallback.servable()
        assert (live.version, live.pinned) == (1, True)

    with_history(scenario, 0, 1, damaged={2})


def test_who_changes_what_is_live_meanwhile_wins() -> None:
    async def scenario(fallback: Fallback, lineage: LightLineage, files: LightFiles) -> None:
        lineage.overtaken_by = 0
        live = await fallback.servable()
        assert (live.version, live.caller) == (0, "uid:0")

    with_history(scenario, 0, 1, 2, damaged={2})
