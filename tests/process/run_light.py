"""Runs the daemon with the light workers of this folder: everything is real but the model.

python tests/process/run_light.py STATE_FOLDER [section.key=JSON ...]

EDGED_TEST_WAIT_S: how long callers wait for the serve worker's contexts before the work goes on without them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from edged import config
from edged.daemon import run
from edged.serve import routing, staging

if __name__ == "__main__":
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
