"""Chains of small operations as one kernel: `torch.compile` on the functions that are marked `@fusible`, if asked for.

On a card such a chain is bound by memory, each of its operations reading and writing everything once; fused it is read
and written once. What is marked are pure functions of their arguments: norms, gates, unpacking of weights. So nothing
that changes from step to step, an adapter's matrices above all, can be frozen into a compiled graph. Products of
matrices stay with the libraries that know best, and there are no CUDA graphs: every micro-batch has other row counts.

Off unless `compile_fusibles` is called, once, before work begins. Compiling takes seconds a function and needs a
compiler: Triton's, which comes with torch's CUDA builds, or on a CPU that of C++. There it does not pay: a chain over a
micro-batch of a small model stays in the processor's cache as it is.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_compiles = False


def compile_fusibles() -> None:
    """From here on, compile each marked function at its first call. For the whole process, and for good."""
    global _compiles
    _compiles = True


def fusible(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a pure function of tensors; what it is called with may have any shape."""
    compiled: Callable[P, R] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal compiled
        if not _compiles:
            return function(*args, **kwargs)
        if compiled is None:
            import torch

            log.info("compiling %s", function.__qualname__)
            compiled = torch.compile(function, dynamic=True)
        return compiled(*args, **kwargs)

    return call
