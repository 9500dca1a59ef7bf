"""The score worker's loop: open the reward source, then judge batches as the daemon asks, one at a time.

The source is somebody else's code or a service: it runs in a thread of its own, and whatever it raises is a verdict.
Out of time, the worker says so and takes no more, because a thread cannot be ended: the daemon kills it and starts a
fresh one. A source that does not even let this loop turn (native code that keeps the interpreter's lock) is found out
by the daemon, a little later.

Invariant: every Judge and every Fit is answered once, or the process is gone.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from engine.link import Link, Stopped
from engine.protocol import Fit, Fitted, Judge, Judged, Ready, StartScore, Stop, WireError
from engine.score import verdict
from engine.score.source import FittableSource, Source, open_source
from engine.score.verdict import Verdict
from engine.train.worker import enter_idle_class

log = logging.getLogger(__name__)

T = TypeVar("T")

# numpy's own threads spin while they wait for one another: on a box where anything else runs, two of them fit twenty
# times slower than one. Read when numpy is loaded; torch has threads of its own.
ENV_BLAS_THREADS = "OPENBLAS_NUM_THREADS"

# After the deadline that the source knows of: a source that keeps it gets its answers out.
GRACE_S = 0.5
END_S = 10.0  # in which the daemon kills a worker that is stuck


class StillRunning(Exception):
    """Raised when a call did not end in time. Its thread goes on."""


def run(link: Link, start: StartScore) -> None:
    """Serve the score role until Stop, or until the source hangs.

    Raises:
        EngineFault: the source cannot work as configured.
        Stopped: Stop came while it judged; LinkLost: the daemon is gone.
    """
    if start.idle_class:
        enter_idle_class()
    os.environ.setdefault(ENV_BLAS_THREADS, "1")
    began = time.monotonic()
    source = link.beat_while(lambda: open_source(start), "opening the judge")
    link.send(Ready(load_s=time.monotonic() - began))
    turn(link, source)


def turn(link: Link, source: Source) -> None:
    """Take messages until Stop, or until the source has not come back from a batch."""
    while True:
        link.beat()
        match link.receive(link.until_next_beat_s()):
            case None:
                pass
            case Stop():
                raise Stopped
            case Judge() as message:
                judged = judge(link, source, message)
                link.send(judged)
                if judged.stuck:
                    log.error(
                        "the judge did not come back within %g s; this process is of no more use", message.timeout_s
                    )
                    wait_for_the_end(link)
                    return
            case Fit() as message:
                link.send(fit(link, source, message))
            case message:
                log.warning("a score worker does not take %s", type(message).__name__)


def judge(link: Link, source: Source, message: Judge) -> Judged:
    """The source's verdict on a batch; beats go on meanwhile."""
    began = time.monotonic()
    n_items = len(message.items)
    stuck = False

    def call() -> Verdict:
        try:
            return source.judge(message.items, message.clip, began + message.timeout_s)
        except BaseException as error:  # somebody else's code, which may even call sys.exit
            log.warning("the judge failed: %s: %s", type(error).__name__, verdict.shorten(verdict.words_of(error)))
            return verdict.raised(n_items, error)

    try:
        found = link.beat_while(lambda: within(message.timeout_s + GRACE_S, call), "judging")
    except StillRunning:
        found = verdict.failed(n_items, "judge_timeout", f"the judge did not come back within {message.timeout_s:g} s")
        stuck = True
    return Judged(
        job_id=message.job_id,
        rewards=found.rewards,
        reasons=found.reasons,
        seconds=time.monotonic() - began,
        detail=found.detail,
        stuck=stuck,
    )


def wait_for_the_end(link: Link) -> None:
    """Leave the end to the daemon: a process that went at once could be seen gone before its last message was read."""
    until = time.monotonic() + END_S
    while time.monotonic() < until:
        link.beat("stuck")
        if isinstance(link.receive(link.until_next_beat_s()), Stop):
            return


def fit(link: Link, source: Source, message: Fit) -> Fitted:
    """Fit the source to ratings; beats go on meanwhile. Raises WireError for a source that is not fitted."""
    if not isinstance(source, FittableSource):
        raise WireError(f"a score worker with a {type(source).__name__} takes no Fit")
    began = time.monotonic()
    report = link.beat_while(lambda: source.fit(message), "fitting")
    return Fitted(job_id=message.job_id, report=report, seconds=time.monotonic() - began)


def within(timeout_s: float, call: Callable[[], T]) -> T:
    """The result of `call`, which runs in a thread of its own and must not raise. Raises StillRunning."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(call()), name="judge", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise StillRunning
    return results[0]
