"""Runs the daemon with the light workers of this folder: everything is real but the model.

python tests/process/run_light.py STATE_FOLDER [section.key=JSON ...]

EDGED_TEST_WAIT_S: how long callers wait for the serve worker's contexts before the work goes on without them.
EDGED_TEST_DIE: "before NAME" or "after NAME" of DEATHS: the daemon kills itself there, EDGED_TEST_DIE_WHILE exists.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from adapters import store as adapter_files
from edged import config
from edged.daemon import run
from edged.serve import routing, staging
from edged.store.lineage import Lineage

# What a daemon may be doing when it dies: the object and the name of what it calls.
DEATHS: dict[str, tuple[Any, str]] = {
    "live": (Lineage, "set_live"),
    "current": (adapter_files, "write_current"),
    "route": (routing.Routing, "go_live"),
    "collect": (Lineage, "collect"),
    "remove": (adapter_files, "remove_version"),
}


def die_at(when: str, name: str, armed: Path) -> None:
    """Have this process killed before or after the next call of `name`, while `armed` exists."""
    owner, attribute = DEATHS[name]
    call = getattr(owner, attribute)

    def die(moment: str) -> None:
        if moment == when and armed.exists():
            os.kill(os.getpid(), signal.SIGKILL)

    @functools.wraps(call)
    async def waited_for(*arguments: Any, **options: Any) -> Any:
        die("before")
        result = await call(*arguments, **options)
        die("after")
        return result

    @functools.wraps(call)
    def called(*arguments: Any, **options: Any) -> Any:
        die("before")
        result = call(*arguments, **options)
        die("after")
        return result

    setattr(owner, attribute, waited_for if inspect.iscoroutinefunction(call) else called)


if __name__ == "__main__":
    if death := os.environ.get("EDGED_TEST_DIE"):
        when, name = death.split(" ")
        die_at(when, name, Path(os.environ["EDGED_TEST_DIE_WHILE"]))
    if wait_s := os.environ.get("EDGED_TEST_WAIT_S"):
        routing.GO_LIVE_WAIT_S = staging.STAGE_WAIT_S = float(wait_s)
    overrides = {key: json.loads(value) for key, value in (text.split("=", 1) for text in sys.argv[2:])}
    sys.exit(
        run(
            config.load(None, overrides),
            state_folder=Path(sys.argv[1]),
            worker_command=(sys.executable, "-P", str(Path(__file__).parent / "light_worker.py")),
            worker_environment={name: value for name, value in os.environ.items() if name.startswith("EDGED_LIGHT_")},
        )
    )
