"""The name of a measurement, as a number that can be kept beside its figures.

Figures that are kept are compared with later ones only if both were measured the same way: on the same questions, with
the same dice, on the same base.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence


def name_of(conditions: Sequence[object]) -> float:
    """A number that names these conditions, which JSON must be able to hold: 48 bits, which a float keeps exactly."""
    return float(int.from_bytes(hashlib.sha256(json.dumps(conditions).encode()).digest()[:6]))
