"""What the daemon does with its state folder before it serves, on a real store and real adapter files."""

from __future__ import annotations

import asyncio
from pathlib import Path

from edged.daemon import clear_up
from edged.learn.folders import Folders
from edged.store.store import Store
from tests.edged.desk import OPERATOR, publish_adapter


def test_a_pinned_version_that_is_damaged_is_replaced_and_nothing_is_published_over_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        store, folders = await Store.open(tmp_path / "edged.db"), Folders(tmp_path, "b" * 64)
        try:
            folders.prepare([])
            await publish_adapter(store, folders.adapters)
            damaged = await publish_adapter(store, folders.adapters)
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
            await publish_adapter(store, ours.adapters)
            await publish_adapter(store, ours.adapters)
            for folders, live in ((ours, 2), (theirs, 0), (theirs, 0), (ours, 2), (theirs, 0)):
                await clear_up(store, folders)
                assert store.lineage.live().version == live
            await publish_adapter(store, theirs.adapters, "c" * 64)
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
            await publish_adapter(store, folders.adapters)
            damaged = await publish_adapter(store, folders.adapters) / "adapter.gguf"
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
