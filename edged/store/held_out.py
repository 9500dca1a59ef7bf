"""Prompts of users that no update has learned from: what a version is compared with another on. Reads only."""

from __future__ import annotations

from edged.records import PracticePrompt
from edged.store import blobs
from edged.store.database import Database
from edged.store.rows import all_rows

ID_BYTES = 4  # of a token id in a blob
LOOKED_AT = 512  # newest users' episodes among which prompts are looked for

_PROMPTS = f"""
    WITH recent AS (
        SELECT id, prompt_ids FROM episodes AS e WHERE base_sha256 = ?1
        AND NOT EXISTS (SELECT 1 FROM practice AS p WHERE p.episode_id = e.id) ORDER BY id DESC LIMIT {LOOKED_AT}
    ),
    learned AS (
        SELECT e.prompt_ids FROM ratings AS r JOIN episodes AS e ON e.id = r.episode_id WHERE r.state = 'used'
        UNION SELECT e.prompt_ids FROM practice AS p JOIN episodes AS e ON e.id = p.episode_id WHERE p.state = 'used'
        UNION SELECT e.prompt_ids FROM written AS w JOIN feedback AS f ON f.seq = w.feedback_seq
            JOIN episodes AS e ON e.id = f.episode_id WHERE w.state = 'used'
    )
    SELECT e.id, e.messages, e.prompt FROM episodes AS e JOIN (
        SELECT max(id) AS id FROM recent WHERE prompt_ids NOT IN (SELECT prompt_ids FROM learned) GROUP BY prompt_ids
    ) AS newest ON newest.id = e.id WHERE length(e.prompt_ids) <= ?3 ORDER BY e.id DESC LIMIT ?2
"""


class HeldOut:
    """The prompts that are held out. They change as updates use what answers them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def prompts(self, limit: int, base_sha256: str, *, tokens_max: int) -> list[PracticePrompt]:
        """Different prompts of at most `tokens_max` tokens, the one that was asked last first."""
        values = (base_sha256, limit, tokens_max * ID_BYTES)
        return await self._database.read(
            lambda connection: [
                PracticePrompt(
                    prompt_of=row[0], messages=None if row[1] is None else blobs.from_json(row[1]), prompt=row[2]
                )
                for row in all_rows(connection, _PROMPTS, values)
            ]
        )
