"""A remote worker and its server: adapters under names of their own, and a server that is late, gone or started again.

What it says of requests is the business of the contract of all backends (`tests/engine/generate/test_contract.py`).
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adapters import manifest
from engine import protocol
from engine.fault import EngineFault
from engine.generate import worker
from engine.generate.remote import transport
from engine.protocol import AdapterRef
from tests.engine.generate.chatter import Chatter, write_chatter
from tests.engine.generate.desk import HANG_GUARD_S, Desk, MemoryLink, chat, of, start_serve
from tests.engine.generate.stand_in import Options, StandIn

VLLM = Options("vllm", "processed")
OF_A_REQUEST = (protocol.Begun, protocol.Chunk, protocol.ChoiceDone, protocol.RequestDone)


@pytest.fixture(scope="module")
def chatter(tmp_path_factory: pytest.TempPathFactory) -> Chatter:
    return write_chatter(tmp_path_factory.mktemp("chatter"))


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "PAUSE_S", 0.001)


class Box:
    """A server, and workers that speak to it."""

    def __init__(self, chatter: Chatter, folder: Path) -> None:
        self.chatter = chatter
        self.folder = folder
        self.server = StandIn(chatter.folder, VLLM)
        self.desks: list[Desk] = []

    def restart(self, options: Options = VLLM) -> None:
        self.server.down()
        self.server = StandIn(self.chatter.folder, options, self.server.port)

    def start(self, **changes: Any) -> protocol.StartServe:
        settings = {"backend": "remote", "url": self.server.url, "shelf": str(self.folder / "shelf")}
        return start_serve(str(self.chatter.folder), **(settings | {"server_wait_s": 0.0} | changes))

    def open(self, **changes: Any) -> Desk:
        self.desks.append(Desk(worker.run, self.start(**changes)))
        return self.desks[-1]

    def adapter(self, version: int, **options: Any) -> AdapterRef:
        return self.chatter.adapter(self.folder / f"v{version}", version, **options)

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + HANG_GUARD_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def box(chatter: Chatter, tmp_path: Path) -> Iterator[Box]:
    opened = Box(chatter, tmp_path)
    yield opened
    for desk in opened.desks:
        desk.stop()
    opened.server.down()


def fault_of(start: protocol.StartServe) -> EngineFault:
    """Why a worker does not start."""
    link = MemoryLink()
    with pytest.raises(EngineFault) as fault:
        worker.run(link, start)  # type: ignore[arg-type]
    link.close()
    return fault.value


def test_an_adapter_has_a_name_of_its_content_and_files_that_stay_where_they_are(box: Box) -> None:
    desk = box.open()
    new = box.adapter(7)
    assert isinstance(desk.stage(new), protocol.Staged)
    ((name, path),) = box.server.ever
    assert name.startswith("edged-v7-")
    assert len(name) == len("edged-v7-") + 8
    assert Path(path).parent == box.folder / "shelf"
    Path(new.folder or "").rename(box.folder / "published")
    assert sorted(file.name for file in Path(path).iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert isinstance(desk.stage(protocol.BASE), protocol.Staged)
    box.chatter.adapter(box.folder / "v7", 70)  # another content of the same number
    assert isinstance(desk.stage(AdapterRef(version=7, folder=str(box.folder / "v7"))), protocol.Staged)
    assert len({name for name, _ in box.server.ever}) == 2


def test_a_version_is_unloaded_once_nobody_runs_on_it_and_nothing_can_go_back_to_it(box: Box) -> None:
    desk = box.open()
    for version in (1, 2):
        assert isinstance(desk.stage(box.adapter(version)), protocol.Staged)
        assert isinstance(desk.route(version), protocol.Routed)
    assert [name[:8] for name in box.server.adapters] == ["edged-v1", "edged-v2"]
    running = chat(max_tokens=300, logit_bias=((264, -100.0), (262, -100.0)))
    desk.send(running)
    desk.expect(protocol.Chunk, protocol.Begun)
    # 1 is resident and can be gone back to; with 3 proved, it cannot.
    desk.send(protocol.Stage(job_id="three", adapter=box.adapter(3), fluency_prompts=(), fluency_tokens=0, seed=1))
    desk.expect(protocol.Staged, *OF_A_REQUEST)
    box.until(lambda: [name[:8] for name in box.server.unloaded] == ["edged-v1"])
    desk.send(protocol.Route(job_id="three", version=3))
    desk.send(protocol.Stage(job_id="four", adapter=box.adapter(4), fluency_prompts=(), fluency_tokens=0, seed=1))
    desk.send(protocol.Cancel(request_id=running.request_id))
    # 4 waits for the request on 2, which is unloaded once 4 stands in its place.
    desk.expect(protocol.Staged, protocol.Routed, *OF_A_REQUEST)
    box.until(lambda: [name[:8] for name in box.server.unloaded] == ["edged-v1", "edged-v2"])
    box.until(lambda: {path.name[:8] for path in (box.folder / "shelf").iterdir()} == {"edged-v3", "edged-v4"})


def test_what_a_worker_before_has_left_is_unloaded_and_what_is_live_is_not(box: Box) -> None:
    desk = box.open()
    for version in (1, 2):
        assert isinstance(desk.stage(box.adapter(version)), protocol.Staged)
        assert isinstance(desk.route(version), protocol.Routed)
    box.server.adapters["edged-v1-00000000"] = "/of/another/box"
    later = box.open(adapter=box.adapter(2))
    assert sorted(name[:8] for name in box.server.adapters) == ["edged-v1", "edged-v2"]
    assert box.server.adapters["edged-v1-00000000"] == "/of/another/box"
    assert later.version() == 2
    assert len(box.server.ever) == 2  # what is there is not loaded again


def test_a_stream_that_nobody_reads_any_more_is_cut_off_at_the_server(box: Box) -> None:
    desk = box.open()
    message = chat(n=2, max_tokens=400, logit_bias=((264, -100.0), (262, -100.0)))
    before = box.server.aborted
    desk.send(message)
    desk.expect(protocol.Chunk, protocol.Begun)
    desk.send(protocol.Cancel(request_id=message.request_id))
    desk.collect(message.request_id)
    box.until(lambda: box.server.aborted == before + 2)


def test_one_broken_stream_costs_its_request_and_the_server_is_asked_whether_it_lives(box: Box) -> None:
    desk = box.open()
    box.server.fail_streams_after = 1
    (failed,) = of(desk.ask(chat(max_tokens=30, logit_bias=((264, -100.0),))), protocol.RequestFailed)
    assert failed.code == "engine_error"
    box.server.fail_streams_after = None
    assert of(desk.ask(chat()), protocol.RequestDone)


def test_a_server_that_is_gone_is_a_fault_of_the_worker_with_its_reason(box: Box) -> None:
    desk = box.open()
    desk.send(chat(max_tokens=400, logit_bias=((264, -100.0), (262, -100.0))))
    desk.expect(protocol.Chunk, protocol.Begun)
    box.server.down()
    fault = desk.until_over()
    box.desks.clear()
    assert isinstance(fault, EngineFault)
    assert fault.code == "server_unreachable"
    assert box.server.url in fault.message


def test_a_server_that_was_started_again_has_lost_the_adapter_and_the_next_worker_loads_it(box: Box) -> None:
    desk = box.open(adapter=box.adapter(5))
    assert desk.version() == 5
    box.restart()
    desk.send(chat())
    fault = desk.until_over()
    box.desks.clear()
    assert isinstance(fault, EngineFault)
    assert (fault.code, "edged-v5" in fault.message) == ("adapter_lost", True)
    assert box.open(adapter=box.adapter(5)).version() == 5


def test_a_server_that_comes_late_is_waited_for(box: Box) -> None:
    box.server.down()
    late = threading.Timer(0.3, box.restart)
    late.start()
    try:
        assert box.open(server_wait_s=HANG_GUARD_S).version() == 0
    finally:
        late.join()


def test_a_worker_without_a_server_says_for_how_long_it_has_waited(box: Box) -> None:
    box.server.down()
    fault = fault_of(box.start())
    assert fault.code == "server_unreachable"
    assert "no server within 0 s" in fault.message
    box.restart()


def test_a_key_that_is_wrong_or_missing_is_told(box: Box) -> None:
    box.restart(Options("vllm", "raw", api_key="secret"))
    assert "Unauthorized" in fault_of(box.start()).message
    assert "serve.api_key_file" in fault_of(box.start(api_key_file=str(box.folder / "none"))).message


@pytest.mark.parametrize(
    ("options", "advice"),
    [(Options("vllm", "raw", loras=False), "--enable-lora"), (Options("sglang", "raw", loras=False), "Not Found")],
    ids=["vllm", "sglang"],
)
def test_a_server_that_takes_no_adapters_stages_none_and_goes_on(box: Box, options: Options, advice: str) -> None:
    box.restart(options)
    desk = box.open()
    failed = desk.stage(box.adapter(1))
    assert isinstance(failed, protocol.StageFailed)
    assert failed.code == "adapter_mismatch"
    assert advice in failed.message
    assert of(desk.ask(chat()), protocol.RequestDone)


def test_an_adapter_of_nan_never_reaches_the_server(box: Box) -> None:
    desk = box.open()
    failed = desk.stage(box.adapter(1))
    assert isinstance(failed, protocol.Staged)
    weights = box.folder / "nan"
    box.chatter.adapter(weights, 2)
    broken = _with_nan(weights)
    failed = desk.stage(AdapterRef(version=2, folder=str(broken)))
    assert isinstance(failed, protocol.StageFailed)
    assert failed.code == "not_finite"
    assert len(box.server.ever) == 1


def _with_nan(folder: Path) -> Path:
    """The folder with one weight that is no number, and a manifest that says so."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensors[name].flat[0] = np.nan
    save_file(tensors, file)
    found = manifest.parse_manifest((folder / manifest.MANIFEST_FILE).read_bytes())
    changed = dataclasses.replace(found, files=manifest.describe_files(folder))
    (folder / manifest.MANIFEST_FILE).write_bytes(manifest.manifest_bytes(changed))
    return folder


def test_an_answer_held_to_a_schema_is_refused_with_who_can(box: Box) -> None:
    (failed,) = box.open().ask(dataclasses.replace(chat(), schema='{"type": "string"}'))
    assert isinstance(failed, protocol.RequestFailed)
    assert failed.code == "bad_response_format"
