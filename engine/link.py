"""A worker's end of the link to the daemon: one blocking ZeroMQ DEALER, used by one thread.

It sends and receives the messages of `engine.protocol`, sends the heartbeat, and finds out that the daemon is gone. It
knows no role and holds no job state. ZeroMQ sockets are not thread-safe: everything here belongs to the thread that
made the link; long work goes into another thread through `beat_while`, so that the beats go on.

Invariants: messages arrive in the order sent; messages of another epoch are dropped; the queues are bounded, and a
daemon that takes nothing for SEND_TIMEOUT_S counts as lost.
"""

from __future__ import annotations

import collections
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from engine.protocol import BEAT_S, MAX_MESSAGE_BYTES, Beat, Message, Stop, decode, encode

log = logging.getLogger(__name__)

T = TypeVar("T")

LOST_AFTER_S = 1.5  # a connection that is down for this long is not coming back
SEND_TIMEOUT_S = 10.0
SEND_QUEUE_MESSAGES = 10_000
RECEIVE_QUEUE_MESSAGES = 1_000
RECONNECT_MS = 50
CLOSE_LINGER_MS = 1_000
# ZeroMQ's own ping: it is answered by the daemon's I/O thread, so it notices a dead peer behind a half-open
# connection and not a busy event loop.
PING_INTERVAL_MS = 1_000
PING_TIMEOUT_MS = 10_000

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class LinkLost(Exception):
    """Raised when the daemon is gone: the worker has nobody to work for and exits."""


class Stopped(Exception):
    """Raised by `beat_while` when the daemon sends Stop before the work is done."""


class Link:
    """The worker `name` of incarnation `epoch`, connected to the daemon at `endpoint`. Not thread-safe."""

    def __init__(self, endpoint: str, name: str, epoch: int) -> None:
        self.name = name
        self.epoch = epoch
        self._pending: collections.deque[Message] = collections.deque()
        self._last_beat = float("-inf")
        self._down_since: float | None = time.monotonic()
        self._context = zmq.Context()
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"{name}:{epoch}".encode())
        socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES)
        socket.setsockopt(zmq.SNDTIMEO, int(SEND_TIMEOUT_S * 1000))
        socket.setsockopt(zmq.LINGER, CLOSE_LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, PING_INTERVAL_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, PING_TIMEOUT_MS)
        # The handshake and not the TCP or Unix connect shows that a daemon is alive behind the address: the kernel
        # accepts connections for a frozen process.
        self._monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._socket = socket
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._wakes: set[int] = set()
        socket.connect(endpoint)

    def send(self, message: Message) -> None:
        """Queue one message. Blocks while the queue is full. Raises LinkLost."""
        try:
            self._socket.send(encode(message, self.epoch))
        except zmq.Again as error:
            raise LinkLost(f"the daemon took no message for {SEND_TIMEOUT_S:g} s") from error

    def receive(self, timeout_s: float) -> Message | None:
        """The next message, or None if none came within `timeout_s` (0: do not wait).

        Raises:
            LinkLost: the connection is down for LOST_AFTER_S.
            WireError: the daemon sent something that is not a message of this protocol version.
        """
        if self._pending:
            return self._pending.popleft()
        deadline = time.monotonic() + timeout_s
        while True:
            ready = dict(self._poller.poll(self._wait_ms(deadline)))
            if self._monitor in ready:
                self._follow_connection()
            if self._socket in ready:
                message = self._read()
                if message is not None:
                    return message
            if not self._wakes.isdisjoint(ready):
                return None
            now = time.monotonic()
            if self._down_since is not None and now - self._down_since >= LOST_AFTER_S:
                raise LinkLost(f"no connection to the daemon for {LOST_AFTER_S:g} s")
            if now >= deadline:
                return None

    def also_wake_on(self, descriptor: int) -> None:
        """Let `receive` return before its time, with None, while this file descriptor can be read."""
        self._wakes.add(descriptor)
        self._poller.register(descriptor, zmq.POLLIN)

    def beat(self, busy: str = "") -> None:
        """Tell the daemon that the loop turns; sends at most one Beat every BEAT_S. Raises LinkLost."""
        now = time.monotonic()
        if now - self._last_beat >= BEAT_S:
            self._last_beat = now
            self.send(Beat(rss_bytes=own_rss_bytes(), busy=busy))

    def until_next_beat_s(self) -> float:
        """Seconds until `beat` would send again: the longest time an idle loop may wait."""
        return max(0.0, self._last_beat + BEAT_S - time.monotonic())

    def beat_while(self, work: Callable[[], T], busy: str) -> T:
        """Run `work` in another thread and beat meanwhile; its result, or its exception.

        Messages that come meanwhile are kept for `receive`. The thread is not joined when this raises.

        Raises:
            Stopped: the daemon sent Stop first.
            LinkLost: the daemon went away first.
        """
        outcome: list[T] = []
        failure: list[BaseException] = []

        def call() -> None:
            try:
                outcome.append(work())
            except BaseException as error:  # crosses to the caller's thread and is raised there
                failure.append(error)

        thread = threading.Thread(target=call, name=busy, daemon=True)
        thread.start()
        kept: list[Message] = []
        while thread.is_alive():
            self.beat(busy)
            message = self.receive(0)
            if isinstance(message, Stop):
                raise Stopped
            if message is not None:
                kept.append(message)
            thread.join(min(0.02, self.until_next_beat_s()))
        self._pending.extendleft(reversed(kept))
        if failure:
            raise failure[0]
        return outcome[0]

    def close(self) -> None:
        """Send what is queued, for CLOSE_LINGER_MS at most, and close."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()

    def _wait_ms(self, deadline: float) -> int:
        now = time.monotonic()
        until = deadline if self._down_since is None else min(deadline, self._down_since + LOST_AFTER_S)
        return max(0, math.ceil((until - now) * 1000))

    def _read(self) -> Message | None:
        epoch, message = decode(self._socket.recv())
        if epoch != self.epoch:
            log.warning("dropped %s of epoch %d, this is epoch %d", type(message).__name__, epoch, self.epoch)
            return None
        return message

    def _follow_connection(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._down_since = None
            elif event == zmq.EVENT_DISCONNECTED and self._down_since is None:
                self._down_since = time.monotonic()


def own_rss_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * _PAGE_BYTES
