"""Which feedback of a choice counts, kept while rows come and go.

Of each choice the newest rating counts, and the newest correction, which is another word on the same answer: neither
takes the other's place. A row replaces the newest one before it that it takes something of.

The table `ratings` has one row for each choice with feedback. It names the row whose rating counts, or the newest row
while none has a rating, and says what became of the choice: fresh -> used (for good) or dropped; see
`edged.store.schema`. Rating a dropped choice again makes it fresh again; rating a used one again changes the reward
that replay sees, and nothing else. Once a row goes with its user, the one that replaced it names the one before it.
"""

from __future__ import annotations

import apsw

from edged.store.rows import all_rows, first_row, single_row


def replaced(
    connection: apsw.Connection, episode_id: int, seq: int | None, *, rates: bool, corrects: bool
) -> str | None:
    """Id of the newest row of the choice before `seq` (None: of all) whose rating or correction such a row takes."""
    row = first_row(
        connection,
        "SELECT id FROM feedback WHERE episode_id = ?1 AND (?2 IS NULL OR seq < ?2)"
        " AND ((?3 AND rating IS NOT NULL) OR (?4 AND correction IS NOT NULL)) ORDER BY seq DESC LIMIT 1",
        (episode_id, seq, rates, corrects),
    )
    return None if row is None else str(row[0])


def count_in(connection: apsw.Connection, episode_id: int, seq: int, *, version: int, rates: bool) -> int:
    """A row was written, the newest of its choice; by how much that changes the number of rated choices.

    version: that sampled the choice. rates: whether the row has a rating.
    """
    counting = first_row(
        connection,
        "SELECT f.rating IS NOT NULL, r.state FROM ratings AS r JOIN feedback AS f ON f.seq = r.feedback_seq"
        " WHERE r.episode_id = ?",
        (episode_id,),
    )
    if counting is None:
        connection.execute(
            "INSERT INTO ratings (episode_id, feedback_seq, version, state) VALUES (?, ?, ?, ?)",
            (episode_id, seq, version, "fresh" if rates else "unrated"),
        )
        return int(rates)
    was_rated, old_state = counting
    if rates or not was_rated:
        state = "used" if old_state == "used" else "fresh" if rates else "unrated"
        connection.execute(
            "UPDATE ratings SET feedback_seq = ?, state = ? WHERE episode_id = ?", (seq, state, episode_id)
        )
    return int(rates and not was_rated)


def remove_of_user(connection: apsw.Connection, user: str) -> None:
    """Remove the feedback rows of `user`; on choices that others rated or corrected too, theirs count."""
    touched = [row[0] for row in connection.execute("SELECT DISTINCT episode_id FROM feedback WHERE user = ?", (user,))]
    for episode_id in touched:
        state, used_by, version = single_row(
            connection, "SELECT state, used_by, version FROM ratings WHERE episode_id = ?", (episode_id,)
        )
        connection.execute("DELETE FROM ratings WHERE episode_id = ?", (episode_id,))
        connection.execute("DELETE FROM feedback WHERE episode_id = ? AND user = ?", (episode_id, user))
        rest = all_rows(
            connection,
            "SELECT seq, rating IS NOT NULL, correction IS NOT NULL FROM feedback WHERE episode_id = ? ORDER BY seq",
            (episode_id,),
        )
        for seq, rates, corrects in rest:
            replaces = replaced(connection, episode_id, seq, rates=rates, corrects=corrects)
            connection.execute("UPDATE feedback SET replaces = ? WHERE seq = ?", (replaces, seq))
        if rest:
            counting_seq, rates, _ = next((row for row in reversed(rest) if row[1]), rest[-1])
            was_dropped = first_row(connection, "SELECT 1 FROM drops WHERE feedback_seq = ?", (counting_seq,))
            if state != "used":
                state = "unrated" if not rates else "dropped" if was_dropped else "fresh"
            connection.execute(
                "INSERT INTO ratings (episode_id, feedback_seq, version, state, used_by) VALUES (?, ?, ?, ?, ?)",
                (episode_id, counting_seq, version, state, used_by),
            )
