"""How old the answers of each version are: in steps of the policy, not in version numbers. Pure.

Between a version and the live one lie as many steps as there are published versions on the way through the lineage, up
from the one to the nearest ancestor of both and down to the other. So the answers of the live version are of age 0
whatever happened before, and a number that was taken by a refused candidate, by an update that was put off or by an
adapter that never went live ages nothing. A version that names no parent stems from the base.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

BASE_VERSION = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ages:
    """steps: published version -> its age. behind: versions that the live one was made from, itself included: learning
    has gone past them, while any other version may be ahead of it again once somebody promotes it."""

    live: int
    steps: Mapping[int, int]
    behind: frozenset[int]

    def within(self, cap: int) -> frozenset[int]:
        """The versions of at most this age."""
        return frozenset(version for version, age in self.steps.items() if age <= cap)


def ages(parents: Mapping[int, int | None], live: int) -> Ages:
    """The ages of all published versions.

    Args:
        parents: published version -> the version that it was made from, which has a smaller number. The base need not
            be among them.
        live: the version that is live, one of them or the base.
    """
    from_live = {version: steps for steps, version in enumerate(_ancestors(parents, live))}
    steps = dict(from_live)
    for version in sorted(parents):  # a parent comes before what was made from it
        if version not in steps:
            steps[version] = steps[_parent(parents, version)] + 1
    return Ages(live=live, steps=steps, behind=frozenset(from_live))


def _ancestors(parents: Mapping[int, int | None], version: int) -> list[int]:
    """`version`, what it was made from, and so on down to the base."""
    found = [version]
    while found[-1] != BASE_VERSION:
        found.append(_parent(parents, found[-1]))
    return found


def _parent(parents: Mapping[int, int | None], version: int) -> int:
    parent = parents.get(version)
    return BASE_VERSION if parent is None or parent not in parents else parent
