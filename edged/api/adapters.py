"""The adapter versions over HTTP: list, promote, roll back, pin, keep, compare, import and export.

Every route that changes what is served takes `{"if_live": N}`: it then acts only while version N is live, else 409.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import tarfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Depends, Request
from fastapi import Path as PathParameter
from pydantic import Field, StringConstraints
from starlette.responses import Response, StreamingResponse

from edged.api.access import Access
from edged.api.bodies import Body, describe, json_body, optional_json_body
from edged.api.ports import Control
from edged.records import Adapter, Caller, Live
from edged.refusal import Refused
from edged.times import rfc3339

COPY_BYTES = 256 * 1024
VERSION_MAX = 2**63 - 1

Version = Annotated[int, PathParameter(ge=0, le=VERSION_MAX)]
IfLive = Annotated[int, Field(ge=0, le=VERSION_MAX)]


class ChangeRequest(Body):
    """May be empty."""

    if_live: IfLive | None = None


class PinRequest(ChangeRequest):
    pinned: bool = True


class KeepRequest(ChangeRequest):
    kept: bool = True


class ImportRequest(ChangeRequest):
    """`folder`: an absolute path on the daemon's machine, of a PEFT folder or of a llama.cpp LoRA file (.gguf)."""

    folder: Annotated[str, StringConstraints(min_length=1, max_length=4096)]


def adapter_routes(control: Control, access: Access) -> APIRouter:
    """The routes of the adapter versions."""
    router = APIRouter(tags=["adapters"])
    _add_readers(router, control, access)
    _add_changes(router, control, access)
    return router


def _add_readers(router: APIRouter, control: Control, access: Access) -> None:
    any_caller = Depends(access.require(None))
    operator = Depends(access.require("admin"))

    @router.get("/v1/adapters", summary="List versions, and which is live", dependencies=[any_caller])
    async def list_adapters() -> dict[str, Any]:
        live, adapters = await control.adapters()
        data = [adapter_object(adapter, live.version) for adapter in adapters]
        return {"object": "list", "live": live_object(live), "data": data}

    @router.get("/v1/adapters/{version}", summary="One version, with its figures and verdicts",
                dependencies=[any_caller])  # fmt: skip
    async def show_adapter(version: Version) -> dict[str, Any]:
        live, adapters = await control.adapters()
        for adapter in adapters:
            if adapter.version == version:
                return adapter_object(adapter, live.version)
        raise Refused(404, "adapter_not_found", f"no adapter has the version {version}")

    @router.get("/v1/adapters/{version}/diff/{other}", summary="How far two versions lie apart",
                dependencies=[any_caller])  # fmt: skip
    async def diff(version: Version, other: Version) -> dict[str, Any]:
        return await control.diff(version, other)

    @router.get("/v1/adapters/{version}/export", summary="A version's folder as a tar file", dependencies=[operator])
    async def export(request: Request, version: Version) -> Response:
        folder = control.adapter_folder(version)
        try:
            tar = await asyncio.to_thread(FolderTar, folder)
        except FileNotFoundError as error:  # collected since
            raise Refused(409, "no_files", f"the files of version {version} are not on this box any more") from error
        headers = {
            "content-length": str(tar.n_bytes),
            "content-disposition": f'attachment; filename="edged-{folder.name}.tar"',
        }
        return StreamingResponse(tar.pieces(), media_type="application/x-tar", headers=headers)


