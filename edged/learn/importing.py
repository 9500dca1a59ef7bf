"""An adapter from outside: check it, write it as this box writes adapters, and let the gate judge it like any other.

The trainer says nothing of it beforehand, so the gate judges without a prediction. An import that a crash cuts off is
given up at the next start (`edged.store` marks the candidate as refused).
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from adapters.errors import AdapterError, MismatchedAdapter
from adapters.folder import write_adapter_folder
from adapters.llamacpp_format import load_gguf_adapter
from adapters.manifest import MANIFEST_FILE, parse_manifest
from adapters.peft import load_peft
from adapters.shape import BaseShape
from adapters.weights import AdapterWeights
from edged.failure import JobRefused, WorkerBusy, WorkerFault, WorkerLost
from edged.learn import gate, profile
from edged.learn.folders import Folders
from edged.learn.ports import Router
from edged.learn.proving import Prover
from edged.learn.trainer import Trainer
from edged.records import Adapter, AdapterOrigin, Caller, Live, PublishedAdapter
from edged.refusal import Refused
from engine import protocol

log = logging.getLogger(__name__)

PROVING_PAUSE_S = 1.0  # for others who want to change what is live, while the serve worker is not free


class CandidateBook(Protocol):
    """The lineage as an import needs it."""

    def live(self) -> Live: ...

    def expect(self, if_live: int | None) -> Live: ...

    async def get(self, version: int) -> Adapter: ...

    async def add_candidate(self, *, origin: AdapterOrigin, parent_version: int | None, caller: Caller) -> Adapter: ...

    async def publish(
        self, version: int, published: PublishedAdapter, *, caller: Caller, if_live: int | None = None
    ) -> Live: ...

    async def refuse(self, version: int, reason: str, *, metrics: dict[str, float] | None = None) -> Adapter: ...


class Importer:
    """Brings adapters in, one at a time; `candidates` is the lock that updates hold too."""

    def __init__(
        self,
        *,
        folders: Folders,
        lineage: CandidateBook,
        trainer: Trainer,
        prover: Prover,
        router: Router,
        candidates: asyncio.Lock,
        base: BaseShape,
        base_sha256: str,
        base_name: str,
        lora: protocol.LoraSettings,
        is_stopping: Callable[[], bool],
        awake: Callable[[], Awaitable[None]],
    ) -> None:
        self._folders = folders
        self._lineage = lineage
        self._trainer = trainer
        self._prover = prover
        self._router = router
        self._candidates = candidates
        self._base = base
        self._base_sha256 = base_sha256
        self._base_name = base_name
        self._lora = lora
        self._is_stopping = is_stopping
        self._awake = awake

    async def bring(self, folder: Path, caller: Caller, *, if_live: int | None = None) -> Adapter:
        """Judge the PEFT folder or llama.cpp LoRA file `folder`; the adapter that it became, published or refused.

        Args:
            if_live: only if this version is live when the judging begins. Another one can go live only while the serve
                worker is not free to prove the adapter, which is then compared with that one.
        Raises:
            Refused: 400 `bad_adapter` for files that are no adapter of this base, 400 `other_profile` for one that
                this box could serve but not go on training, 409 `live_changed`, 409 `pinned`, 503 if the workers do
                not run, 503 `shutting_down`.
        """
        try:
            weights = await asyncio.to_thread(self._read, folder)
        except (AdapterError, OSError) as error:
            raise Refused(400, "bad_adapter", str(error), param="folder") from error
        async with self._candidates:
            if self._lineage.expect(if_live).pinned:
                raise Refused(409, "pinned", "a version is pinned; unpin it before another one can go live")
            await asyncio.to_thread(self._check_profile, weights)
            candidate = await self._lineage.add_candidate(
                origin="imported", parent_version=self._lineage.live().version, caller=caller
            )
        return await self._judge(weights, candidate.version, caller)

    def _read(self, folder: Path) -> AdapterWeights:
        """Blocking. Raises AdapterError, also for files of another box that name another base model."""
        theirs: str | None = None
        if folder.is_file():
            weights, lineage = load_gguf_adapter(folder, self._base)
            theirs = lineage.base_sha256
        else:
            weights = load_peft(folder, self._base)
            path = folder / MANIFEST_FILE
            theirs = parse_manifest(path.read_bytes()).base_sha256 if path.is_file() else None
        if theirs is not None and theirs != self._base_sha256:
            raise MismatchedAdapter(
                f"{folder}: it belongs to the base model {theirs[:8]}, this box serves {self._base_sha256[:8]}; "
                "import it where that model is served"
            )
        return weights

    def _check_profile(self, weights: AdapterWeights) -> None:
        """Blocking: reads the live version. Its scale may differ: that is no matter of training on."""
        live = self._lineage.live().version
        folder = self._folders.versions().get(live)
        if live and folder is None:
            raise Refused(
                409, "no_files", f"the files of v{live}, which is live, are gone; promote another version, then import"
            )
        ours, theirs = profile.in_force(folder, self._lora, self._base), profile.of_weights(weights)
        if (ours.rank, ours.modules) != (theirs.rank, theirs.modules):
            whose = f"v{live}, which is live, has" if live else "[lora] asks for"
            raise Refused(
                400,
                "other_profile",
                f"the adapter has {theirs}, {whose} {ours}, and updates go on with that; import one of that kind",
                param="folder",
            )

    async def _judge(self, weights: AdapterWeights, version: int, caller: Caller) -> Adapter:
        spool = self._folders.spool / f"import-{version}"
        try:
            await self._write(weights, version, spool)
            while True:
                async with self._candidates:
                    try:
                        return await self._prove_and_publish(version, spool, caller)
                    except WorkerBusy as busy:
                        log.info("v%d: proving waits: %s", version, busy)
                await asyncio.sleep(PROVING_PAUSE_S)
        except JobRefused as refused:
            return await self._lineage.refuse(version, f"a worker refused it: {refused}")
        except Refused as refused:
            return await self._lineage.refuse(version, str(refused))
        except (WorkerLost, WorkerFault) as lost:
            if self._is_stopping():  # the next start gives the candidate up
                raise Refused(503, "shutting_down", "the daemon is stopping; import again", retry_after_s=10) from lost
            await self._lineage.refuse(version, f"it could not be judged: {lost}")
            raise Refused(
                503, "engine_unavailable", f"the adapter could not be judged: {lost}", retry_after_s=10
            ) from lost
        except Exception as error:
            await self._lineage.refuse(version, f"it could not be judged: {type(error).__name__}: {error}")
            raise
        finally:
            await asyncio.to_thread(shutil.rmtree, spool, ignore_errors=True)

    async def _write(self, weights: AdapterWeights, version: int, spool: Path) -> None:
        def write() -> None:
            spool.mkdir()
            write_adapter_folder(
                spool / "adapter",
                weights,
                version=version,
                parent=None,
                base_sha256=self._base_sha256,
                base_model_name=self._base_name,
                origin="imported",
                created_at=time.time(),
            )

        await asyncio.to_thread(write)

    async def _prove_and_publish(self, version: int, spool: Path, caller: Caller) -> Adapter:
        live = self._lineage.live().version
        versions = await asyncio.to_thread(self._folders.versions)
        await self._trainer.start()
        await self._awake()
        judgement = await self._prover.prove(
            protocol.AdapterRef(version=version, folder=str(spool / "adapter")),
            self._folders.reference_to(live, versions),
            None,
        )
        if not judgement.accepted:
            return await self._lineage.refuse(version, judgement.reason, metrics=judgement.metrics)
        return await self._publish(version, live, spool, judgement, caller)

    async def _publish(
        self, version: int, live: int, spool: Path, judgement: gate.Judgement, caller: Caller
    ) -> Adapter:
        folder, sha256 = await asyncio.to_thread(self._folders.publish, spool / "adapter", None, version)
        try:
            await self._lineage.publish(
                version,
                PublishedAdapter(folder=folder, sha256=sha256, metrics=judgement.metrics),
                caller=caller,
                if_live=live,
            )
        except Refused:
            await asyncio.to_thread(self._folders.withdraw, version)
            raise
        await asyncio.to_thread(self._folders.write_current, version)
        await self._router.go_live()
        return await self._lineage.get(version)
