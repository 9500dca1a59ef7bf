"""A reward source that is a Python function of the operator: `module:function(batch) -> list[float | None]`.

The batch is a list of plain dictionaries (`engine.score.source.as_map`); the function gives one number or None for
each, in their order. It is imported once and called in this process, so it may keep what it has loaded; it runs in a
thread that is not the main one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from engine.fault import EngineFault
from engine.protocol import FunctionSource, JudgeItem
from engine.score import verdict
from engine.score.source import as_map
from engine.score.verdict import Verdict


class Function:
    """Judges by calling `function`."""

    def __init__(self, function: Callable[[list[dict[str, Any]]], object]) -> None:
        self._function = function

    def judge(self, items: Sequence[JudgeItem], clip: float, deadline: float) -> Verdict:
        """What the function says. Raises what it raises; it cannot be stopped at the deadline from in here."""
        return verdict.check(self._function([as_map(item) for item in items]), len(items), clip)


def open_function(wanted: FunctionSource) -> Function:
    """Import the function. Raises EngineFault (function_unusable)."""
    module_name, _, path = wanted.entry_point.partition(":")
    if wanted.folder:
        sys.path.insert(0, wanted.folder)
    try:
        found: Any = importlib.import_module(module_name)
        for name in path.split("."):
            found = getattr(found, name)
    except (Exception, SystemExit) as error:  # the module is the operator's and may do anything
        raise _unusable(wanted, f"{type(error).__name__}: {verdict.words_of(error)}") from error
    if not callable(found):
        raise _unusable(wanted, f"it is a {type(found).__name__} and cannot be called")
    return Function(found)


def _unusable(wanted: FunctionSource, what: str) -> EngineFault:
    where = f" in {wanted.folder}" if wanted.folder else ""
    return EngineFault(
        "function_unusable",
        f"reward.function {wanted.entry_point!r}{where}: {what}; the module must be installed beside edged or lie in"
        " reward.function_folder",
    )
