"""The hash of a base model file, and its cache."""

from __future__ import annotations

import hashlib
import json
import os

import pytest

from adapters.base_file import base_sha256
from adapters.errors import BaseModelError


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


def poison(cache):
    """Put a false hash into the cache, so that a hit shows."""
    known = {name: {**entry, "sha256": "false"} for name, entry in json.loads(cache.read_text()).items()}
    cache.write_text(json.dumps(known))


def test_it_is_the_files_sha256(model):
    assert base_sha256(model) == hashlib.sha256(b"weights").hexdigest()


def test_an_unchanged_file_is_not_hashed_again(tmp_path, model):
    cache = tmp_path / "hashes.json"
    base_sha256(model, cache)
    poison(cache)
    assert base_sha256(model, cache) == "false"


def test_a_changed_file_is_hashed_again(tmp_path, model):
    cache = tmp_path / "hashes.json"
    base_sha256(model, cache)
    poison(cache)
    model.write_bytes(b"WEIGHTS")
    os.utime(model, ns=(1, 1))
    assert base_sha256(model, cache) == hashlib.sha256(b"WEIGHTS").hexdigest()


def test_a_link_to_the_file_shares_its_entry(tmp_path, model):
    cache, link = tmp_path / "hashes.json", tmp_path / "link.gguf"
    link.symlink_to(model)
    base_sha256(model, cache)
    poison(cache)
    assert base_sha256(link, cache) == "false"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_damaged_cache_costs_one_hashing(tmp_path, model, content):
    cache = tmp_path / "hashes.json"
    cache.write_bytes(content)
    assert base_sha256(model, cache) == hashlib.sha256(b"weights").hexdigest()
    assert json.loads(cache.read_text())[str(model)]["size_bytes"] == 7


def test_a_missing_model_is_an_error_that_names_it(tmp_path):
    with pytest.raises(BaseModelError, match=r"nothing\.gguf: the model cannot be read"):
        base_sha256(tmp_path / "nothing.gguf")


def test_a_cache_entry_without_hash_is_not_believed(tmp_path, model):
    cache = tmp_path / "hashes.json"
    base_sha256(model, cache)
    known = {
        name: {k: v for k, v in entry.items() if k != "sha256"} for name, entry in json.loads(cache.read_text()).items()
    }
    cache.write_text(json.dumps(known))
    assert base_sha256(model, cache) == hashlib.sha256(b"weights").hexdigest()
