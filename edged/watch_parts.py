"""What happens to adapters after they went live, put together: the watch over ratings, the last good one
standing by, and collection."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from typing import Any

from edged import standing
from edged.base_model import BaseModel
from edged.learn import collection, watch
from edged.learn.collecting import Collector
from edged.learn.folders import Folders
from edged.learn.watching import View, Watch, is_watched
from edged.serve.routing import Routing
from edged.serve.standby import Standby
from edged.settings import Section, Settings
from edged.store.store import Store
from edged.swap import stage_of
from edged.swapping import Swaps
from engine import protocol


class WatchParts:
    """`settings` is asked at each use. references: of learning. adapter: a published version, as workers are told."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        *,
        model: BaseModel,
        store: Store,
        folders: Folders,
        swaps: Swaps,
        candidates: asyncio.Lock,
        references: Callable[[], frozenset[int]],
        routing: Routing,
        adapter: Callable[[int], protocol.AdapterRef],
        announce: Callable[[str, dict[str, Any]], None],
        on_change: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._store = store
        self._routing = routing
        self.watch = Watch(
            store.anchors,
            store.lineage,
            store.audit,
            swaps,
            rules=lambda: watch.Rules(**_taken(watch.Rules, settings().watch)),
            staleness=lambda: settings().learn.staleness,
            base_sha256=model.sha256,
            announce=announce,
            on_change=on_change,
        )
        self.collector = Collector(
            store.lineage,
            folders,
            rules=lambda: collection.Rules(**_taken(collection.Rules, settings().adapters)),
            staleness=lambda: settings().learn.staleness,
            references=references,
            last_good=swaps.last_good,
            candidates=candidates,
            announce=announce,
            on_change=on_change,
        )

        self.standby = Standby(
            routing,
            live=lambda: store.lineage.live().version,
            last_good=swaps.last_good,
            adapter=adapter,
            candidates=candidates,
        )

    def loops(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """Name -> what runs until it is cancelled."""
        return {"watch": self.watch.run, "collector": self.collector.run, "standby": self.standby.run}

    def changed(self) -> None:
        """Another version is live or served, or the settings have changed."""
        self.watch.wake()
        self.collector.wake()
        self.standby.wake()

    def judged(self) -> None:
        """A candidate has its verdict."""
        self.standby.wake()

    def rated(self) -> None:
        """A person has rated."""
        self.watch.wake()

    def files(self) -> standing.FilesView | None:
        """What adapters take of the disk, as a status shows it. No I/O."""
        view = self.collector.view
        return None if view is None else standing.FilesView(**dataclasses.asdict(view))

    def view(self) -> standing.WatchView:
        """Where the live version stands, as a status shows it. No I/O."""
        live, view = self._store.lineage.live(), self.watch.view
        is_served = is_watched(live) and self._routing.serving == live.version
        stage = stage_of(live.verdict, serving=is_served)
        if view is None or view.version != live.version:  # not looked at yet
            rollbacks, withheld = (view.rollbacks, view.withheld) if view else (0, 0)
            return standing.WatchView(stage=stage, is_on=False, why="", rollbacks=rollbacks, withheld=withheld)
        return standing.WatchView(
            stage=stage,
            is_on=view.is_on,
            why=view.why,
            rollbacks=view.rollbacks,
            withheld=view.withheld,
            evidence=view.finding.evidence if view.finding and view.finding.reference else None,
            alarm_at=1.0 / self._settings().watch.false_alarm if view.is_on else None,
            rated=_rated(view),
            reference=_shown(view.finding.reference) if view.finding else None,
        )


def _taken(rules: type[Any], section: Section) -> dict[str, Any]:
    """The values of a section by the names of the rules' fields."""
    return {field.name: getattr(section, field.name) for field in dataclasses.fields(rules)}


def _rated(view: View) -> standing.RatedView | None:
    return _shown(view.finding.live) if view.finding else None


def _shown(rated: watch.Rated | None) -> standing.RatedView | None:
    if rated is None:
        return None
    return standing.RatedView(versions=list(rated.versions), ratings=rated.number, mean=rated.mean)
