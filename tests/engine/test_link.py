"""The worker's end of the link against a plain ROUTER socket."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from engine.link import Link, LinkLost, Stopped, own_rss_bytes
from engine.protocol import Beat, Cancel, Hello, Message, Stop, WireError, decode, encode

HANG_GUARD_S = 30.0
HELLO = Hello(role="serve", name="serve", pid=1)


class Daemon:
    """The daemon's end: binds, sends to the worker's identity, receives."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/link"
        self.context = zmq.Context()
        self.open()

    def open(self) -> None:
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.bind(self.endpoint)

    def send(self, message: Message, epoch: int = 3) -> None:
        self.socket.send_multipart([b"serve:3", encode(message, epoch)])

    def receive(self) -> Message:
        assert self.socket.poll(int(HANG_GUARD_S * 1000))
        identity, frame = self.socket.recv_multipart()
        assert identity == b"serve:3"
        epoch, message = decode(frame)
        assert epoch == 3
        return message

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path)
    yield daemon
    daemon.close()


@pytest.fixture
def link(daemon: Daemon) -> Iterator[Link]:
    link = Link(daemon.endpoint, "serve", 3)
    link.send(HELLO)
    assert daemon.receive() == HELLO
    yield link
    link.close()


def test_messages_arrive_both_ways_in_order(daemon: Daemon, link: Link) -> None:
    messages = [Cancel(request_id=str(number)) for number in range(100)]
    for message in messages:
        daemon.send(message)
        link.send(message)
    assert [link.receive(HANG_GUARD_S) for _ in messages] == messages
    assert [daemon.receive() for _ in messages] == messages


def test_receive_returns_none_when_nothing_comes(link: Link) -> None:
    assert link.receive(0) is None
    assert link.receive(0.01) is None


def test_messages_of_another_epoch_are_dropped(daemon: Daemon, link: Link) -> None:
    daemon.send(Cancel(request_id="old"), epoch=2)
    daemon.send(Cancel(request_id="new"))
    assert link.receive(HANG_GUARD_S) == Cancel(request_id="new")


def test_what_is_no_message_is_an_error_and_not_a_crash_of_the_decoder(daemon: Daemon, link: Link) -> None:
    daemon.socket.send_multipart([b"serve:3", b"\xc1"])
    with pytest.raises(WireError):
        link.receive(HANG_GUARD_S)


def test_beats_carry_the_memory_and_are_not_sent_more_often_than_due(daemon: Daemon, link: Link) -> None:
    for _ in range(50):
        link.beat("training")
    link.send(HELLO)
    beat = daemon.receive()
    assert isinstance(beat, Beat)
    assert beat.busy == "training"
    assert beat.rss_bytes == pytest.approx(own_rss_bytes(), rel=0.5)
    assert daemon.receive() == HELLO
    assert 0 < link.until_next_beat_s() <= 1


def test_a_daemon_that_is_gone_is_noticed_while_waiting(daemon: Daemon, link: Link) -> None:
    daemon.socket.close(linger=0)
    with pytest.raises(LinkLost, match="no connection"):
        link.receive(HANG_GUARD_S)


def test_a_daemon_that_is_gone_is_noticed_by_a_loop_that_never_waits(daemon: Daemon, link: Link) -> None:
    daemon.socket.close(linger=0)

    def spin() -> None:
        deadline = time.monotonic() + HANG_GUARD_S
        while time.monotonic() < deadline:
            link.receive(0)

    with pytest.raises(LinkLost):
        spin()


def test_an_address_without_a_daemon_is_a_lost_link(tmp_path: Path) -> None:
    link = Link(f"ipc://{tmp_path}/nobody", "serve", 3)
    with pytest.raises(LinkLost):
        link.receive(HANG_GUARD_S)
    link.close()


def test_a_daemon_that_is_back_at_once_is_not_lost(daemon: Daemon, link: Link) -> None:
    daemon.socket.close(linger=0)
    daemon.open()
    deadline = time.monotonic() + HANG_GUARD_S
    while not daemon.socket.poll(10):
        link.send(HELLO)  # what was sent before the loss was noticed is lost
        assert link.receive(0) is None
        assert time.monotonic() < deadline
    assert daemon.receive() == HELLO


def test_long_work_runs_while_the_link_beats_and_messages_wait(daemon: Daemon, link: Link) -> None:
    daemon.send(Cancel(request_id="later"))
    beaten = threading.Event()

    def work() -> int:
        assert beaten.wait(HANG_GUARD_S)
        return 42

    def watch() -> None:
        assert isinstance(daemon.receive(), Beat)
        beaten.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert link.beat_while(work, "loading") == 42
    watcher.join()
    assert link.receive(HANG_GUARD_S) == Cancel(request_id="later")


def test_an_error_of_long_work_is_raised_to_the_caller(link: Link) -> None:
    def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        link.beat_while(work, "loading")


def test_stop_ends_the_wait_for_long_work(daemon: Daemon, link: Link) -> None:
    daemon.send(Stop(within_s=1.0))
    release = threading.Event()
    with pytest.raises(Stopped):
        link.beat_while(lambda: release.wait(HANG_GUARD_S), "loading")
    release.set()


def test_a_descriptor_that_can_be_read_ends_the_wait_for_a_message_and_loses_none(daemon: Daemon, link: Link) -> None:
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    link.also_wake_on(bell)
    os.eventfd_write(bell, 1)
    assert link.receive(HANG_GUARD_S) is None
    daemon.send(Cancel(request_id="a"))
    while (message := link.receive(HANG_GUARD_S)) is None:  # the bell still rings
        pass
    assert message == Cancel(request_id="a")
    os.eventfd_read(bell)
    threading.Timer(0.05, os.eventfd_write, (bell, 1)).start()
    assert link.receive(HANG_GUARD_S) is None
    os.close(bell)
