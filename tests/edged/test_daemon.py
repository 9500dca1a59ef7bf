"""What the daemon does with its state folder before it serves, on a real store and real adapter files."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from adapters.folder import write_adapter_folder
from adapters.shape import BaseShape
from adapters.store import folder_name
from adapters.weights import AdapterWeights
from edged.daemon import clear_up
from edged.learn.folders import Folders
from edged.records import Caller, PublishedAdapter
from edged.store.store import Store

SHAPE = BaseShape(arch="llama", n_layers=1, n_embd=8, n_heads=2, n_kv_heads=1, head_dim=4, n_ff=12, n_vocab=16)
OPERATOR = Caller(name="uid:0", scopes=frozenset({"admin"}))


async def publish(store: Store, folders: Folders, base_sha256: str = "b" * 64) -> Path:
    """A new version, live, with its files; its folder."""
    candidate = await store.lineage.add_candidate(origin="imported", parent_version=0, caller=OPERATOR)
    rng = np.random.default_rng(candidate.version)
    matrices = {}
    for module in SHAPE.top_modules(1):
        n_out, n_in = SHAPE.module_shape(module)
        a = rng.standard_normal((2, n_in), dtype=np.float32)
        matrices[module] = (a, rng.standard_normal((n_out, 2), dtype=np.float32))
    weights = AdapterWeights(base=SHAPE, rank=2, alpha=4.0, matrices=matrices)
    folder = folders.adapters / folder_name(candidate.version, weights.sha256())
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


def test_a_pinned_version_that_is_damaged_is_replaced_and_nothing_is_published_over_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        store, folders = await Store.open(tmp_path / "edged.db"), Folders(tmp_path, "b" * 64)
        try:
            folders.prepare([])
            await publish(store, folders)
            damaged = await publish(store, folders)
            await store.lineage.set_pinned(True, version=2, if_live=None, caller=OPERATOR)
            (damaged / "adapter.gguf").write_bytes(b"half")
            await clear_up(store, folders)
            live = store.lineage.live()
            assert (live.version, live.why, live.pinned) == (1, "rolled_back", True)
        finally:
            await store.close()

    asyncio.run(scenario())


def test_versions_of_another_base_model_wait_until_it_is_served_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = await Store.open(tmp_path / "edged.db")
        ours, theirs = Folders(tmp_path, "b" * 64), Folders(tmp_path, "c" * 64)
        try:
            ours.prepare([])
            await publish(store, ours)
            await publish(store, ours)
            for folders, live in ((ours, 2), (theirs, 0), (theirs, 0), (ours, 2), (theirs, 0)):
                await clear_up(store, folders)
                assert store.lineage.live().version == live
            await publish(store, theirs, "c" * 64)
            for folders, live in ((theirs, 3), (ours, 2), (theirs, 3)):
                await clear_up(store, folders)
                assert store.lineage.live().version == live
            assert (list(ours.versions()), list(theirs.versions())) == ([1, 2], [3])
            await store.lineage.set_live(0, why="promoted", caller=OPERATOR, if_live=3, now=9.0)
            await clear_up(store, ours)
            assert store.lineage.live().version == 0
        finally:
            await store.close()

    asyncio.run(scenario())


def test_a_version_that_is_whole_again_is_served_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        store, folders = await Store.open(tmp_path / "edged.db"), Folders(tmp_path, "b" * 64)
        try:
            folders.prepare([])
            await publish(store, folders)
            damaged = await publish(store, folders) / "adapter.gguf"
            whole = damaged.read_bytes()
            damaged.write_bytes(b"half")
            await clear_up(store, folders)
            assert store.lineage.live().version == 1
            damaged.write_bytes(whole)
            await clear_up(store, folders)
            assert store.lineage.live().version == 2
        finally:
            await store.close()

    asyncio.run(scenario())
