"""Practice: episodes that the box asked of itself, the judge's rewards for them, and what became of each.

An answer is an episode like any other with a row in the table `practice` beside it, which is all that tells the two
apart: sampled -> judged -> used (by a finished update; for good) or skipped, or failed. It belongs to no user, but it
goes when the user goes whose prompt it answers. Nobody can rate it.

What is finished is kept for a while and then removed; the counts of a status are counters that go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import apsw

from edged.records import Episode, JudgedAnswer, PracticeCounts, PracticePrompt, RatedAnswer, RatedChoice
from edged.store import blobs, episodes
from edged.store.database import Database
from edged.store.rows import Row, all_rows, first_row, single_row

LOOKED_AT = 512  # newest users' episodes among which prompts are looked for
FINISHED_KEPT = 512  # practice answers
_COUNTER = "practice/"


class Practice:
    """The book of practice. Writes return when the rows are on disk. base_sha256: only what was sampled on it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def counts(self, base_sha256: str) -> PracticeCounts:
        """What waits, and what has been."""
        return await self._database.read(lambda connection: _counts(connection, base_sha256))

    async def prompts(self, limit: int, base_sha256: str) -> list[PracticePrompt]:
        """Different prompts of users, the one that was asked last first."""
        query = (
            "SELECT e.id, e.messages, e.prompt FROM episodes AS e JOIN (SELECT max(id) AS id FROM"
            f" ({_RECENT}) GROUP BY prompt_ids) AS newest ON newest.id = e.id ORDER BY e.id DESC LIMIT ?2"
        )
        return await self._database.read(
            lambda connection: [_to_prompt(row) for row in all_rows(connection, query, (base_sha256, limit))]
        )

    async def begin_round(self) -> None:
        """Count a round, and remove the oldest of what is finished."""

        def begin(connection: apsw.Connection) -> None:
            connection.execute(
                "DELETE FROM episodes WHERE id IN (SELECT episode_id FROM practice"
                " WHERE state IN ('used', 'skipped', 'failed') ORDER BY episode_id DESC LIMIT -1 OFFSET ?)",
                (FINISHED_KEPT,),
            )
            _count(connection, "rounds", 1)

        await self._database.write(begin)

    async def add_group(self, answers: Sequence[Episode], *, prompt_of: int | None, answers_to: str) -> bool:
        """Store the answers to one prompt, together; their ids are given. False, and nothing is stored, if the episode
        that the prompt was taken from is gone."""
        rows = [episodes.to_row(answer) for answer in answers]

        def insert(connection: apsw.Connection) -> bool:
            if (
                prompt_of is not None
                and first_row(connection, "SELECT 1 FROM episodes WHERE id = ?", (prompt_of,)) is None
            ):
                return False
            for row in rows:
                connection.execute(
                    "INSERT INTO practice (episode_id, prompt_of, answers_to) VALUES (?, ?, ?)",
                    (episodes.insert(connection, row), prompt_of, answers_to),
                )
            _count(connection, "answers", len(rows))
            return True

        return await self._database.write(insert)

    async def unjudged(self, base_sha256: str) -> list[Episode]:
        """Answers that the judge has not been asked about, oldest first."""
        query = (
            f"SELECT {episodes.COLUMNS} FROM practice AS p JOIN episodes AS e ON e.id = p.episode_id"
            " WHERE p.state = 'sampled' AND e.base_sha256 = ? ORDER BY e.id"
        )
        return await self._database.read(
            lambda connection: [episodes.to_episode(row) for row in all_rows(connection, query, (base_sha256,))]
        )

    async def set_rewards(self, rewards: Iterable[tuple[int, float | None, str | None]], *, now: float) -> None:
        """Keep what the judge said: (episode id, reward, reason); a reason without a reward is a failure, one beside it
        a remark. Answers that are gone, or judged already, are passed over."""
        rows = list(rewards)

        def update(connection: apsw.Connection) -> None:
            for episode_id, reward, reason in rows:
                connection.execute(
                    "UPDATE practice SET state = iif(?2 IS NULL, 'failed', 'judged'), reward = ?2,"
                    " judged_at = iif(?2 IS NULL, NULL, ?3) WHERE episode_id = ?1 AND state = 'sampled'",
                    (episode_id, reward, now),
                )
                if not connection.changes():
                    continue
                if reward is not None:
                    _count(connection, "rewards", 1)
                if reason is not None:
                    _count(connection, f"reason/{reason}", 1)

        await self._database.write(update)

    async def fail(self, reason: str) -> None:
        """Count something that gave no answers to judge."""
        await self._database.write(lambda connection: _count(connection, f"reason/{reason}", 1))

    async def judged(self, base_sha256: str) -> list[JudgedAnswer]:
        """Answers with a reward that no update has used, oldest first."""
        query = (
            "SELECT e.id, p.reward, p.judged_at, e.version, e.base_sha256, e.temperature, e.top_p, e.top_k, e.n_tokens,"
            " e.logprobs_complete, p.answers_to FROM practice AS p JOIN episodes AS e ON e.id = p.episode_id"
            " WHERE p.state = 'judged' AND e.base_sha256 = ? ORDER BY e.id"
        )
        return await self._database.read(
            lambda connection: [_to_judged(row) for row in all_rows(connection, query, (base_sha256,))]
        )

    async def skip(self, skipped: Iterable[tuple[int, str]]) -> None:
        """Never train on these: (episode id, reason). Those that are not judged are passed over."""
        pairs = list(skipped)

        def update(connection: apsw.Connection) -> None:
            for episode_id, reason in pairs:
                connection.execute(
                    "UPDATE practice SET state = 'skipped' WHERE episode_id = ? AND state = 'judged'", (episode_id,)
                )
                if connection.changes():
                    _count(connection, f"skipped/{reason}", 1)

        await self._database.write(update)

    async def rated_answers(self, limit: int, base_sha256: str) -> list[RatedAnswer]:
        """What people rated, whether an update can use it or not; the newest ratings."""
        query = (
            "SELECT e.id, e.prompt_ids, e.completion_ids, f.rating FROM ratings AS r"
            " JOIN feedback AS f ON f.seq = r.feedback_seq JOIN episodes AS e ON e.id = r.episode_id"
            " WHERE f.rating IS NOT NULL AND e.n_tokens > 0 AND e.base_sha256 = ? ORDER BY r.feedback_seq DESC LIMIT ?"
        )
        return await self._database.read(
            lambda connection: [_to_rated(row) for row in all_rows(connection, query, (base_sha256, limit))]
        )


