"""A complete adapter folder: PEFT files, the GGUF adapter and the manifest, written and read as one.

    adapter_config.json, adapter_model.safetensors   the PEFT folder (`adapters.peft`)
    adapter.gguf                                     what llama.cpp serves (`adapters.llamacpp_format`)
    manifest.json                                    lineage and hashes (`adapters.manifest`)

Writing is a function of its arguments: the same weights, lineage and time give the same bytes. Publishing a written
folder under its final name is `adapters.store.publish_folder`."""

from __future__ import annotations

from pathlib import Path

from adapters import llamacpp_format, manifest, peft, store
from adapters.errors import MismatchedAdapter
from adapters.manifest import Manifest
from adapters.shape import BaseShape
from adapters.weights import AdapterWeights

GGUF_FILE = "adapter.gguf"


def write_adapter_folder(
    folder: Path,
    weights: AdapterWeights,
    *,
    version: int,
    parent: int | None,
    base_sha256: str,
    base_model_name: str,
    origin: str,
    created_at: float,
) -> Manifest:
    """Create `folder` with all four files, every one of them fsynced, and the folder too.

    Args:
        folder: must not exist, or be empty; its parent must exist. It is meant to be temporary: publish it by rename.
        version, parent: numbers in the lineage; parent None: it comes from outside.
        base_sha256, base_model_name: hash of the base model file, and the name that PEFT shows.
        origin: "trained", "imported" or "fleet".
        created_at: Unix seconds; the caller's, so that a replayed update gives the same bytes.
    Returns:
        the manifest that was written.
    Raises:
        NotFiniteAdapter: a matrix holds NaN or infinity; nothing was written.
        FileExistsError: `folder` holds something already.
        OSError: the disk refused; the folder is then incomplete and has no manifest.
    """
    weights.check_finite()
    folder.mkdir(exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder}: not empty; an adapter folder is written once")
    peft.save_peft(folder, weights, base_model_name)
    llamacpp_format.save_gguf_adapter(
        folder / GGUF_FILE, weights, version=version, parent=parent, base_sha256=base_sha256
    )
    written = Manifest(
        version=version,
        parent=parent,
        base_sha256=base_sha256,
        adapter_sha256=weights.sha256(),
        origin=origin,
        created_at=created_at,
        files=manifest.describe_files(folder),
    )
    (folder / manifest.MANIFEST_FILE).write_bytes(manifest.manifest_bytes(written))
    store.fsync_tree(folder)
    return written


def load_adapter_folder(folder: Path, base: BaseShape) -> tuple[AdapterWeights, Manifest]:
    """Verify a complete adapter folder against its manifest and read its weights.

    Raises:
        UnreadableAdapter, UnsupportedAdapter, MismatchedAdapter, NotFiniteAdapter: see `adapters.errors`.
    """
    found = manifest.verify(folder)
    weights = peft.load_peft(folder, base)
    if weights.sha256() != found.adapter_sha256:
        raise MismatchedAdapter(
            f"{folder}: its weights are not those that {manifest.MANIFEST_FILE} names for this base model; "
            "check that the model file is the one that the adapter was trained on"
        )
    return weights, found
