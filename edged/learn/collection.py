"""Which old adapter versions are removed from the disk. Pure.

A version is in use, and stays whatever happens, while it is live or would be served if it could be, is what a rollback
leads to, is marked as kept, is the reference of learning, is named by an update that is under way, or may be named by
one to come: by an answer within the staleness cap. Of the others the newest stay, and of those behind them one for each
doubling of their age in days (the oldest of one to two days, of two to four, and so on), so that a year of learning can
be looked at in few versions. Where the disk is short of space those go too, the oldest first.

Numbers are never given again, and a removed version keeps its row: where it came from, its figures and its verdict.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

DAY_S = 86_400.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """keep_versions: of those that are not in use, the newest ones that stay. min_free_bytes: of the disk; less than
    that is short."""

    keep_versions: int
    min_free_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """A version whose files are on the disk. age_s: since they were made."""

    version: int
    n_bytes: int
    age_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InUse:
    """What may not be removed. wanted: the live version, and the one that would be if it could be served. named:
    those whose answers may be trained on."""

    wanted: frozenset[int]
    last_good: frozenset[int]
    kept: frozenset[int]
    references: frozenset[int]
    in_updates: frozenset[int]
    named: frozenset[int]

    def why(self, version: int) -> str | None:
        """Why `version` is in use; None if it is not."""
        reasons = {
            "live": self.wanted,
            "a rollback leads there": self.last_good,
            "kept": self.kept,
            "reference of learning": self.references,
            "an update needs it": self.in_updates,
            "its answers may be trained on": self.named,
        }
        for reason, versions in reasons.items():
            if version in versions:
                return reason
        return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """removed: the oldest first. is_short: the disk stays short of space even without them."""

    removed: tuple[int, ...]
    is_short: bool


def decide(files: Sequence[Files], in_use: InUse, rules: Rules, *, free_bytes: int) -> Decision:
    """What of `files` is removed now, with `free_bytes` left on the disk."""
    free = sorted((one for one in files if in_use.why(one.version) is None), key=lambda one: one.version)
    staying = {one.version for one in free[len(free) - min(rules.keep_versions, len(free)) :]}
    staying |= _of_each_age([one for one in free if one.version not in staying])
    removed = [one for one in free if one.version not in staying]
    missing = rules.min_free_bytes - free_bytes - sum(one.n_bytes for one in removed)
    for one in free:
        if missing > 0 and one.version in staying:
            removed.append(one)
            missing -= one.n_bytes
    return Decision(removed=tuple(sorted(one.version for one in removed)), is_short=missing > 0)


def _of_each_age(files: Sequence[Files]) -> set[int]:
    """The oldest version of one to two days, of two to four, and so on."""
    oldest: dict[int, int] = {}
    for one in files:  # in the order of their versions
        if one.age_s >= DAY_S:
            oldest.setdefault(int(math.log2(one.age_s / DAY_S)), one.version)
    return set(oldest.values())


def describe(in_use: InUse, files: Sequence[Files]) -> Mapping[int, str]:
    """Version -> why it is in use, of those that are."""
    reasons = {one.version: in_use.why(one.version) for one in files}
    return {version: reason for version, reason in reasons.items() if reason is not None}
