"""When the reference of the KL penalty moves to the version that is live. Pure.

The penalty ties every update to the reference. A model that has learned for long lies far from where it began, and one
day every candidate would be held back for what people have wanted all along. So a version that stayed live for
`ratings` ratings, and pleased no less than the reference did, becomes the reference: it has passed the gate, whose
fluency is measured against the base for ever, and people have confirmed it. A version that is soon replaced by a better
one does not collect so many, so the reference moves rarely.
"""

from __future__ import annotations

import dataclasses

from edged.records import Anchor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """configured: `learn.reference`. ratings: `learn.reanchor_ratings`; 0: the reference stays as configured."""

    configured: int
    ratings: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rated:
    """A version and the ratings of its answers. mean: 0.0 where there are none."""

    version: int
    ratings: int
    mean: float


def in_force(anchor: Anchor | None, base_sha256: str, rules: Rules) -> Anchor | None:
    """`anchor`, if the reference is there now; None if it is as configured.

    An operator who names another reference, or another base model, or forbids it to move, has the last word.
    """
    if anchor is None or rules.ratings == 0:
        return None
    return anchor if (anchor.configured, anchor.base_sha256) == (rules.configured, base_sha256) else None


def moves(live: Rated, reference: Rated, rules: Rules) -> bool:
    """Whether the live version becomes the reference.

    A reference that nobody rated counts as neither liked nor disliked.
    """
    if rules.ratings == 0 or live.version == reference.version:
        return False
    return live.ratings >= rules.ratings and live.mean >= reference.mean
