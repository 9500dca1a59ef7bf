"""The audit keeps its order and its detail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from edged.records import Caller
from edged.refusal import Refused
from edged.store.store import Store

InStore = Callable[..., Any]


def test_entries_come_newest_first_with_who_when_and_what(in_store: InStore, operator: Caller) -> None:
    async def scenario(store: Store) -> None:
        entries = [await store.audit.add("pause", {"n": i, "why": "ü"}, caller=operator) for i in range(3)]
        assert [entry.at for entry in entries] == [1.0, 2.0, 3.0]
        assert await store.audit.list(2) == [entries[2], entries[1]]
        assert entries[0].caller == operator.name

    in_store(scenario)


def test_a_deed_that_was_refused_leaves_no_entry(in_store: InStore, operator: Caller) -> None:
    async def scenario(store: Store) -> None:
        with pytest.raises(Refused, match="no adapter has the version 5"):
            await store.lineage.set_kept(True, version=5, caller=operator)
        assert await store.audit.list(10) == []

    in_store(scenario)
