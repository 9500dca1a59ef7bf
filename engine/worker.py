"""Entry of a worker process: `python -P -m engine.worker serve|train|score`, and `rank` for what a train worker starts.

Ties its life to the daemon's, says Hello, waits for its Start message and hands over to the role's own loop, which
loads the heavy libraries. Decides nothing else; turns the ways in which a role ends into exit codes:

    0 the daemon said Stop    3 a Fault was sent    4 the daemon is gone    1 a bug, with its traceback on stderr

Environment: the names in `engine.protocol`; EDGED_DAEMON_PID, the parent whose death kills this process (left out for
a worker on another box); EDGED_LOG_LEVEL and EDGED_LOG_FORMAT (`engine.logs`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from typing import NoReturn

from engine import logs
from engine.fault import EngineFault
from engine.link import Link, LinkLost, Stopped
from engine.protocol import (
    ENV_ENDPOINT,
    ENV_EPOCH,
    ENV_NAME,
    EXIT_FAULT,
    EXIT_LINK_LOST,
    Fault,
    Hello,
    StartScore,
    StartServe,
    StartTrain,
    Stop,
    WireError,
)

log = logging.getLogger("engine.worker")

ENV_DAEMON_PID = "EDGED_DAEMON_PID"
EXIT_USAGE = 2
START_TIMEOUT_S = 60.0  # from Hello to the Start message
ROLES = ("serve", "train", "score")
RANK = "rank"  # no worker of the daemon's: it speaks with the train worker only

# libgomp's threads spin at every barrier before they sleep, by default for milliseconds. On a box where anything else
# runs, a thread then burns the core that its partner waits for: two threads decode 4 to 6 times slower than with this
# bound, which costs 10 to 15 % on an idle box. It is read when the library is loaded.
ENV_SPIN = "GOMP_SPINCOUNT"
SPIN_COUNT = "1000"

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Run one worker to its end; the exit code."""
    if arguments == [RANK]:
        return run_rank()
    if len(arguments) != 1 or arguments[0] not in ROLES:
        print(f"usage: python -P -m engine.worker {'|'.join(ROLES)}", file=sys.stderr)
        return EXIT_USAGE
    missing = [name for name in (ENV_ENDPOINT, ENV_NAME, ENV_EPOCH) if name not in os.environ]
    if missing:
        print(f"a worker is started by the daemon: {', '.join(missing)} not set", file=sys.stderr)
        return EXIT_USAGE
    logs.configure_from_environment()
    if not tie_to_daemon():
        return EXIT_LINK_LOST
    link = Link(os.environ[ENV_ENDPOINT], os.environ[ENV_NAME], int(os.environ[ENV_EPOCH]))
    try:
        return serve_link(link, arguments[0])
    finally:
        link.close()


def run_rank() -> int:
    """Work beside the train worker that has started this process, until it ends; the exit code."""
    logs.configure_from_environment()
    if not tie_to_daemon():
        return EXIT_LINK_LOST
    os.environ.setdefault(ENV_SPIN, SPIN_COUNT)
    from engine.train.ranks import member

    member.run()
    return 0


def tie_to_daemon() -> bool:
    """Die with the daemon, ignore the Ctrl-C that is meant for it; False if the daemon is dead already.

    The kernel sends the signal when the *thread* that started this process ends, so the daemon starts workers from
    its main thread.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    daemon_pid = os.environ.get(ENV_DAEMON_PID)
    if daemon_pid is None:
        return True
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The daemon may have died before prctl: then this process was adopted by another one and gets no signal.
    return os.getppid() == int(daemon_pid)


def serve_link(link: Link, role: str) -> int:
    """Hello, Start, the role's loop; the exit code."""
    try:
        link.send(Hello(role=role, name=link.name, pid=os.getpid()))
        run_role(link, role)
    except Stopped:
        return 0
    except EngineFault as fault:
        log.error("%s: %s", fault.code, fault.message)
        return _report(link, Fault(code=fault.code, message=fault.message))
    except WireError as error:
        log.error("the daemon speaks another protocol: %s", error)
        return _report(link, Fault(code="protocol_mismatch", message=str(error)))
    except LinkLost as error:
        log.error("%s", error)
        return EXIT_LINK_LOST
    return 0


def run_role(link: Link, role: str) -> None:
    """Wait for the Start message and run the role until Stop. Heavy imports happen here, after Hello."""
    os.environ.setdefault(ENV_SPIN, SPIN_COUNT)
    match link.receive(START_TIMEOUT_S):
        case StartServe() as start if role == "serve":
            from engine.generate import worker as serve_worker

            serve_worker.run(link, start)
        case StartTrain() as start if role == "train":
            from engine.train import worker as train_worker

            train_worker.run(link, start)
        case StartScore() as start if role == "score":
            from engine.score import worker as score_worker

            score_worker.run(link, start)
        case Stop():
            return
        case None:
            raise LinkLost(f"no Start message within {START_TIMEOUT_S:g} s")
        case message:
            raise WireError(f"a {role} worker cannot start with {type(message).__name__}")


def _report(link: Link, fault: Fault) -> int:
    try:
        link.send(fault)
    except LinkLost:
        return EXIT_LINK_LOST
    return EXIT_FAULT


def _exit_now(code: int) -> NoReturn:
    """Leave without waiting for threads: a library's thread may still compute what nobody wants any more."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        exit_code = main(sys.argv[1:])
    except Exception:
        log.exception("the worker failed")
        exit_code = 1
    _exit_now(exit_code)
