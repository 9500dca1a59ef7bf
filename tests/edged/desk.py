"""An operator at a desk: the real commands on a real store and real adapter files; the workers are light."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.folder import write_adapter_folder
from adapters.shape import BaseShape
from adapters.store import folder_name
from adapters.weights import AdapterWeights
from edged.control import Operator
from edged.learn.folders import Folders
from edged.records import Adapter, Caller, PublishedAdapter
from edged.refusal import Refused
from edged.store.lineage import Lineage
from edged.store.store import Store
from edged.swapping import Swaps

SHAPE = BaseShape(arch="llama", n_layers=2, n_embd=8, n_heads=2, n_kv_heads=1, head_dim=4, n_ff=12, n_vocab=16)
OPERATOR = Caller(name="uid:0", scopes=frozenset({"admin"}))


class LightLearner:
    """Keeps what the operator told the learner."""

    def __init__(self) -> None:
        self.paused: list[bool] = []
        self.wakes = 0
        self.answer = (True, "16 new ratings")

    async def ask(self) -> tuple[bool, str]:
        return self.answer

    def pause(self, paused: bool) -> None:
        self.paused.append(paused)

    def wake(self) -> None:
        self.wakes += 1


class LightRouter:
    """Keeps what is served. `is_behind`: it cannot follow now. `instead`: it cannot serve that, and makes this live."""

    def __init__(self, lineage: Lineage) -> None:
        self.lineage = lineage
        self.served: list[int] = []
        self.is_behind = False
        self.instead: int | None = None

    async def go_live(self) -> float | None:
        if self.is_behind:
            return None
        if self.instead is not None:
            await self.lineage.set_live(self.instead, why="rolled_back", caller=OPERATOR, if_live=None, now=9.0)
        self.served.append(self.lineage.live().version)
        return 1.0


class LightImporter:
    """Keeps what was brought; an adapter from outside is the base."""

    def __init__(self, store: Store, imported: list[tuple[Path, int | None]]) -> None:
        self._store = store
        self._imported = imported

    async def bring(self, folder: Path, caller: Caller, *, if_live: int | None = None) -> Adapter:
        self._imported.append((folder, if_live))
        return await self._store.lineage.get(0)


@dataclasses.dataclass
class Desk:
    """An operator and what is around it."""

    root: Path
    store: Store
    operator: Operator
    swaps: Swaps
    learner: LightLearner
    router: LightRouter
    candidates: asyncio.Lock
    told: list[tuple[str, dict[str, Any]]]
    imported: list[tuple[Path, int | None]]

    async def publish(self, base_sha256: str = "b" * 64) -> int:
        """A new version, live, with its files."""
        await publish_adapter(self.store, self.root / "adapters", base_sha256)
        return self.store.lineage.live().version


async def publish_adapter(store: Store, adapters: Path, base_sha256: str = "b" * 64) -> Path:
    """A new version, live, with its files; its folder."""
    live = store.lineage.live().version
    candidate = await store.lineage.add_candidate(origin="imported", parent_version=live, caller=OPERATOR)
    weights = make_weights(candidate.version)
    folder = adapters / folder_name(candidate.version, weights.sha256())
    write_adapter_folder(
        folder,
        weights,
        version=candidate.version,
        parent=None,
        base_sha256=base_sha256,
        base_model_name="small",
        origin="imported",
        created_at=1.0,
    )
    published = PublishedAdapter(sha256=weights.sha256(), folder=folder.name, metrics={})
    await store.lineage.publish(candidate.version, published, caller=OPERATOR)
    return folder


def make_weights(seed: int) -> AdapterWeights:
    rng = np.random.default_rng(seed)
    matrices = {}
    for module in SHAPE.top_modules(1):
        n_out, n_in = SHAPE.module_shape(module)
        a = rng.standard_normal((2, n_in), dtype=np.float32)
        matrices[module] = (a, rng.standard_normal((n_out, 2), dtype=np.float32))
    return AdapterWeights(base=SHAPE, rank=2, alpha=4.0, matrices=matrices)


async def no_events() -> AsyncIterator[tuple[str, dict[str, Any]]]:
    return
    yield


def at_desk(root: Path, scenario: Callable[[Desk], Awaitable[None]]) -> None:
    (root / "adapters").mkdir(exist_ok=True)

    async def main() -> None:
        store = await Store.open(root / "edged.db", readers=1)
        learner, router, candidates = LightLearner(), LightRouter(store.lineage), asyncio.Lock()
        told: list[tuple[str, dict[str, Any]]] = []
        imported: list[tuple[Path, int | None]] = []

        def no_parts() -> Any:
            raise AssertionError("no test here asks for the status")

        def tell(name: str, data: dict[str, Any]) -> None:
            told.append((name, data))

        folders = Folders(root, "b" * 64)
        swaps = Swaps(
            state_folder=root,
            lineage=store.lineage,
            complaint_about=folders.complaint_about,
            write_current=folders.write_current,
            router=router,
            candidates=candidates,
            announce=tell,
            on_change=learner.wake,
        )
        operator = Operator(
            state_folder=root,
            base=SHAPE,
            model_name="small",
            lineage=store.lineage,
            update_list=store.updates,
            audit_log=store.audit,
            learner=learner,
            swaps=swaps,
            importer=LightImporter(store, imported),
            parts=no_parts,
            readiness=lambda: (True, "ready"),
            subscribe=no_events,
            announce=tell,
        )
        try:
            await scenario(Desk(root, store, operator, swaps, learner, router, candidates, told, imported))
        finally:
            await store.close()

    asyncio.run(main())


async def audited(desk: Desk) -> list[str]:
    """What the audit says was done, newest first."""
    return [entry.action for entry in await desk.operator.audit(limit=20)]


async def refusal(call: Awaitable[object]) -> Refused:
    with pytest.raises(Refused) as caught:
        await call
    return caught.value