def _add_changes(router: APIRouter, control: Control, access: Access) -> None:
    operator = Depends(access.require("admin"))
    change_body = Depends(optional_json_body(ChangeRequest))
    pin_body = Depends(optional_json_body(PinRequest))
    keep_body = Depends(optional_json_body(KeepRequest))
    import_body = Depends(json_body(ImportRequest))

    @router.post("/v1/adapters/rollback", summary="Serve the version before this one again",
                 openapi_extra=describe(ChangeRequest, required=False))  # fmt: skip
    async def rollback(caller: Caller = operator, body: ChangeRequest = change_body) -> dict[str, Any]:
        return live_object(await control.rollback(if_live=body.if_live, caller=caller))

    @router.post("/v1/adapters/import", summary="Judge an adapter from outside, and serve it",
                 openapi_extra=describe(ImportRequest))  # fmt: skip
    async def import_adapter(caller: Caller = operator, body: ImportRequest = import_body) -> dict[str, Any]:
        if not os.path.isabs(body.folder) or "\0" in body.folder:
            raise Refused(400, "invalid_value", "folder: an absolute path on the daemon's machine", param="folder")
        adapter = await control.import_adapter(body.folder, if_live=body.if_live, caller=caller)
        live, _ = await control.adapters()
        return adapter_object(adapter, live.version)

    @router.post("/v1/adapters/{version}/promote", summary="Serve this version",
                 openapi_extra=describe(ChangeRequest, required=False))  # fmt: skip
    async def promote(version: Version, caller: Caller = operator, body: ChangeRequest = change_body) -> dict[str, Any]:
        return live_object(await control.promote(version, if_live=body.if_live, caller=caller))

    @router.post("/v1/adapters/{version}/pin", summary="Serve exactly this version, or end that",
                 openapi_extra=describe(PinRequest, required=False))  # fmt: skip
    async def pin(version: Version, caller: Caller = operator, body: PinRequest = pin_body) -> dict[str, Any]:
        return live_object(await control.pin(version, body.pinned, if_live=body.if_live, caller=caller))

    @router.post("/v1/adapters/{version}/keep", summary="Never collect this version, or end that",
                 openapi_extra=describe(KeepRequest, required=False))  # fmt: skip
    async def keep(version: Version, caller: Caller = operator, body: KeepRequest = keep_body) -> dict[str, Any]:
        adapter = await control.keep(version, body.kept, caller=caller, if_live=body.if_live)
        live, _ = await control.adapters()
        return adapter_object(adapter, live.version)


def adapter_object(adapter: Adapter, live_version: int) -> dict[str, Any]:
    """A version as the API shows it."""
    return {"object": "adapter", **dataclasses.asdict(adapter), "live": adapter.version == live_version}


def live_object(live: Live) -> dict[str, Any]:
    """What is served, as the API shows it; times in RFC 3339."""
    return {**dataclasses.asdict(live), "since": rfc3339(live.since)}


class FolderTar:
    """The files of a folder as a tar stream of known length, read piece by piece in threads.

    Every file is opened at the start, so the stream stays whole if the folder is collected while it goes out.
    """

    def __init__(self, folder: Path) -> None:
        """Blocking. Raises OSError."""
        self._files: list[tuple[bytes, BinaryIO, int]] = []
        with contextlib.ExitStack() as opened:
            for path in sorted(folder.iterdir()):
                if not path.is_file() or path.is_symlink():
                    continue
                file = opened.enter_context(path.open("rb"))
                stat = os.fstat(file.fileno())
                entry = tarfile.TarInfo(f"{folder.name}/{path.name}")
                entry.size, entry.mtime, entry.mode = stat.st_size, int(stat.st_mtime), 0o644
                self._files.append((entry.tobuf(tarfile.PAX_FORMAT), file, stat.st_size))
            self._opened = opened.pop_all()
        self.n_bytes = sum(len(header) + _padded(size) for header, _, size in self._files) + 2 * tarfile.BLOCKSIZE

    async def pieces(self) -> AsyncGenerator[bytes]:
        """The stream; can be run once."""
        with self._opened:
            for header, file, size in self._files:
                yield header
                left = size
                while left:
                    piece = await asyncio.to_thread(file.read, min(COPY_BYTES, left))
                    if not piece:
                        raise OSError(f"{file.name}: became shorter while it was read")
                    left -= len(piece)
                    yield piece
                yield bytes(_padded(size) - size)
            yield bytes(2 * tarfile.BLOCKSIZE)


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
