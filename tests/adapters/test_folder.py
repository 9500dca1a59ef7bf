"""Complete adapter folders."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from adapters.errors import AdapterError, MismatchedAdapter, NotFiniteAdapter, UnreadableAdapter
from adapters.folder import load_adapter_folder, write_adapter_folder
from adapters.llamacpp_format import load_gguf_adapter
from adapters.manifest import verify

FACTS = {
    "version": 3, "parent": 1, "base_sha256": "ab" * 32, "base_model_name": "tiny", "origin": "trained",
    "created_at": 1700000000.0,
}  # fmt: skip


def test_a_folder_holds_four_files_that_agree(tmp_path, weights, base):
    written = write_adapter_folder(tmp_path / "a.tmp", weights, **FACTS)
    names = {path.name for path in (tmp_path / "a.tmp").iterdir()}
    assert names == {"adapter_model.safetensors", "adapter_config.json", "adapter.gguf", "manifest.json"}
    loaded, manifest = load_adapter_folder(tmp_path / "a.tmp", base)
    assert manifest == written == verify(tmp_path / "a.tmp")
    assert loaded.sha256() == weights.sha256() == manifest.adapter_sha256
    served, lineage = load_gguf_adapter(tmp_path / "a.tmp" / "adapter.gguf", base)
    assert served.sha256() == weights.sha256()
    assert (lineage.version, lineage.parent, lineage.base_sha256) == (3, 1, "ab" * 32)


def test_the_same_arguments_give_the_same_bytes(tmp_path, weights):
    for name in ("x", "y"):
        write_adapter_folder(tmp_path / name, weights, **FACTS)
    for path in (tmp_path / "x").iterdir():
        assert path.read_bytes() == (tmp_path / "y" / path.name).read_bytes()


def test_weights_that_are_not_finite_are_never_written(tmp_path, weights):
    module, (a, b) = next(iter(weights.matrices.items()))
    broken = dataclasses.replace(weights, matrices={**weights.matrices, module: (a * np.float32("inf"), b)})
    with pytest.raises(NotFiniteAdapter):
        write_adapter_folder(tmp_path / "a", broken, **FACTS)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_written_once(tmp_path, weights):
    write_adapter_folder(tmp_path / "a", weights, **FACTS)
    with pytest.raises(FileExistsError, match="written once"):
        write_adapter_folder(tmp_path / "a", weights, **FACTS)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json", "adapter.gguf", "manifest.json"])
@pytest.mark.parametrize("change", ["missing", "truncated", "flipped"])
def test_damage_to_any_file_is_found(tmp_path, weights, base, name, change):
    write_adapter_folder(tmp_path / "a", weights, **FACTS)
    path = tmp_path / "a" / name
    data = path.read_bytes()
    path.unlink()
    if change == "truncated":
        path.write_bytes(data[:-1] if name != "manifest.json" else data[: len(data) // 2])
    if change == "flipped":
        path.write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])
    with pytest.raises(AdapterError):
        load_adapter_folder(tmp_path / "a", base)


def test_a_folder_without_manifest_is_not_loaded(tmp_path, weights, base):
    write_adapter_folder(tmp_path / "a", weights, **FACTS)
    (tmp_path / "a" / "manifest.json").unlink()
    with pytest.raises(UnreadableAdapter):
        load_adapter_folder(tmp_path / "a", base)


def test_a_base_that_fits_by_chance_is_told_from_the_right_one(tmp_path, weights, base):
    write_adapter_folder(tmp_path / "a", weights, **FACTS)
    with pytest.raises(MismatchedAdapter, match="the one that the adapter was trained on"):
        load_adapter_folder(tmp_path / "a", dataclasses.replace(base, n_vocab=65))
