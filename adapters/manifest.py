"""`manifest.json`: what an adapter folder holds, where it comes from, and the hashes that prove it is whole.

The manifest is written last, over the bytes of all other files, so a folder with a manifest that verifies is
complete. It says nothing about whether the adapter is any good: that is the gate's verdict, which the daemon keeps.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from adapters.errors import UnreadableAdapter

MANIFEST_FILE = "manifest.json"
FORMAT = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """Size and hash of one file of the folder."""

    n_bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Content of a manifest.

    Attributes:
        version: number of this adapter; parent: the version it was trained from, None if it comes from outside.
        base_sha256: of the base model file that it adapts.
        adapter_sha256: of the weights (`AdapterWeights.sha256`).
        origin: "trained", "imported" or "fleet".
        created_at: Unix seconds.
        files: by name, all files but the manifest.
    """

    version: int
    parent: int | None
    base_sha256: str
    adapter_sha256: str
    origin: str
    created_at: float
    files: dict[str, FileEntry]


def manifest_bytes(manifest: Manifest) -> bytes:
    """Content of `manifest.json`; the same bytes for the same manifest."""
    plain = {"format": FORMAT, **dataclasses.asdict(manifest)}
    return json.dumps(plain, indent=2, sort_keys=True).encode() + b"\n"


def parse_manifest(data: bytes) -> Manifest:
    """The manifest in `data`.

    Raises:
        UnreadableAdapter: not JSON, another format number, or a field that is missing, unknown or of the wrong type.
    """
    try:
        plain = json.loads(data)
    except ValueError as error:
        raise UnreadableAdapter(f"{MANIFEST_FILE}: not valid JSON ({error}); publish the adapter again") from error
    if not isinstance(plain, dict) or plain.pop("format", None) != FORMAT:
        raise UnreadableAdapter(f"{MANIFEST_FILE}: not of format {FORMAT}; use the edged version that wrote it")
    kinds: dict[str, tuple[type, ...]] = {
        "version": (int,),
        "parent": (int, type(None)),
        "base_sha256": (str,),
        "adapter_sha256": (str,),
        "origin": (str,),
        "created_at": (int, float),
        "files": (dict,),
    }
    _check_fields("", plain, kinds)
    files = {}
    for name, entry in plain["files"].items():
        if name != Path(name).name or not isinstance(entry, dict):
            raise UnreadableAdapter(f"{MANIFEST_FILE}: files.{name}: not an entry; publish the adapter again")
        _check_fields(f"files.{name}.", entry, {"n_bytes": (int,), "sha256": (str,)})
        files[name] = FileEntry(**entry)
    return Manifest(**{**plain, "files": files})


def _check_fields(where: str, plain: dict[str, Any], kinds: dict[str, tuple[type, ...]]) -> None:
    if plain.keys() != kinds.keys():
        odd = ", ".join(sorted(plain.keys() ^ kinds.keys()))
        raise UnreadableAdapter(f"{MANIFEST_FILE}: {where}{odd}: missing or unknown; publish the adapter again")
    for key, allowed in kinds.items():
        if not isinstance(plain[key], allowed) or isinstance(plain[key], bool):
            raise UnreadableAdapter(f"{MANIFEST_FILE}: {where}{key} is {plain[key]!r}; publish the adapter again")


def describe_files(folder: Path) -> dict[str, FileEntry]:
    """Size and hash of every file directly in `folder` but the manifest."""
    return {
        path.name: FileEntry(n_bytes=path.stat().st_size, sha256=file_sha256(path))
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != MANIFEST_FILE
    }


def verify(folder: Path) -> Manifest:
    """Read the manifest of `folder` and check every file against it.

    Raises:
        UnreadableAdapter: no manifest, or a file is missing or differs from what was published.
    """
    path = folder / MANIFEST_FILE
    try:
        manifest = parse_manifest(path.read_bytes())
    except OSError as error:
        raise UnreadableAdapter(
            f"{path}: cannot be read ({error.strerror}); restore the folder or remove it"
        ) from error
    for name, entry in manifest.files.items():
        file = folder / name
        try:
            whole = file.stat().st_size == entry.n_bytes and file_sha256(file) == entry.sha256
        except OSError as error:
            raise UnreadableAdapter(
                f"{file}: cannot be read ({error.strerror}); restore the folder or remove it"
            ) from error
        if not whole:
            raise UnreadableAdapter(f"{file}: not the bytes that were published; restore the folder or remove it")
    return manifest


def file_sha256(path: Path) -> str:
    """Hash of the content of the file at `path`, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
