"""The identity of a base model file: its SHA-256, remembered between starts.

Hashing a model takes a second per gigabyte or more. The answer is kept in a small JSON file under the file's path,
size and modification time; a file whose size or time changed is hashed again. Losing or damaging the cache costs one
hashing, nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from adapters.errors import BaseModelError
from adapters.manifest import file_sha256
from adapters.store import write_file_atomically


def base_sha256(path: Path, cache_file: Path | None = None) -> str:
    """SHA-256 of the model file at `path`, as 64 hex digits.

    Args:
        cache_file: where hashes are remembered; its folder must exist. None: always hash.
    Raises:
        BaseModelError: the model file cannot be read.
        OSError: the cache cannot be written.
    """
    try:
        resolved = path.resolve(strict=True)
        status = resolved.stat()
        key = {"size_bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
        known = {} if cache_file is None else _load_cache(cache_file)
        entry = known.get(str(resolved))
        if (
            isinstance(entry, dict)
            and isinstance(entry.get("sha256"), str)
            and entry == {**key, "sha256": entry["sha256"]}
        ):
            return str(entry["sha256"])
        digest = file_sha256(resolved)
    except OSError as error:
        raise BaseModelError(f"{path}: the model cannot be read ({error.strerror}); check the path") from error
    if cache_file is not None:
        known[str(resolved)] = {**key, "sha256": digest}
        write_file_atomically(cache_file, json.dumps(known, indent=2, sort_keys=True).encode() + b"\n")
    return digest


def _load_cache(cache_file: Path) -> dict[str, Any]:
    try:
        known = json.loads(cache_file.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
