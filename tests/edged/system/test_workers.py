"""The shell around supervision, on real processes that speak the real link."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from edged.system import supervise
from edged.system.workers import SOCKET_PATH_MAX_BYTES, Role, Worker, Workers
from engine import protocol

GUARD_S = 60.0  # ten times what the slowest wait needs
COMMAND = (sys.executable, str(Path(__file__).with_name("scripted_worker.py")))
LIMITS = supervise.Limits(start_timeout_s=30.0, hang_timeout_s=30.0, stop_timeout_s=5.0, backoff_first_s=0.05)

START = protocol.StartServe(
    model_path="model.gguf",
    adapter=protocol.AdapterRef(version=0, folder=None),
    slots=1,
    context_tokens=16,
    threads=1,
    probes=(),
)


@dataclasses.dataclass
class Owner:
    """Keeps what a worker tells its owner."""

    worker: Worker
    happened: list[object]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(GUARD_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def until_said(self, kind: type[object]) -> object:
        await self.until(lambda: any(isinstance(event, kind) for event in self.happened))
        return next(event for event in self.happened if isinstance(event, kind))

    @property
    def deaths(self) -> list[str]:
        return [event for event in self.happened if isinstance(event, str)]


async def told_to_start() -> protocol.Message:
    return START


def add(
    workers: Workers,
    role: str,
    limits: supervise.Limits = LIMITS,
    name: str = "worker",
    start: Callable[[], Awaitable[protocol.Message]] = told_to_start,
) -> Owner:
    happened: list[object] = []
    worker = workers.add(
        Role(
            name=name,
            role=role,
            limits=limits,
            start=start,
            on_ready=happened.append,
            on_message=happened.append,
            on_down=happened.append,
            on_fault=happened.append,
        )
    )
    return Owner(worker, happened)


@asynccontextmanager
async def opened(
    folder: Path, command: Sequence[str] = COMMAND, environment: dict[str, str] | None = None
) -> AsyncIterator[Workers]:
    workers = Workers(folder, command=command, environment=lambda: environment or {})
    workers.open()
    try:
        yield workers
    finally:
        async with asyncio.timeout(GUARD_S):
            await workers.close()


def in_workers(folder: Path, scenario: Callable[[Workers], Awaitable[None]]) -> None:
    async def main() -> None:
        async with opened(folder) as workers:
            await scenario(workers)

    asyncio.run(main())


def generate(prompt: str) -> protocol.Generate:
    return protocol.Generate(request_id="r1", messages=None, prompt=prompt, n=1, sampling=protocol.Sampling())


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_worker_gets_ready_and_messages_go_both_ways(tmp_path: Path) -> None:
    async def scenario(workers: Workers) -> None:
        owner = add(workers, "echo")
        owner.worker.want()
        await owner.until_said(protocol.Ready)
        assert owner.worker.is_ready
        for number in range(50):
            owner.worker.send(generate(f"hello {number}"))
        await owner.until(lambda: len(owner.happened) == 51)
        assert owner.happened[1:] == [
            protocol.Chunk(request_id="r1", choice=0, text=f"hello {number}") for number in range(50)
        ]

    in_workers(tmp_path, scenario)


def test_beats_tell_memory_and_work_and_do_not_reach_the_owner(tmp_path: Path) -> None:
    async def scenario(workers: Workers) -> None:
        owner = add(workers, "echo")
        owner.worker.want()
        await owner.until(lambda: owner.worker.busy == "echoing")
        assert owner.worker.rss_bytes > 2**20
        assert [type(event) for event in owner.happened] == [protocol.Ready]

    in_workers(tmp_path, scenario)


def test_a_worker_that_crashes_is_started_again_with_the_next_epoch(tmp_path: Path) -> None:
    async def scenario(workers: Workers) -> None:
        owner = add(workers, "echo")
        owner.worker.want()
        await owner.until_said(protocol.Ready)
        first = owner.worker.pid
        owner.worker.send(protocol.Cancel(request_id="r1"))
        await owner.until(lambda: len(owner.happened) == 3)
        assert owner.deaths == ["exit code 9"]
        assert isinstance(owner.happened[2], protocol.Ready)
        assert owner.worker.pid != first
        assert owner.worker.state.epoch == 2

    in_workers(tmp_path, scenario)


def test_a_worker_that_cannot_be_told_what_to_start_with_is_killed_and_tried_again(tmp_path: Path) -> None:
    failures = [KeyError(2), OSError("the disk is gone")]

    async def start() -> protocol.Message:
        if failures:
            raise failures.pop()
        return START

    async def scenario(workers: Workers) -> None:
        owner = add(workers, "echo", start=start)
        owner.worker.want()
        await owner.until_said(protocol.Ready)
        assert owner.deaths == ["killed by SIGKILL"] * 2
        assert owner.worker.state.epoch == 3

    in_workers(tmp_path, scenario)


def test_a_worker_that_is_killed_from_outside_is_started_again(tmp_path: Path) -> None:
    async def scenario(workers: Workers) -> None:
        owner = add(workers, "echo")
        owner.worker.want()
        await owner.until_said(protocol.Ready)
        owner.worker.kill("the test says so")
        await owner.until(lambda: owner.worker.state.epoch == 2 and owner.worker.is_ready)
        assert owner.deaths == ["killed by SIGKILL"]

    in_workers(tmp_path, scenario)


def test_a_worker_that_sends_garbage_is_killed(tmp_path: Path) -> None:
    async def scenario(workers: Workers) -> None:
        owner = add(workers, "garbage")
        owner.worker.want()
        await owner.until(lambda: bool(owner.deaths))
        assert owner.deaths[0] == "killed by SIGKILL"

    in_workers(tmp_path, scenario)


def test_a_worker_that_goes_silent_is_killed(tmp_path: Path) -> None:
    async def scenario(workers: Workers) -> None:
        owner = add(workers, "silent", dataclasses.replace(LIMITS, hang_timeout_s=0.2))
        owner.worker.want()
        await owner.until(lambda: bool(owner.deaths))
        assert [type(event) for event in owner.happened[:2]] == [protocol.Ready, str]
        assert owner.deaths[0] == "killed by SIGKILL"

    in_workers(tmp_path, scenario)


def test_a_worker_that_does_not_get_ready_is_killed(tmp_path: Path) -> None:
    async def scenario(workers: Workers) -> None:
        owner = add(workers, "mute", dataclasses.replace(LIMITS, start_timeout_s=0.6))
        owner.worker.want()
        await owner.until(lambda: bool(owner.deaths))
        assert owner.happened[0] == "killed by SIGKILL"

    in_workers(tmp_path, scenario)


def test_a_worker_that_cannot_do_its_role_says_so_to_its_owner(tmp_path: Path) -> None:
    async def scenario(workers: Workers) -> None:
        owner = add(workers, "fault")
        owner.worker.want()
        fault = await owner.until_said(protocol.Fault)
        assert fault == protocol.Fault(code="model_unreadable", message="no such file")
        owner.worker.unwant()
        await owner.until(lambda: bool(owner.deaths))
        assert owner.worker.state.phase == "stopped"

    in_workers(tmp_path, scenario)


def test_an_unwanted_worker_is_asked_to_stop_and_exits_by_itself(tmp_path: Path) -> None:
    async def scenario(workers: Workers) -> None:
        owner = add(workers, "echo")
        owner.worker.want()
        await owner.until_said(protocol.Ready)
        owner.worker.unwant()
        async with asyncio.timeout(GUARD_S):
            await owner.worker.stopped()
        assert owner.deaths == ["exit code 0"]
        assert owner.worker.pid is None

    in_workers(tmp_path, scenario)


def test_a_worker_that_ignores_stop_is_killed(tmp_path: Path) -> None:
    async def scenario(workers: Workers) -> None:
        owner = add(workers, "stubborn", dataclasses.replace(LIMITS, stop_timeout_s=0.1))
        owner.worker.want()
        await owner.until_said(protocol.Ready)
        owner.worker.unwant()
        async with asyncio.timeout(GUARD_S):
            await owner.worker.stopped()
        assert owner.deaths == ["killed by SIGKILL"]

    in_workers(tmp_path, scenario)


def test_close_leaves_no_process_and_no_socket(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as workers:
            owners = [add(workers, "echo", name=name) for name in ("one", "two")]
            for owner in owners:
                owner.worker.want()
                await owner.until_said(protocol.Ready)
            pids = [owner.worker.pid for owner in owners]
        assert not any(is_alive(pid) for pid in pids if pid is not None)
        assert not (tmp_path / "link.sock").exists()

    asyncio.run(main())


def test_a_worker_that_is_unwanted_before_its_first_message_is_stopped_by_it(tmp_path: Path) -> None:
    async def scenario(workers: Workers) -> None:
        owner = add(workers, "echo", dataclasses.replace(LIMITS, stop_timeout_s=GUARD_S))
        owner.worker.want()
        owner.worker.unwant()
        await owner.until(lambda: owner.deaths == ["exit code 0"])

    in_workers(tmp_path, scenario)


def test_a_worker_that_gets_ready_after_it_became_unwanted_is_not_reported_ready(tmp_path: Path) -> None:
    async def scenario(workers: Workers) -> None:
        owner = add(workers, "echo")
        owner.worker.want()
        owner.worker.unwant()
        owner.worker.received(owner.worker.state.epoch, protocol.Ready(load_s=0.0))
        assert owner.happened == []

    in_workers(tmp_path, scenario)


def test_a_process_that_the_system_does_not_start_is_tried_again_like_a_crash(tmp_path: Path) -> None:
    async def scenario(workers: Workers) -> None:
        owner = add(workers, "echo" * 50_000)  # longer than an argument may be
        owner.worker.want()
        assert (owner.worker.state.phase, owner.worker.pid) == ("waiting", None)
        assert "Argument list too long" in owner.worker.state.why
        owner.worker.role = dataclasses.replace(owner.worker.role, role="echo")
        await owner.until_said(protocol.Ready)

    in_workers(tmp_path, scenario)


def test_close_does_not_wait_for_a_process_that_never_started(tmp_path: Path) -> None:
    async def scenario(workers: Workers) -> None:
        add(workers, "echo" * 50_000).worker.want()

    in_workers(tmp_path, scenario)


def test_a_late_message_of_an_earlier_process_does_not_harm_the_present_one(tmp_path: Path) -> None:
    async def scenario(workers: Workers) -> None:
        owner = add(workers, "echo")
        owner.worker.want()
        await owner.until_said(protocol.Ready)
        context = zmq.Context()
        late = context.socket(zmq.DEALER)
        late.setsockopt(zmq.IDENTITY, b"worker:0")
        late.connect(f"ipc://{tmp_path}/link.sock")
        late.send(b"half a mess")
        late.send(protocol.encode(protocol.Chunk(request_id="r0", choice=0, text="old"), 0))
        late.close()
        await asyncio.to_thread(context.term)
        owner.worker.send(generate("still here"))
        await owner.until_said(protocol.Chunk)
        assert owner.happened[1:] == [protocol.Chunk(request_id="r1", choice=0, text="still here")]

    in_workers(tmp_path, scenario)


def test_messages_of_strangers_are_dropped(tmp_path: Path) -> None:
    async def scenario(workers: Workers) -> None:
        owner = add(workers, "echo")
        owner.worker.want()
        await owner.until_said(protocol.Ready)
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.connect(f"ipc://{tmp_path}/link.sock")
        stranger.send(b"hello")
        stranger.send_multipart([b"a", b"b", b"c"])
        stranger.close()
        await asyncio.to_thread(context.term)
        owner.worker.send(generate("still here"))
        await owner.until_said(protocol.Chunk)
        assert owner.deaths == []

    in_workers(tmp_path, scenario)


def test_an_owner_that_fails_on_a_message_does_not_stop_the_link(tmp_path: Path) -> None:
    async def scenario(workers: Workers) -> None:
        owner = add(workers, "echo")
        told: list[str] = []

        def fail_once(message: protocol.Message) -> None:
            assert isinstance(message, protocol.Chunk)
            told.append(message.text)
            if message.text == "first":
                raise RuntimeError("a mistake of the owner")

        owner.worker.role = dataclasses.replace(owner.worker.role, on_message=fail_once)
        owner.worker.want()
        await owner.until_said(protocol.Ready)
        owner.worker.send(generate("first"))
        owner.worker.send(generate("second"))
        await owner.until(lambda: told == ["first", "second"])

    in_workers(tmp_path, scenario)


def test_a_worker_inherits_only_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/notify")
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setenv("LANG", "C.UTF-8")

    async def main() -> None:
        async with opened(tmp_path, environment={"EDGED_EXTRA": "1"}) as workers:
            owner = add(workers, "echo")
            owner.worker.want()
            await owner.until_said(protocol.Ready)
            owner.worker.send(generate("environment"))
            chunk = await owner.until_said(protocol.Chunk)
            assert isinstance(chunk, protocol.Chunk)
            found = json.loads(chunk.text)
        assert found.keys() & {"OPENAI_API_KEY", "NOTIFY_SOCKET", "LISTEN_FDS"} == set()
        assert (found["LANG"], found["EDGED_EXTRA"]) == ("C.UTF-8", "1")
        assert found[protocol.ENV_NAME] == "worker"
        assert found["EDGED_DAEMON_PID"] == str(os.getpid())

    asyncio.run(main())


def test_the_link_of_a_long_state_folder_lies_in_it_under_a_short_name(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()

    async def main() -> None:
        async with opened(folder) as workers:
            owner = add(workers, "echo")
            owner.worker.want()
            await owner.until_said(protocol.Ready)
            owner.worker.send(generate("environment"))
            chunk = await owner.until_said(protocol.Chunk)
            assert isinstance(chunk, protocol.Chunk)
            path = Path(json.loads(chunk.text)[protocol.ENV_ENDPOINT].removeprefix("ipc://"))
            assert len(os.fsencode(path)) < SOCKET_PATH_MAX_BYTES
            assert path.samefile(folder / "link.sock")
            assert path.stat().st_mode & 0o777 == 0o600
        assert list(folder.iterdir()) == []

    asyncio.run(main())


def test_only_this_user_may_connect_to_the_link(tmp_path: Path) -> None:
    async def scenario(workers: Workers) -> None:
        assert (tmp_path / "link.sock").stat().st_mode & 0o777 == 0o600

    in_workers(tmp_path, scenario)


def test_the_socket_that_a_crash_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link.sock").touch()

    async def scenario(workers: Workers) -> None:
        owner = add(workers, "echo")
        owner.worker.want()
        await owner.until_said(protocol.Ready)

    in_workers(tmp_path, scenario)