# Users' newest episodes on the base ?1.
_RECENT = (
    "SELECT id, prompt_ids FROM episodes AS e WHERE base_sha256 = ?1 AND NOT EXISTS"
    f" (SELECT 1 FROM practice AS p WHERE p.episode_id = e.id) ORDER BY id DESC LIMIT {LOOKED_AT}"
)


def mark_used(connection: apsw.Connection, episode_ids: Iterable[int], *, update_id: int) -> None:
    """Practice answers among these have been trained on by `update_id`."""
    connection.executemany(
        "UPDATE practice SET state = 'used', used_by = ? WHERE episode_id = ? AND state = 'judged'",
        [(update_id, episode_id) for episode_id in episode_ids],
    )


def newest_rating(connection: apsw.Connection) -> int:
    """The place of the newest rating in the order of feedback; 0 if there is none."""
    (seq,) = single_row(connection, "SELECT coalesce(max(seq), 0) FROM feedback WHERE rating IS NOT NULL")
    return int(seq)


def _count(connection: apsw.Connection, name: str, number: int) -> None:
    connection.execute(
        "INSERT INTO counters (name, value) VALUES (?, ?)"
        " ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
        (_COUNTER + name, number),
    )


def _counts(connection: apsw.Connection, base_sha256: str) -> PracticeCounts:
    unjudged, judged, groups = single_row(
        connection,
        "SELECT count(*) FILTER (WHERE p.state = 'sampled'), count(*) FILTER (WHERE p.state = 'judged'),"
        " count(DISTINCT p.answers_to) FROM practice AS p JOIN episodes AS e ON e.id = p.episode_id"
        " WHERE p.state IN ('sampled', 'judged') AND e.base_sha256 = ?",
        (base_sha256,),
    )
    (prompts,) = single_row(connection, f"SELECT count(DISTINCT prompt_ids) FROM ({_RECENT})", (base_sha256,))
    updates, in_a_row = single_row(
        connection,
        "SELECT count(*), count(*) FILTER (WHERE practice_after >= ?) FROM updates"
        " WHERE practice_after IS NOT NULL AND state = 'finished' AND verdict <> 'skipped'",
        (newest_rating(connection),),
    )
    named = {
        name.removeprefix(_COUNTER): value
        for name, value in all_rows(connection, "SELECT name, value FROM counters WHERE name GLOB ?", (f"{_COUNTER}*",))
    }

    def reasons(kind: str) -> dict[str, int]:
        return {name.removeprefix(kind): value for name, value in sorted(named.items()) if name.startswith(kind)}

    return PracticeCounts(
        unjudged=unjudged,
        judged=judged,
        groups=groups,
        prompts=prompts,
        in_a_row=in_a_row,
        rounds=named.get("rounds", 0),
        answers=named.get("answers", 0),
        rewards=named.get("rewards", 0),
        updates=updates,
        reasons=reasons("reason/"),
        skipped=reasons("skipped/"),
    )


def _to_prompt(row: Row) -> PracticePrompt:
    return PracticePrompt(prompt_of=row[0], messages=None if row[1] is None else blobs.from_json(row[1]), prompt=row[2])


def _to_judged(row: Row) -> JudgedAnswer:
    choice = RatedChoice(
        episode_id=row[0],
        feedback_id="",
        rating=row[1],
        rated_at=row[2],
        version=row[3],
        base_sha256=row[4],
        temperature=row[5],
        top_p=row[6],
        top_k=row[7],
        n_tokens=row[8],
        logprobs_complete=bool(row[9]),
        used_by=None,
        group=row[10],
    )
    return JudgedAnswer(choice=choice, answers_to=row[10])


def _to_rated(row: Row) -> RatedAnswer:
    return RatedAnswer(
        episode_id=row[0],
        prompt_ids=blobs.unpack_ids(row[1]),
        completion_ids=blobs.unpack_ids(row[2]),
        rating=row[3],
    )
