"""API keys: shown once, checked without I/O, and never written in the clear."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edged.records import ApiKey, Caller
from edged.refusal import Refused
from edged.store.keys import SECRET_PREFIX
from edged.store.store import Store

InStore = Callable[..., Any]


def test_a_key_is_valid_until_it_is_revoked_and_the_door_stays_shut_then(in_store: InStore, operator: Caller) -> None:
    async def create(store: Store) -> tuple[ApiKey, str]:
        assert not store.keys.any_keys()
        return await store.keys.create("app", frozenset({"infer", "feedback"}), caller=operator)

    key, secret = in_store(create)
    assert secret.startswith(SECRET_PREFIX)
    assert len(secret) == len(SECRET_PREFIX) + 43

    async def check_and_revoke(store: Store) -> None:
        assert store.keys.any_keys()
        assert store.keys.check(secret) == key
        assert store.keys.check(secret + "x") is None
        assert store.keys.check("\udcff") is None
        revoked = await store.keys.revoke(key.id, caller=operator)
        assert revoked.revoked_at is not None
        assert await store.keys.revoke(key.id, caller=operator) == revoked
        assert (store.keys.check(secret), store.keys.any_keys()) == (None, True)

    in_store(check_and_revoke)

    async def reopened(store: Store) -> None:
        assert (store.keys.check(secret), store.keys.any_keys()) == (None, True)
        assert [listed.id for listed in await store.keys.list()] == [key.id]
        assert [(entry.action, entry.detail["name"]) for entry in await store.audit.list(10)] == [
            ("key_revoke", "app"),
            ("key_create", "app"),
        ]

    in_store(reopened)


def test_each_secret_finds_its_own_key(in_store: InStore, operator: Caller) -> None:
    async def scenario(store: Store) -> None:
        made = [await store.keys.create(f"app{i}", frozenset({"infer"}), caller=operator) for i in range(3)]
        assert [store.keys.check(secret) for _, secret in made] == [key for key, _ in made]
        assert await store.keys.list() == [key for key, _ in made]

    in_store(scenario)


def test_an_unknown_key_cannot_be_revoked(in_store: InStore, operator: Caller) -> None:
    async def scenario(store: Store) -> None:
        with pytest.raises(Refused) as caught:
            await store.keys.revoke("key-none", caller=operator)
        assert (caught.value.status, caught.value.code) == (404, "key_not_found")

    in_store(scenario)


def test_the_secret_is_not_in_the_file(in_store: InStore, operator: Caller, tmp_path: Path) -> None:
    async def create(store: Store) -> str:
        return (await store.keys.create("app", frozenset({"infer"}), caller=operator))[1]

    secret = in_store(create)
    content = (tmp_path / "edged.db").read_bytes()
    assert b"key_create" in content
    assert secret.removeprefix(SECRET_PREFIX).encode() not in content
