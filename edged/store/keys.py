"""API keys. The secret is shown once and stored as its SHA-256: it is 256 random bits, so a slow hash gains nothing.

`check` works on a copy in memory, so that a request costs no query.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable

import apsw

from edged.records import ApiKey, Caller, Scope
from edged.refusal import Refused
from edged.store import audit, blobs
from edged.store.database import Database
from edged.store.rows import Row, all_rows, first_row

SECRET_PREFIX = "edged-"
_SECRET_BYTES = 32

_KEY = "SELECT id, name, scopes, created_at, revoked_at FROM api_keys"


class KeyRing:
    """The API keys. Writes return when the rows are on disk."""

    def __init__(
        self,
        database: Database,
        valid: dict[bytes, ApiKey],
        *,
        any_keys: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._valid = dict(valid)
        self._any_keys = any_keys
        self._clock = clock

    def any_keys(self) -> bool:
        """Whether a key was ever made. Revoking the last one must not open the door again to everybody. No I/O."""
        return self._any_keys

    def check(self, secret: str) -> ApiKey | None:
        """The valid key with this secret. No I/O; takes equally long whichever key matches, or none."""
        digest = _digest(secret)
        found = None
        for stored, key in self._valid.items():
            if hmac.compare_digest(stored, digest):
                found = key
        return found

    async def create(self, name: str, scopes: frozenset[Scope], *, caller: Caller) -> tuple[ApiKey, str]:
        """A new key and its secret, which nobody can look up later."""
        secret = SECRET_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
        digest = _digest(secret)
        key = ApiKey(
            id=f"key-{secrets.token_hex(6)}", name=name, scopes=scopes, created_at=self._clock(), revoked_at=None
        )

        def insert(connection: apsw.Connection) -> None:
            connection.execute(
                "INSERT INTO api_keys (id, name, scopes, secret_sha256, created_at) VALUES (?, ?, ?, ?, ?)",
                (key.id, key.name, blobs.to_json(sorted(key.scopes)), digest, key.created_at),
            )
            detail = {"id": key.id, "name": name, "scopes": sorted(scopes)}
            audit.record(connection, "key_create", detail, caller=caller, now=key.created_at)

        def adopt(_: None) -> None:
            self._valid[digest] = key
            self._any_keys = True

        await self._database.write(insert, adopt)
        return key, secret

    async def list(self) -> list[ApiKey]:
        """All keys, revoked ones included, oldest first."""

        return await self._database.read(_read_all)

    async def revoke(self, key_id: str, *, caller: Caller) -> ApiKey:
        """Make a key invalid for good; revoking it again changes nothing. Raises Refused 404 `key_not_found`."""
        now = self._clock()

        def update(connection: apsw.Connection) -> ApiKey:
            row = first_row(connection, f"{_KEY} WHERE id = ?", (key_id,))
            if row is None:
                raise Refused(404, "key_not_found", f"no API key has the id {key_id!r}")
            key = _to_key(row)
            if key.revoked_at is not None:
                return key
            connection.execute("UPDATE api_keys SET revoked_at = ? WHERE id = ?", (now, key_id))
            audit.record(connection, "key_revoke", {"id": key.id, "name": key.name}, caller=caller, now=now)
            return dataclasses.replace(key, revoked_at=now)

        def adopt(revoked: ApiKey) -> None:
            self._valid = {digest: key for digest, key in self._valid.items() if key.id != revoked.id}

        return await self._database.write(update, adopt)


def _read_all(connection: apsw.Connection) -> list[ApiKey]:
    return [_to_key(row) for row in all_rows(connection, f"{_KEY} ORDER BY created_at, id")]


def read_valid(connection: apsw.Connection) -> dict[bytes, ApiKey]:
    """Digest of the secret -> key, for every key that is not revoked."""
    rows = all_rows(
        connection,
        "SELECT id, name, scopes, created_at, revoked_at, secret_sha256 FROM api_keys WHERE revoked_at IS NULL",
    )
    return {row[5]: _to_key(row) for row in rows}


def read_any(connection: apsw.Connection) -> bool:
    """Whether a key was ever made, valid or revoked."""
    return first_row(connection, "SELECT 1 FROM api_keys LIMIT 1") is not None


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def _to_key(row: Row) -> ApiKey:
    return ApiKey(
        id=row[0], name=row[1], scopes=frozenset(blobs.from_json(row[2])), created_at=row[3], revoked_at=row[4]
    )
