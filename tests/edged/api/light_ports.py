"""The ports of the API in memory: the smallest implementations that keep the contract of `edged.api.ports`."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edged.answer import AnswerEvent, Ask, Ended, Piece, Started, Usage
from edged.records import (
    Adapter,
    ApiKey,
    AuditEntry,
    Caller,
    Episode,
    EpisodeScore,
    Feedback,
    Live,
    NewFeedback,
    Preference,
    Scope,
    StoredChoice,
    Update,
)
from edged.refusal import Refused

FINGERPRINT = "edged-0badcafe-v0"


def a_token(text: str) -> dict[str, Any]:
    spelled = list(text.encode())
    return {
        "token": text,
        "logprob": -0.5,
        "bytes": spelled,
        "top_logprobs": [{"token": text, "logprob": -0.5, "bytes": spelled}],
    }


def an_adapter(version: int, **changes: Any) -> Adapter:
    fields: dict[str, Any] = {
        "version": version,
        "parent_version": version - 1 if version else None,
        "origin": "trained" if version else "base",
        "state": "published",
        "created_at": 1_700_000_000.0 + version,
        "sha256": f"{version:064x}" if version else None,
        "folder": f"v{version}-00000000" if version else None,
        "reason": None,
        "kept": False,
        "metrics": {},
    }
    return Adapter(**{**fields, **changes})


def an_update(id: int, **changes: Any) -> Update:
    fields: dict[str, Any] = {
        "id": id,
        "state": "finished",
        "version": id,
        "parent_version": id - 1,
        "seed": 0,
        "attempts": 1,
        "created_at": 1_700_000_000.0 + id,
        "finished_at": 1_700_000_004.0 + id,
        "verdict": "published",
        "reason": None,
        "seconds": {"train": 3.0},
        "metrics": {"reward/mean": 0.1 * id},
        "new_episode_ids": tuple(range(16)),
        "replay_episode_ids": (),
    }
    return Update(**{**fields, **changes})


class Book:
    """Episodes, feedback, preferences: what the store keeps."""

    def __init__(self) -> None:
        self.episodes: list[Episode] = []
        self.rows: list[Feedback] = []
        self.preferences: list[Preference] = []
        self.stored: set[str] = set()
        self.commits: list[int] = []
        self.on_feedback: Callable[[Feedback], None] = lambda row: None
        self._keys: dict[str, tuple[NewFeedback, Feedback]] = {}

    def record(self, ask: Ask, choice: int, text: str, finish_reason: Any, version: int) -> None:
        if ask.store:
            self.stored.add(ask.completion_id)
        self.episodes.append(
            Episode(
                id=len(self.episodes) + 1,
                completion_id=ask.completion_id,
                choice=choice,
                created_at=time.time(),
                kind="chat" if ask.messages is not None else "text",
                model="light",
                base_sha256="0badcafe",
                version=version,
                messages=ask.messages,
                prompt=ask.prompt,
                prompt_ids=(1, 2, 3),
                completion_ids=tuple(range(len(text.split()))),
                logprobs=(),
                raw_logprobs=(),
                text=text,
                finish_reason=finish_reason,
                temperature=ask.temperature,
                top_p=ask.top_p,
                top_k=ask.top_k,
                seed=0,
                max_tokens=ask.max_tokens,
                user=ask.user,
                metadata=ask.metadata,
                caller=ask.caller.name,
            )
        )

    async def add(self, feedback: NewFeedback, *, idempotency_key: str | None) -> tuple[Feedback, bool]:
        if idempotency_key in self._keys:
            known, row = self._keys[idempotency_key]
            if known != feedback:
                raise Refused(409, "idempotency_conflict", "this Idempotency-Key came with another body")
            return row, False
        if not any((e.completion_id, e.choice) == (feedback.completion_id, feedback.choice) for e in self.episodes):
            raise Refused(404, "completion_not_found", f"unknown completion {feedback.completion_id}")
        older = [r for r in self.rows if (r.completion_id, r.choice) == (feedback.completion_id, feedback.choice)]
        row = Feedback(
            id=f"fb-{secrets.token_hex(8)}",
            created_at=time.time(),
            replaces=older[-1].id if older else None,
            **dataclasses.asdict(feedback),
        )
        self.rows.append(row)
        if idempotency_key is not None:
            self._keys[idempotency_key] = (feedback, row)
        self.on_feedback(row)
        return row, True

    async def add_many(
        self, feedback: Sequence[NewFeedback], *, idempotency_keys: Sequence[str | None] = ()
    ) -> list[Feedback | Refused]:
        self.commits.append(len(feedback))
        results: list[Feedback | Refused] = []
        for index, item in enumerate(feedback):
            key = idempotency_keys[index] if idempotency_keys else None
            try:
                results.append((await self.add(item, idempotency_key=key))[0])
            except Refused as refused:
                results.append(refused)
        return results

    async def get(self, feedback_id: str) -> Feedback | None:
        return next((row for row in self.rows if row.id == feedback_id), None)

    async def list(self, *, completion_id: str | None, after: str | None, limit: int) -> tuple[list[Feedback], bool]:
        ids = [row.id for row in self.rows]
        if after is not None and after not in ids:
            raise Refused(404, "feedback_not_found", f"unknown feedback {after}")
        rows = self.rows[ids.index(after) + 1 if after is not None else 0 :]
        rows = [row for row in rows if completion_id in (None, row.completion_id)]
        return rows[:limit], len(rows) > limit

    async def prefer(self, preference: Preference) -> Preference:
        self.preferences.append(preference)
        return preference


class Episodes:
    """The same book, as its readers see it."""

    def __init__(self, book: Book) -> None:
        self._book = book

    async def list(
        self, *, after: int, limit: int, version: int | None, rated: bool | None, origin: str = "user"
    ) -> list[tuple[Episode, Feedback | None, EpisodeScore | None]]:
        counting = {(row.completion_id, row.choice): row for row in self._book.rows}
        found: list[tuple[Episode, Feedback | None, EpisodeScore | None]] = []
        for e in self._book.episodes:
            row = counting.get((e.completion_id, e.choice))
            fits = e.origin == origin and version in (None, e.version) and rated in (None, row is not None)
            if e.id > after and fits:
                score = EpisodeScore(
                    episode_id=e.id, reference_version=0, reference_logprob=-1.5, kl=0.01, engine_gap=None
                )
                found.append((e, row, score))
        return found[:limit]

    async def delete_user(self, user: str, *, caller: Caller) -> int:
        gone = [e for e in self._book.episodes if e.user == user]
        self._book.episodes = [e for e in self._book.episodes if e.user != user]
        return len(gone)


class Completions:
    """Stored completions of the same book."""

    def __init__(self, book: Book) -> None:
        self._book = book

    async def get(self, completion_id: str, *, caller: str | None) -> list[StoredChoice]:
        if completion_id not in self._book.stored:
            return []
        mine = (e for e in self._book.episodes if caller in (None, e.caller))
        return [StoredChoice(episode=e, shown=None) for e in mine if e.completion_id == completion_id]

    async def page(
        self,
        *,
        caller: str | None,
        after: str | None,
        limit: int,
        newest_first: bool,
        model: str | None,
        metadata: Mapping[str, str],
    ) -> tuple[list[list[StoredChoice]], bool]:
        ids = list(dict.fromkeys(e.completion_id for e in self._book.episodes if e.completion_id in self._book.stored))
        ids = ids[::-1] if newest_first else ids
        if after is not None and after not in ids:
            raise Refused(404, "completion_not_found", f"unknown completion {after}", param="after")
        rest = [await self.get(id, caller=caller) for id in ids[0 if after is None else ids.index(after) + 1 :]]
        fits = [
            choices
            for choices in rest
            if choices
            and model in (None, choices[0].episode.model)
            and metadata.items() <= choices[0].episode.metadata.items()
        ]
        return fits[:limit], len(fits) > limit

    async def set_metadata(self, completion_id: str, metadata: Mapping[str, str]) -> None:
        self._book.episodes = [
            dataclasses.replace(e, metadata=dict(metadata)) if e.completion_id == completion_id else e
            for e in self._book.episodes
        ]

    async def delete(self, completion_id: str, *, caller: Caller) -> int:
        kept = [e for e in self._book.episodes if e.completion_id != completion_id]
        removed, self._book.episodes = len(self._book.episodes) - len(kept), kept
        return removed


class LightAnswers:
    """Says `words`, each in its own event, and pauses `pause_s` before each. Counts what was cancelled."""

    def __init__(self, book: Book, words: Sequence[str] = ("Hello", " there", ".")) -> None:
        self.words = list(words)
        self.pause_s = 0.0
        self.refuses: Refused | None = None
        self.fails_after: int | None = None
        self.breaks_with: Exception | None = None
        self.finish_reason = "stop"
        self.calls: list[dict[str, Any]] = []
        self.version = 0
        self.asked: list[Ask] = []
        self.cancelled: list[str] = []
        self.running: set[str] = set()
        self._book = book

    def is_running(self, completion_id: str) -> bool:
        return completion_id in self.running

    async def ask(self, ask: Ask) -> AsyncIterator[AnswerEvent]:
        self.asked.append(ask)
        if self.refuses is not None:
            raise self.refuses
        if self.breaks_with is not None:
            raise self.breaks_with
        self.running.add(ask.completion_id)
        done = False
        try:
            fingerprint = FINGERPRINT.replace("v0", f"v{self.version}")
            yield Started(version=self.version, fingerprint=fingerprint, created_at=1_700_000_000.75)
            for choice in range(ask.n):
                for index, word in enumerate(self.words):
                    if index == self.fails_after:
                        raise Refused(503, "answer_interrupted", "the engine died", retry_after_s=1.0)
                    await asyncio.sleep(self.pause_s)
                    yield Piece(choice=choice, text=word, tokens=(a_token(word),) if ask.logprobs else ())
                for call in self.calls:
                    yield Piece(choice=choice, text="", tokens=(), calls=(call,))
                self._book.record(ask, choice, "".join(self.words), "stop", self.version)
                self.running.discard(ask.completion_id)
                yield Ended(choice=choice, finish_reason=self.finish_reason)
            yield Usage(prompt_tokens=7, cached_tokens=2, completion_tokens=len(self.words) * ask.n)
            done = True
        finally:
            self.running.discard(ask.completion_id)
            if not done:
                self.cancelled.append(ask.completion_id)


class LightControl:
    """A daemon with four versions, of which 1 to 3 were published."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.live = Live(version=3, since=1_700_000_003.5, why="published", caller="learner", pinned=False)
        self.lineage = [an_adapter(v) for v in range(4)]
        self.update_rows = [an_update(i) for i in (1, 2, 3)]
        self.learner: dict[str, Any] = {"state": "collecting", "ratings_until_update": 5, "batch_ratings": 16}
        self.is_ready = True
        self.audits: list[AuditEntry] = []
        self.subscribers: list[asyncio.Queue[tuple[str, dict[str, Any]] | None]] = []

    def publish(self, name: str, data: dict[str, Any]) -> None:
        for queue in self.subscribers:
            queue.put_nowait((name, data))

    def _note(self, caller: Caller, action: str, **detail: Any) -> None:
        entry = AuditEntry(seq=len(self.audits), at=0.0, caller=caller.name, action=action, detail=detail)
        self.audits.insert(0, entry)

    def _route(self, version: int, if_live: int | None, why: Any, caller: Caller, pinned: bool) -> Live:
        self._find(version)
        self._expect(if_live)
        self._note(caller, why, version=version)
        self.live = Live(version=version, since=1_700_000_100.0, why=why, caller=caller.name, pinned=pinned)
        self.publish("adapter", {"version": version})
        return self.live

    def _expect(self, if_live: int | None) -> None:
        if if_live not in (None, self.live.version):
            raise Refused(409, "live_changed", f"version {self.live.version} is live now, not {if_live}")

    def _find(self, version: int) -> Adapter:
        for adapter in self.lineage:
            if adapter.version == version:
                return adapter
        raise Refused(404, "adapter_not_found", f"there is no adapter version {version}")

    def status(self) -> dict[str, Any]:
        finished = [u for u in self.update_rows if u.state == "finished"]
        last = None
        if finished:
            newest = max(finished, key=lambda u: u.id)
            last = {
                "id": newest.id,
                "verdict": newest.verdict,
                "reason": newest.reason,
                "version": newest.version,
                "seconds": newest.seconds,
                "metrics": newest.metrics,
            }
        return {
            "model": {"name": self.model_id()},
            "adapter": {"version": self.live.version, "since": "2023-11-14T22:13:23.500Z", "pinned": self.live.pinned},
            "learner": {**self.learner, "updates_total": len(finished), "last_update": last, "dropped": {}},
            "serve": {"active": 0, "queued": 0},
            "sync": {"state": "off"},
            "energy": {},
            "store": {"episodes": 0, "feedback": 0, "ratings": 0},
            "workers": [],
        }

    def ready(self) -> tuple[bool, str]:
        return self.is_ready, "" if self.is_ready else "the model is loading"

    def model_id(self) -> str:
        return "smollm2-135m"

    def metrics(self) -> str:
        return "# TYPE edged_updates_total counter\nedged_updates_total 3\n"

    async def adapters(self) -> tuple[Live, list[Adapter]]:
        return self.live, self.lineage

    async def promote(self, version: int, *, if_live: int | None, caller: Caller) -> Live:
        return self._route(version, if_live, "promoted", caller, self.live.pinned)

    async def rollback(self, *, if_live: int | None, caller: Caller) -> Live:
        return self._route(max(0, self.live.version - 1), if_live, "rolled_back", caller, self.live.pinned)

    async def pin(self, version: int, pinned: bool, *, if_live: int | None, caller: Caller) -> Live:
        return self._route(version, if_live, "promoted", caller, pinned)

    async def keep(self, version: int, kept: bool, *, caller: Caller, if_live: int | None = None) -> Adapter:
        adapter = dataclasses.replace(self._find(version), kept=kept)
        self.lineage[self.lineage.index(self._find(version))] = adapter
        return adapter

    async def import_adapter(self, folder: str, *, if_live: int | None = None, caller: Caller) -> Adapter:
        self._expect(if_live)
        adapter = an_adapter(len(self.lineage), origin="imported", state="refused", reason="not finite", folder=None)
        self.lineage.append(adapter)
        return adapter

    def adapter_folder(self, version: int) -> Path:
        self._find(version)
        if version == 0 or self.folder is None:
            raise Refused(409, "no_files", "version 0 is the base model and has no files")
        return self.folder

    async def diff(self, version: int, other: int) -> dict[str, Any]:
        self._find(version), self._find(other)
        return {"norm": 1.0, "other_norm": 2.0, "distance": 1.5, "cosine": 0.5, "modules": {"layers.29.q_proj": 0.25}}

    async def updates(self, *, limit: int) -> list[Update]:
        return sorted(self.update_rows, key=lambda u: -u.id)[:limit]

    async def train(self, *, caller: Caller) -> dict[str, Any]:
        self._note(caller, "train")
        return {"accepted": False, "reason": "there are no new ratings"}

    async def pause(self, *, caller: Caller) -> None:
        self.learner["state"] = "paused"

    async def resume(self, *, caller: Caller) -> None:
        self.learner["state"] = "collecting"

    async def events(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        queue: asyncio.Queue[tuple[str, dict[str, Any]] | None] = asyncio.Queue()
        self.subscribers.append(queue)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self.subscribers.remove(queue)

    async def audit(self, *, limit: int) -> list[AuditEntry]:
        return self.audits[:limit]


class LightKeys:
    def __init__(self) -> None:
        self._keys: dict[str, ApiKey] = {}

    def any_keys(self) -> bool:
        return any(key.revoked_at is None for key in self._keys.values())

    def check(self, secret: str) -> ApiKey | None:
        key = self._keys.get(hashlib.sha256(secret.encode()).hexdigest())
        return key if key is not None and key.revoked_at is None else None

    async def create(self, name: str, scopes: frozenset[Scope], *, caller: Caller) -> tuple[ApiKey, str]:
        secret = f"edged-{secrets.token_hex(16)}"
        key = ApiKey(id=f"key-{len(self._keys)}", name=name, scopes=scopes, created_at=1.0, revoked_at=None)
        self._keys[hashlib.sha256(secret.encode()).hexdigest()] = key
        return key, secret

    async def list(self) -> list[ApiKey]:
        return list(self._keys.values())

    async def revoke(self, key_id: str, *, caller: Caller) -> ApiKey:
        for digest, key in self._keys.items():
            if key.id == key_id:
                self._keys[digest] = dataclasses.replace(key, revoked_at=2.0)
                return self._keys[digest]
        raise Refused(404, "key_not_found", f"there is no key {key_id!r}")
