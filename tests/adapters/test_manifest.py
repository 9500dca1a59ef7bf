"""Manifests: their bytes, and what a changed folder or a damaged manifest is answered with."""

from __future__ import annotations

import json

import pytest

from adapters.errors import UnreadableAdapter
from adapters.manifest import (
    MANIFEST_FILE,
    FileEntry,
    Manifest,
    describe_files,
    manifest_bytes,
    parse_manifest,
    verify,
)

GOLDEN = b"""{
  "adapter_sha256": "aa",
  "base_sha256": "bb",
  "created_at": 1700000000.5,
  "files": {
    "adapter.gguf": {
      "n_bytes": 3,
      "sha256": "cc"
    }
  },
  "format": 1,
  "origin": "trained",
  "parent": null,
  "version": 4
}
"""


@pytest.fixture
def manifest():
    return Manifest(
        version=4,
        parent=None,
        base_sha256="bb",
        adapter_sha256="aa",
        origin="trained",
        created_at=1700000000.5,
        files={"adapter.gguf": FileEntry(n_bytes=3, sha256="cc")},
    )


@pytest.fixture
def folder(tmp_path, manifest):
    """A folder of two files whose manifest is right."""
    (tmp_path / "one").write_bytes(b"first")
    (tmp_path / "two").write_bytes(b"second")
    plain = {**json.loads(manifest_bytes(manifest)), "files": {}}
    for name, entry in describe_files(tmp_path).items():
        plain["files"][name] = {"n_bytes": entry.n_bytes, "sha256": entry.sha256}
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(plain))
    return tmp_path


def test_the_bytes_are_golden_and_are_read_back(manifest):
    assert manifest_bytes(manifest) == GOLDEN
    assert parse_manifest(GOLDEN) == manifest


def test_an_untouched_folder_verifies(folder):
    assert set(verify(folder).files) == {"one", "two"}


def test_a_file_that_the_manifest_does_not_name_does_not_matter(folder):
    (folder / "README.md").write_text("a note of the operator")
    verify(folder)


@pytest.mark.parametrize("content", [b"firsT", b"first and more", b""])
def test_a_changed_file_is_found_and_named(folder, content):
    (folder / "one").write_bytes(content)
    with pytest.raises(UnreadableAdapter, match="one: not the bytes that were published"):
        verify(folder)


def test_a_missing_file_is_found_and_named(folder):
    (folder / "two").unlink()
    with pytest.raises(UnreadableAdapter, match="two: cannot be read"):
        verify(folder)


def test_a_folder_without_manifest_is_not_whole(folder):
    (folder / MANIFEST_FILE).unlink()
    with pytest.raises(UnreadableAdapter, match=MANIFEST_FILE):
        verify(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "not of format 1"),
        ({"version": "4"}, "version is '4'"),
        ({"version": True}, "version is True"),
        ({"surprise": 1}, "surprise: missing or unknown"),
        ({"files": {"../../etc/passwd": {"n_bytes": 1, "sha256": ""}}}, "not an entry"),
        ({"files": {"a": {"n_bytes": 1}}}, r"files\.a\.sha256: missing"),
        ({"files": {"a": 7}}, "not an entry"),
    ],
)
def test_a_damaged_manifest_is_refused_with_the_field(change, message):
    with pytest.raises(UnreadableAdapter, match=message):
        parse_manifest(json.dumps({**json.loads(GOLDEN), **change}).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"null"])
def test_bytes_that_are_no_json_object_are_refused(data):
    with pytest.raises(UnreadableAdapter, match=MANIFEST_FILE):
        parse_manifest(data)
