"""Episodes: what was sampled, token by token, and what the trainer said of it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

import apsw

from edged.records import Caller, Episode, EpisodeOrigin, EpisodeScore, Feedback, ShownCalls
from edged.store import audit, blobs, feedback, superseding
from edged.store.database import Database
from edged.store.rows import SHAPED_BY, Row, all_rows
from edged.store.tally import Tally

_COLUMNS = (
    "id, completion_id, choice, created_at, kind, model, base_sha256, version, messages, prompt, prompt_ids,"
    " completion_ids, logprobs, raw_logprobs, text, finish_reason, temperature, top_p, top_k, seed, max_tokens, user,"
    " metadata, caller"
)
# Who asked is told by the table of practice alone.
COLUMNS = (
    ", ".join(f"e.{column.strip()}" for column in _COLUMNS.split(","))
    + f", {SHAPED_BY}"
    + ", EXISTS (SELECT 1 FROM practice AS asked WHERE asked.episode_id = e.id)"
)
_N_EPISODE = len(_COLUMNS.split(",")) + 2

_INSERT = (
    "INSERT INTO episodes (completion_id, choice, created_at, kind, model, base_sha256, version, messages, prompt,"
    " prompt_ids, completion_ids, logprobs, raw_logprobs, n_tokens, logprobs_complete, text, finish_reason,"
    " temperature, top_p, top_k, seed, max_tokens, user, metadata, caller)"
    f" VALUES ({', '.join('?' * 25)})"
)


class Episodes:
    """The book of episodes. Writes return when the rows are on disk."""

    def __init__(self, database: Database, tally: Tally, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._tally = tally
        self._clock = clock

    def count(self) -> int:
        """Episodes of users in the store. No I/O."""
        return self._tally.episodes

    async def add(self, episode: Episode, *, store: bool = False, shown: ShownCalls | None = None) -> int:
        """Store an episode and return its id; the id in `episode` is ignored. Ids rise and are never used twice.

        store: its completion can be found again (`edged.store.completions`); the same for all of its choices.
        shown: if so, and it calls tools: how it was shown.
        Raises StoreError if this choice of this completion is stored already.
        """
        values = to_row(episode)

        def counted(_id: int) -> None:
            self._tally.episodes += 1

        def write(connection: apsw.Connection) -> int:
            episode_id = insert(connection, values)
            if store:
                connection.execute(
                    "INSERT INTO stored (episode_id) SELECT ?1 WHERE NOT EXISTS (SELECT 1 FROM stored AS s"
                    " JOIN episodes AS e ON e.id = s.episode_id WHERE e.completion_id = ?2)",
                    (episode_id, episode.completion_id),
                )
            if store and shown is not None:
                connection.execute(
                    "INSERT INTO shown (episode_id, text, calls) VALUES (?, ?, ?)",
                    (episode_id, shown.text, blobs.to_json(shown.calls)),
                )
            return episode_id

        return await self._database.write(write, counted)

    async def get(self, ids: Sequence[int]) -> list[Episode]:
        """The episodes with these ids, in the order asked; those that do not exist (any more) are left out."""

        query = (
            f"SELECT {COLUMNS} FROM json_each(?) AS asked JOIN episodes AS e ON e.id = asked.value ORDER BY asked.key"
        )
        return await self._select(query, blobs.to_json([*ids]))

    async def unscored(
        self, limit: int, versions: Collection[int] | None, *, base_sha256: str | None = None
    ) -> list[Episode]:
        """Episodes without a score, newest first. Those without a token have nothing to score and are left out.

        Args:
            versions: only those by one of these; None: by any.
            base_sha256: only those sampled on this base model; None: on any.
        """

        query = (
            f"SELECT {COLUMNS} FROM unscored AS u JOIN episodes AS e ON e.id = u.episode_id"
            " WHERE (?1 IS NULL OR u.version IN (SELECT value FROM json_each(?1)))"
            " AND (?2 IS NULL OR e.base_sha256 = ?2) ORDER BY u.episode_id DESC LIMIT ?3"
        )
        named = None if versions is None else blobs.to_json(sorted(versions))
        return await self._select(query, named, base_sha256, limit)

    async def set_scores(self, scores: Iterable[EpisodeScore]) -> None:
        """Keep what the trainer said, the newest word for each episode; an episode that is gone is passed over."""
        rows = [(s.episode_id, s.reference_version, s.reference_logprob, s.kl, s.engine_gap) for s in scores]

        def replace(connection: apsw.Connection) -> None:
            connection.executemany(
                "INSERT OR REPLACE INTO scores (episode_id, reference_version, reference_logprob, kl, engine_gap)"
                " SELECT ?1, ?2, ?3, ?4, ?5 WHERE EXISTS (SELECT 1 FROM episodes WHERE id = ?1)",
                rows,
            )
            connection.executemany("DELETE FROM unscored WHERE episode_id = ?", [row[:1] for row in rows])

        await self._database.write(replace)

    async def delete_user(self, user: str, *, caller: Caller) -> int:
        """Remove every episode, rating and preference of `user`; the number of episodes removed.

        Feedback that `user` gave on others' answers goes too, and what others said before counts again; so do answers
        that the box gave in practice to prompts of `user`, which are not counted. The audit keeps a hash of the name,
        not the name. The removed words are in none of the database's files any more, unless another
        program was reading them (see `Database.write`).
        """
        now = self._clock()

        def delete(connection: apsw.Connection) -> tuple[int, Tally]:
            removed = remove(connection, "user", user)
            superseding.remove_of_user(connection, user)
            connection.execute("DELETE FROM preferences WHERE user = ?", (user,))
            name_hash = hashlib.sha256(user.encode("utf-8", "surrogatepass")).hexdigest()[:16]
            detail = {"user_sha256": name_hash, "episodes": removed}
            audit.record(connection, "delete_user", detail, caller=caller, now=now)
            return removed, Tally.read(connection)

        removed, _ = await self._database.write(delete, lambda outcome: self._tally.replace(outcome[1]), scrubs=True)
        return removed

    async def _select(self, query: str, *values: str | int | None) -> list[Episode]:
        return await self._database.read(
            lambda connection: [to_episode(row) for row in all_rows(connection, query, values)]
        )

    async def list(
        self, *, after: int, limit: int, version: int | None, rated: bool | None, origin: EpisodeOrigin = "user"
    ) -> list[tuple[Episode, Feedback | None, EpisodeScore | None]]:
        """Episodes with id > after, oldest first, with the feedback that counts and the trainer's score, if any.

        The feedback is the row whose rating counts, or the newest while none has one, with the correction that counts.

        Args:
            origin: those that users asked for, or those of practice.
            version: only those by this adapter; None: all.
            rated: only those whose counting feedback has a rating (True) or has none (False); None: all.
        """
        asked_by_the_box = "EXISTS (SELECT 1 FROM practice AS p WHERE p.episode_id = e.id)"
        conditions = ["e.id > ?", asked_by_the_box if origin == "practice" else f"NOT {asked_by_the_box}"]
        values: list[int] = [after]
        if version is not None:
            conditions.append("e.version = ?")
            values.append(version)
        if rated is not None:
            conditions.append(f"f.rating IS {'NOT ' if rated else ''}NULL")
        query = (
            f"SELECT {COLUMNS}, {feedback.COUNTING_COLUMNS},"
            " s.reference_version, s.reference_logprob, s.kl, s.engine_gap"
            " FROM episodes AS e LEFT JOIN ratings AS r ON r.episode_id = e.id"
            " LEFT JOIN feedback AS f ON f.seq = r.feedback_seq LEFT JOIN scores AS s ON s.episode_id = e.id"
            f" WHERE {' AND '.join(conditions)} ORDER BY e.id LIMIT ?"
        )
        return await self._database.read(
            lambda connection: [_to_entry(row) for row in all_rows(connection, query, (*values, limit))]
        )


def insert(connection: apsw.Connection, values: Row) -> int:
    """Write an episode, as `to_row` gives it; its id. One with tokens waits to be scored."""
    *columns, shaped_by = values
    connection.execute(_INSERT, columns)
    episode_id = connection.last_insert_rowid()
    if shaped_by:
        connection.execute("INSERT INTO shaped (episode_id, by) VALUES (?, ?)", (episode_id, shaped_by))
    connection.execute(
        "INSERT INTO unscored SELECT id, version FROM episodes WHERE id = ? AND n_tokens > 0", (episode_id,)
    )
    return episode_id


def remove(connection: apsw.Connection, column: Literal["user", "completion_id"], value: str) -> int:
    """Remove the episodes with this `value`, what was said of them, and what the box answered in practice to their
    prompts; the number of episodes removed, without those of practice."""
    connection.execute(
        f"DELETE FROM ratings WHERE episode_id IN (SELECT id FROM episodes WHERE {column} = ?)", (value,)
    )
    connection.execute(
        "DELETE FROM episodes WHERE id IN (SELECT p.episode_id FROM practice AS p"
        f" JOIN episodes AS asked ON asked.id = p.prompt_of WHERE asked.{column} = ?)",
        (value,),
    )
    connection.execute(f"DELETE FROM episodes WHERE {column} = ?", (value,))
    return connection.changes()


def to_row(episode: Episode) -> Row:
    """The columns of an episode that is new, and what shaped it."""
    n_tokens = len(episode.completion_ids)
    logprobs_complete = len(episode.logprobs) == n_tokens and all(
        value is not None and value == value for value in episode.logprobs
    )
    return (
        episode.completion_id,
        episode.choice,
        episode.created_at,
        episode.kind,
        episode.model,
        episode.base_sha256,
        episode.version,
        None if episode.messages is None else blobs.to_json(episode.messages),
        episode.prompt,
        blobs.pack_ids(episode.prompt_ids),
        blobs.pack_ids(episode.completion_ids),
        blobs.pack_logprobs(episode.logprobs),
        blobs.pack_logprobs(episode.raw_logprobs),
        n_tokens,
        logprobs_complete,
        episode.text,
        episode.finish_reason,
        episode.temperature,
        episode.top_p,
        episode.top_k,
        episode.seed,
        episode.max_tokens,
        episode.user,
        blobs.to_json(episode.metadata),
        episode.caller,
        episode.shaped_by,
    )


def to_episode(row: Row) -> Episode:
    """A row of COLUMNS as a record."""
    return Episode(
        id=row[0],
        completion_id=row[1],
        choice=row[2],
        created_at=row[3],
        kind=row[4],
        model=row[5],
        base_sha256=row[6],
        version=row[7],
        messages=None if row[8] is None else blobs.from_json(row[8]),
        prompt=row[9],
        prompt_ids=blobs.unpack_ids(row[10]),
        completion_ids=blobs.unpack_ids(row[11]),
        logprobs=blobs.unpack_logprobs(row[12]),
        raw_logprobs=blobs.unpack_logprobs(row[13]),
        text=row[14],
        finish_reason=row[15],
        temperature=row[16],
        top_p=row[17],
        top_k=row[18],
        seed=row[19],
        max_tokens=row[20],
        user=row[21],
        metadata=blobs.from_json(row[22]),
        caller=row[23],
        shaped_by=row[24],
        origin="practice" if row[25] else "user",
    )


def _to_entry(row: Row) -> tuple[Episode, Feedback | None, EpisodeScore | None]:
    episode = to_episode(row[:_N_EPISODE])
    feedback_end = _N_EPISODE + feedback.N_COLUMNS
    feedback_row, score_row = row[_N_EPISODE:feedback_end], row[feedback_end:]
    score = None
    if score_row[0] is not None:
        score = EpisodeScore(
            episode_id=episode.id,
            reference_version=score_row[0],
            reference_logprob=score_row[1],
            kl=score_row[2],
            engine_gap=score_row[3],
        )
    return episode, None if feedback_row[0] is None else feedback.to_feedback(feedback_row), score
