"""`edged models pull`: which file it takes, and that what it fetches from a hub can be served."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from edged.base_model import find_model
from edged.cli.exits import CommandError
from edged.cli.models import choose_file

FILES = ["README.md", "config.json", "model.safetensors", "mmproj-small.gguf", "small-Q4_K_M.gguf", "small-Q8_0.gguf"]


def test_the_only_model_file_is_taken() -> None:
    assert choose_file("a/b", ["README.md", "small-f16.gguf"]) == "small-f16.gguf"


def test_of_several_the_recommended_format_is_taken() -> None:
    assert choose_file("a/b", FILES) == "small-Q4_K_M.gguf"


def test_of_several_without_the_recommended_format_one_must_be_named() -> None:
    with pytest.raises(CommandError, match="2 models in it") as caught:
        choose_file("a/b", ["x-Q8_0.gguf", "x-Q4_1.gguf"])
    assert caught.value.hint == "name one with --file: x-Q4_1.gguf, x-Q8_0.gguf"


def test_a_repository_without_a_model_that_can_be_served_is_refused() -> None:
    with pytest.raises(CommandError, match=r"a/b: no \.gguf file in it"):
        choose_file("a/b", ["config.json", "model.safetensors", "x-00001-of-00002.gguf", "x-00002-of-00002.gguf"])


def test_a_file_that_cannot_be_served_is_not_downloaded(cli) -> None:
    done = cli("models", "pull", "owner/small", "--file", "model.safetensors")
    assert done.returncode == 2
    assert ".gguf files only" in done.stderr


def test_what_is_pulled_from_a_hub_can_be_served(hub: str, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [sys.executable, "-m", "edged", "models", "pull", "owner/small", "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    path = tmp_path / "small" / "small-Q4_K_M.gguf"
    assert done.stdout == f"{path}\nserve it with: edged run --model {path}\n"
    assert find_model(str(path)).read_bytes() == content("small-Q4_K_M.gguf")
    assert sorted(file.name for file in path.parent.iterdir() if not file.name.startswith(".")) == [path.name]


@pytest.fixture
def hub() -> Iterator[str]:
    """A hub with one repository, as far as `models pull` speaks with it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def content(file: str) -> bytes:
    return file.encode() * 100


class Hub(BaseHTTPRequestHandler):
    """Lists the files of owner/small and hands them out."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.split("?")[0]
        if path == "/api/models/owner/small/tree/main":
            entries = [{"type": "file", "path": name, "size": len(content(name)), "oid": name} for name in FILES]
            body = json.dumps(entries).encode()
        elif path.startswith("/owner/small/resolve/") and path.rsplit("/", 1)[1] in FILES:
            body = content(path.rsplit("/", 1)[1])
        else:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{path.rsplit("/", 1)[1]}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""
