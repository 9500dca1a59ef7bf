"""Reading rows as plain tuples. The schema (STRICT tables) decides what a column holds, so values are `Any` here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import apsw

Row = tuple[Any, ...]

# What shaped the distribution of the episode `e`, in SQL; '' for a plain sample.
SHAPED_BY = "ifnull((SELECT shaped.by FROM shaped WHERE shaped.episode_id = e.id), '')"


def all_rows(connection: apsw.Connection, query: str, values: Sequence[Any] = ()) -> list[Row]:
    """Every row of a query."""
    return connection.execute(query, tuple(values)).fetchall()


def first_row(connection: apsw.Connection, query: str, values: Sequence[Any] = ()) -> Row | None:
    """The first row, or None if there is none."""
    return connection.execute(query, tuple(values)).fetchone()


def single_row(connection: apsw.Connection, query: str, values: Sequence[Any] = ()) -> Row:
    """The row of a query that always has one."""
    row = first_row(connection, query, values)
    if row is None:
        raise LookupError(f"no row for: {query}")
    return row
