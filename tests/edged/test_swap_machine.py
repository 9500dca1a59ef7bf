"""Any order of swaps, ratings, requests and crashes: one version is live, it is whole, and no answer is mixed.

The daemon's half (`edged.swap`, `edged.learn.collection`) and the worker's (`engine.generate.swap`) run together on a
model of the disk: what is durable, and what a process only remembers. Every step that touches the disk or the worker
is a fault point, and a crash there goes the way of the real start: finish collecting, serve the nearest version that is
whole, stage what was not proved again.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edged import swap
from edged.learn import collection
from edged.learn.ages import ages
from edged.records import Live
from edged.swap import Stage
from engine.generate.swap import Place, Swap

STALENESS = 0
NEVER = 99
# The fault point that an operation dies at; most come through.
deaths = st.sampled_from([NEVER, NEVER, NEVER, 0, 1, 2, 3, 4, 5])
verdicts = st.sampled_from([True, True, False])


class Killed(Exception):
    """The daemon died at a fault point."""


@dataclasses.dataclass
class Disk:
    """What survives. spool: trained candidates. rows: versions whose row promises files. folders: those that are there,
    but for what somebody damaged."""

    history: list[Live]
    newest: int = 0
    spool: set[int] = dataclasses.field(default_factory=set)
    rows: set[int] = dataclasses.field(default_factory=set)
    folders: set[int] = dataclasses.field(default_factory=set)
    collected: set[int] = dataclasses.field(default_factory=set)
    damaged: set[int] = dataclasses.field(default_factory=set)
    parents: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def live(self) -> int:
        return self.history[0].version

    def append(self, version: int, why: Any, caller: str) -> None:
        at = float(len(self.history))
        self.history.insert(0, Live(version=version, since=at, why=why, caller=caller, pinned=False))

    def published(self) -> dict[int, int | None]:
        return {0: None} | {version: self.parents[version] for version in self.rows | self.collected}

    def is_whole(self, version: int) -> bool:
        return version == 0 or (version in self.rows and version in self.folders)


class Swaps(RuleBasedStateMachine):
    """A box. stages: of every version that was live or is staged, as `edged.swap` has them."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = Disk([Live(version=0, since=0.0, why="base", caller="edged", pinned=False)])
        self.stages: dict[int, Stage] = {0: "live"}
        self.condemned: set[int] = set()
        self.die_at = NEVER
        self.start()

    # ------------------------------------------------------------------------------------------------- the process

    def start(self) -> None:
        """Everything but the disk is forgotten, and read from there."""
        for version in self.disk.collected & self.disk.folders:
            self.disk.folders.remove(version)
        self.stages = {version: kept for version, stage in self.stages.items() if (kept := swap.after_crash(stage))}
        wanted = [version for version in swap.wanted_versions(self.disk.history) if self.disk.is_whole(version)]
        nearest = next(iter(wanted), 0)
        if nearest != self.disk.live:
            self.put(nearest, "rolled_back" if nearest < self.disk.live else "promoted", swap.STOPGAP)
        self.worker = Swap(self.disk.live)
        self.serving = self.disk.live
        self.spare: int | None = self.disk.live
        self.requests: list[tuple[int, int]] = []
        self.routed()

    def fault(self) -> None:
        """A point at which the daemon may die."""
        self.die_at -= 1
        if self.die_at < 0:
            raise Killed

    def carry(self, death: int, work: Any) -> None:
        self.die_at = death
        try:
            work()
        except Killed:
            self.die_at = NEVER
            self.start()
        self.die_at = NEVER

    def put(self, version: int, why: Any, caller: str) -> None:
        """The one transaction that makes another version live."""
        left = self.disk.live
        if version != left:
            against = why == "rolled_back" and caller != swap.STOPGAP
            if against:
                self.stages[left] = swap.after(self.stages[left], "rolled_back")
            elif self.stages[left] in ("live", "watched"):
                self.stages[left] = swap.after(self.stages[left], "held")
        before = self.stages.get(version)
        if why == "published":
            self.stages[version] = swap.after("probed", "published")
        elif before in ("rolled_back", "kept") and not (why == "rolled_back" and before == "kept"):
            self.stages[version] = swap.after(before, "made_live")
        if caller in swap.JUDGES:
            self.condemned.add(left)
        elif caller != swap.STOPGAP:
            self.condemned.discard(version)
        self.disk.append(version, why, caller)

    def routed(self) -> None:
        if self.stages[self.disk.live] == "live":
            self.stages[self.disk.live] = swap.after("live", "routed")

    # -------------------------------------------------------------------------------------------------- the worker

    def stage(self, version: int) -> bool:
        """Whether the version stands staged; not while the other context drains."""
        if self.worker.role(1 - self.worker.live) not in ("spare", "staged"):
            return False
        (place,) = [action for action in self.worker.stage("job", version) if isinstance(action, Place)]
        assert self.worker.role(place.context) == "staging"
        self.fault()
        self.worker.proved("job")
        self.spare = version
        return True

    def follow(self) -> None:
        """New requests follow what is live, as soon as the other context is free."""
        while self.serving != self.disk.live:
            if self.worker.route(self.disk.live):
                self.serving, self.spare = self.disk.live, self.serving
                self.routed()
            elif not self.stage(self.disk.live):
                return

    def last_good(self) -> int | None:
        before = swap.versions_before(self.disk.history)
        return next((version for version in before if self.disk.is_whole(version)), None)

    # --------------------------------------------------------------------------------------------------------- rules

    @initialize(number=st.integers(1, 6))
    def learn(self, number: int) -> None:
        """Some updates have been published already."""
        for _ in range(number):
            self.train(death=NEVER, accepted=True)

    @rule(death=deaths, accepted=verdicts)
    def train(self, death: int, accepted: bool) -> None:
        """A candidate on top of what is live, trained and proved; published if the gate accepts it."""
        self.disk.newest += 1
        version = self.disk.newest
        self.disk.spool.add(version)
        self.disk.parents[version] = self.disk.live
        self.carry(death, lambda: self.prove(version, accepted))

    @precondition(lambda self: self.disk.spool)
    @rule(death=deaths, accepted=verdicts)
    def take_up(self, death: int, accepted: bool) -> None:
        """A candidate that a crash or a busy worker left is proved again."""
        self.carry(death, lambda: self.prove(min(self.disk.spool), accepted))

    def prove(self, version: int, accepted: bool) -> None:
        if self.serving != self.disk.live or not self.stage(version):
            return
        self.stages[version] = "staged"
        self.fault()
        if self.disk.parents[version] != self.disk.live or not accepted:
            del self.stages[version]
            self.disk.folders.discard(version)
            self.disk.spool.remove(version)
            return
        self.stages[version] = swap.after("staged", "proved")
        self.fault()
        self.disk.folders.add(version)
        self.fault()
        self.disk.rows.add(version)
        self.disk.spool.remove(version)
        self.put(version, "published", "learner")
        self.fault()
        self.follow()

    @rule(death=deaths, deep=st.booleans())
    def judge(self, death: int, deep: bool) -> None:
        """Ratings or the deep gate speak against what is live."""
        target = self.last_good()
        if target is not None and self.disk.live and self.stages[self.disk.live] in ("live", "watched"):
            self.carry(death, lambda: self.go(target, "rolled_back", (swap.DEEP_GATE if deep else swap.WATCH).name))

    @rule(death=deaths)
    def undo(self, death: int) -> None:
        target = self.last_good()
        if target is not None and self.stages[self.disk.live] != "rolled_back":
            self.carry(death, lambda: self.go(target, "rolled_back", "uid:0"))

    @rule(death=deaths, data=st.data())
    def promote(self, death: int, data: st.DataObject) -> None:
        whole = sorted(version for version in {0, *self.disk.rows} if self.disk.is_whole(version))
        target = data.draw(st.sampled_from(whole))
        self.carry(death, lambda: self.go(target, "promoted", "uid:0"))

    def go(self, version: int, why: str, caller: str) -> None:
        self.fault()
        self.put(version, why, caller)
        self.fault()
        self.follow()
        self.fault()

    @precondition(lambda self: self.stages[self.disk.live] in ("live", "watched"))
    @rule()
    def stand(self) -> None:
        """Enough ratings have come."""
        self.stages[self.disk.live] = swap.after(self.stages[self.disk.live], "held")

    @rule(death=deaths)
    def stand_by(self, death: int) -> None:
        """The last good version is put into the spare context; going back to it then loads nothing."""

        def work() -> None:
            target = self.last_good()
            if target is None or self.serving != self.disk.live:
                return
            if target not in (self.spare, self.serving) and not self.stage(target):
                return
            roles = [self.worker.role(context) for context in (0, 1) if self.worker.version(context) == target]
            assert roles
            assert "staging" not in roles

        self.carry(death, work)

    @rule(death=deaths, short=st.booleans())
    def collect(self, death: int, short: bool) -> None:
        in_use = collection.InUse(
            wanted=frozenset([self.disk.live, *swap.wanted_versions(self.disk.history)[:1]]),
            last_good=frozenset() if (good := self.last_good()) is None else frozenset([good]),
            kept=frozenset(),
            references=frozenset([0]),
            in_updates=frozenset(self.disk.parents[version] for version in self.disk.spool),
            named=ages(self.disk.published(), self.disk.live).within(STALENESS + 1),
        )
        files = [
            collection.Files(version=version, n_bytes=1, age_s=0.0)
            for version in sorted(self.disk.rows & self.disk.folders)
        ]
        rules = collection.Rules(keep_versions=0, min_free_bytes=10**6 if short else 0)

        def work() -> None:
            for version in collection.decide(files, in_use, rules, free_bytes=0).removed:
                self.fault()
                self.disk.rows.remove(version)
                self.disk.collected.add(version)
                self.fault()
                self.disk.folders.remove(version)

        before = self.last_good()
        self.carry(death, work)
        if death == NEVER:
            assert self.last_good() == before
            assert all(self.disk.is_whole(version) or version in self.disk.damaged for version in in_use.in_updates)

    @precondition(lambda self: self.disk.live)
    @rule()
    def damage(self) -> None:
        """The files of what is live are gone; nobody sees it before the worker starts again."""
        self.disk.folders.discard(self.disk.live)
        self.disk.damaged.add(self.disk.live)
        self.start()

    @rule()
    def die(self) -> None:
        self.start()

    @rule()
    def begin(self) -> None:
        context = self.worker.begin()
        self.requests.append((context, self.worker.version(context)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        context, version = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        assert self.worker.version(context) == version  # to its end, on the adapter that it began on
        self.worker.end(context)
        self.follow()

    # ---------------------------------------------------------------------------------------------------- invariants

    @invariant()
    def what_is_live_is_whole_and_is_what_is_served_but_for_a_draining_context(self) -> None:
        assert self.disk.is_whole(self.disk.live)
        assert self.worker.live_version == self.serving
        if self.serving != self.disk.live:
            assert self.worker.role(1 - self.worker.live) == "draining"

    @invariant()
    def one_version_is_live_and_the_others_have_their_verdict(self) -> None:
        at_work = {version for version, stage in self.stages.items() if stage in ("live", "watched")}
        assert at_work <= {self.disk.live}
        assert self.stages[self.disk.live] not in ("staged", "probed")

    @invariant()
    def what_the_box_rolled_back_is_not_live_until_somebody_promotes_it(self) -> None:
        assert self.disk.live not in self.condemned
        assert swap.rolled_back_by_itself(self.disk.history) == self.condemned

    @invariant()
    def no_row_promises_files_that_were_removed(self) -> None:
        assert not self.disk.rows & self.disk.collected
        assert self.disk.rows - self.disk.folders <= self.disk.damaged


Swaps.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestSwaps = Swaps.TestCase
