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


def test_a_rating_that_a_correction_took_the_place_of_counts_again() -> None:
    connection = apsw.Connection(":memory:")
    for step in schema._STEPS[:4]:
        connection.execute(step)
    connection.pragma("application_id", schema.APPLICATION_ID)
    connection.pragma("user_version", 4)
    episode = ("chat", "m", "b", 0, 1, 1, "stop", 1.0, 1.0, 0, 0, "uid:0", "{}", "", b"", b"", b"", b"")
    rows = [(-1.0, None), (None, "So.")]
    for number, state in ((1, "unrated"), (2, "unrated"), (3, "unrated"), (4, "fresh")):
        connection.execute(
            "INSERT INTO episodes (id, completion_id, choice, created_at, kind, model, base_sha256, version, n_tokens,"
            " logprobs_complete, finish_reason, temperature, top_p, top_k, seed, caller, metadata, text, prompt_ids,"
            f" completion_ids, logprobs, raw_logprobs) VALUES (?, ?, 0, 1.0{', ?' * len(episode)})",
            (number, f"c{number}", *episode),
        )
        for rating, correction in rows[1:] if number == 3 else rows[::-1] if number == 4 else rows:
            connection.execute(
                "INSERT INTO feedback (id, episode_id, rating, correction, tags, source, caller, created_at)"
                " VALUES (hex(randomblob(8)), ?, ?, ?, '[]', '', 'uid:0', 1.0)",
                (number, rating, correction),
            )
        connection.execute(
            "INSERT INTO ratings (episode_id, feedback_seq, version, state) VALUES (?, last_insert_rowid(), 0, ?)",
            (number, state),
        )
    connection.execute("INSERT INTO drops SELECT seq, 'greedy' FROM feedback WHERE episode_id = 2 AND rating < 0")
    schema.migrate(connection)
    found = connection.execute(
        "SELECT r.episode_id, f.rating, r.state FROM ratings AS r JOIN feedback AS f ON f.seq = r.feedback_seq"
    ).fetchall()
    assert found == [(1, -1.0, "fresh"), (2, -1.0, "dropped"), (3, None, "unrated"), (4, -1.0, "fresh")]


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
