"""llama.cpp in the test process runs with the same bounded spinning as in a worker."""

from __future__ import annotations

import os

from engine.worker import ENV_SPIN, SPIN_COUNT

os.environ.setdefault(ENV_SPIN, SPIN_COUNT)  # before anything loads libgomp
