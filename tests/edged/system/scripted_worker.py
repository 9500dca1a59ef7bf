"""A worker process for the tests of supervision: speaks the real link, and misbehaves as its role says.

Roles: `echo` answers Generate with its prompt, and with its environment if the prompt is "environment"; it dies at
Cancel. The others fail once the daemon has answered their Hello: `garbage` sends bytes that are no message, `silent`
says nothing more after Ready, `mute` never gets ready, `fault` says that it cannot work, `stubborn` ignores Stop."""

from __future__ import annotations

import json
import os
import sys
import time

import zmq

from engine import protocol
from engine.link import Link, LinkLost

FOREVER_S = 600.0


def main(role: str) -> int:
    endpoint, name, epoch = (os.environ[key] for key in (protocol.ENV_ENDPOINT, protocol.ENV_NAME, protocol.ENV_EPOCH))
    if role == "garbage":
        return send_garbage(endpoint, f"{name}:{epoch}".encode())
    link = Link(endpoint, name, int(epoch))
    link.send(protocol.Hello(role=role, name=name, pid=os.getpid()))
    start = link.receive(FOREVER_S)
    if isinstance(start, protocol.Stop):
        link.close()
        return 0
    assert isinstance(start, protocol.StartServe)
    if role == "fault":
        link.send(protocol.Fault(code="model_unreadable", message="no such file"))
        link.close()
        return protocol.EXIT_FAULT
    if role == "mute":
        time.sleep(FOREVER_S)
    link.send(protocol.Ready(load_s=0.25))
    if role == "silent":
        time.sleep(FOREVER_S)
    return answer(link, stubborn=role == "stubborn")


def send_garbage(endpoint: str, identity: bytes) -> int:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.connect(endpoint)
    socket.send(b"this is no message")
    time.sleep(FOREVER_S)
    return 1


def answer(link: Link, *, stubborn: bool) -> int:
    while True:
        link.beat("echoing")
        match link.receive(link.until_next_beat_s()):
            case protocol.Stop() if not stubborn:
                link.close()
                return 0
            case protocol.Generate() as ask:
                text = json.dumps(dict(os.environ)) if ask.prompt == "environment" else ask.prompt or ""
                link.send(protocol.Chunk(request_id=ask.request_id, choice=0, text=text))
            case protocol.Cancel():
                os._exit(9)
            case _:
                pass


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1]))
    except LinkLost:
        sys.exit(protocol.EXIT_LINK_LOST)
