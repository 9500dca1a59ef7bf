"""Whose file it is, and which schema it has."""

from __future__ import annotations

import apsw
import pytest

from edged.store import schema
from edged.store.errors import StoreError


def test_a_new_database_has_the_base_as_live_version_0() -> None:
    connection = apsw.Connection(":memory:")
    schema.migrate(connection)
    assert connection.execute("SELECT version, origin, state FROM adapters").fetchall() == [(0, "base", "published")]
    assert connection.execute("SELECT version, why, pinned FROM live_history").fetchall() == [(0, "base", 0)]
    assert connection.pragma("user_version") == schema.SCHEMA_VERSION


def test_migrating_again_changes_nothing() -> None:
    connection = apsw.Connection(":memory:")
    schema.migrate(connection)
    changes = connection.total_changes()
    schema.migrate(connection)
    schema.check(connection)
    assert connection.total_changes() == changes


def test_a_newer_schema_is_refused() -> None:
    connection = apsw.Connection(":memory:")
    schema.migrate(connection)
    connection.pragma("user_version", schema.SCHEMA_VERSION + 1)
    with pytest.raises(StoreError, match=f"has schema {schema.SCHEMA_VERSION + 1}, this edged knows .* newer edged"):
        schema.check(connection)


def test_a_database_of_another_program_is_refused() -> None:
    connection = apsw.Connection(":memory:")
    connection.execute("CREATE TABLE notes (text)")
    with pytest.raises(StoreError, match="another program"):
        schema.check(connection)
