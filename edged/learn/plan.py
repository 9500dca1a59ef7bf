"""When to make an update, and on which episodes. Pure: what is on disk and `now` in, a decision out.

A choice counts once: after an update has trained on it, rating it again does not bring it back (the store keeps that).
`batch_ratings` new ratings make an update; so do fewer, once the oldest has waited `max_wait_s`, or when somebody asks.
A batch whose ratings are all equal carries no information about what is better, so it waits for contrast and joins the
next one; where KTO alone learns from ratings, which sees nothing but their sign, so does a batch of one sign. Where
answers are compared in groups alone (GRPO, RLOO), a choice whose group has no other rating waits for one and does not
count towards a batch: single ratings are not used up by an update that cannot learn from them. Where KTO takes what a
policy gradient cannot use, it waits for both kinds among these. Replay adds older rated episodes within the staleness
cap, chosen by the update's seed; in whole groups, where groups are compared.

Where an objective feeds on them, preferred pairs and corrections join the next update, the oldest first; they make one
alone once the oldest has waited `max_wait_s`, or when somebody asks. KTO takes the ratings that a policy gradient
cannot use, for which it needs no log-probability of a sampler.

Nothing here remembers: the same view gives the same decision, so a start after a crash needs no other path.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Literal, TypeVar

from edged.learn.ages import Ages
from edged.learn.reward import reward_of
from edged.records import CONSTRAINTS, RatedChoice, Written
from engine.protocol import Feed

T = TypeVar("T")

LearnerState = Literal["idle", "collecting", "waiting_for_contrast", "training", "gating", "paused"]
CONTRAST_MIN = 1e-6  # ratings closer than this are equal
RATINGS_MIN = 2  # a single rating has nothing to be compared with

# Why a rated choice is not trained on. The rating itself stays in the store.
DropReason = Literal["stale", "greedy", "cut_support", "constrained", "shaped", "no_logprobs", "empty", "adapter_gone"]
# Why it waits instead: until its base model is served again, or until its version lies near the live one again.
WaitReason = Literal["other_base", "aside"]
# What KTO can do without.
FOR_THUMBS: frozenset[DropReason | WaitReason] = frozenset(
    {"stale", "aside", "greedy", "cut_support", "constrained", "shaped", "no_logprobs", "adapter_gone"}
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """`[learn]` as far as planning goes. max_batch: RATINGS_MIN or more. staleness: how many steps of the policy old
    an episode may be. feeds: what the objectives feed on. reward_clip: what ratings are cut to."""

    batch_ratings: int
    max_wait_s: float
    max_batch: int
    replay_ratio: float
    staleness: int
    feeds: frozenset[Feed] = frozenset({"rated"})
    reward_clip: float = 1.0

    @property
    def written_max(self) -> int:
        """Pairs and corrections in one update: a pair is two answers."""
        return max(1, self.max_batch // 2)

    @property
    def asks_for_both_kinds(self) -> bool:
        """Whether only thumbs are learned from, for which ratings differ if one is above 0 and one below."""
        return "thumbs" in self.feeds and not self.feeds & {"rated", "groups"}

    @property
    def compares_groups(self) -> bool:
        """Whether a policy learns from an answer only beside others of its group."""
        return "groups" in self.feeds and "rated" not in self.feeds

    @property
    def leaves_some_to_thumbs(self) -> bool:
        """Whether KTO learns from the single answers that a policy gradient cannot use, and from no others."""
        return {"rated", "thumbs"} <= self.feeds

    @property
    def answers_max(self) -> int:
        """Answers in one update at most, written ones included."""
        return self.max_batch + (2 * self.written_max if self.feeds & {"pairs", "corrections"} else 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What planning looks at. unused: rated choices that no update has trained on, oldest rating first.

    written: pairs and corrections with tokens that no update has trained on, oldest first.
    ages: of the answers of each version, by the version that is live.
    versions_on_disk: versions whose weights are there, 0 included.
    reference: the version that the KL penalty pulls towards.
    """

    unused: Sequence[RatedChoice]
    base_sha256: str
    ages: Ages
    versions_on_disk: frozenset[int]
    reference: int
    paused: bool
    pinned: bool
    asked: bool
    written: Sequence[Written] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """batch, written: the choices, pairs and corrections to train on as new; both () to wait. drops: choices that will
    never be trained on.

    ratings_until_update: how many more ratings make an update, as far as counting goes.
    wake_at: when time alone can change the decision; None if only new ratings can.
    """

    state: LearnerState
    batch: tuple[RatedChoice, ...]
    drops: tuple[tuple[RatedChoice, DropReason], ...]
    ratings_until_update: int
    want_trainer: bool
    wake_at: float | None
    why: str
    written: tuple[Written, ...] = ()

    @property
    def makes_update(self) -> bool:
        return bool(self.batch or self.written)


def missing(view: View, rules: Rules) -> int:
    """How many more ratings make an update, as far as counting goes."""
    return max(0, rules.batch_ratings - len(_counted(_sorted_out(view, rules)[0], view, rules)))


def decide(view: View, now: float, rules: Rules) -> Decision:
    """Whether to make an update now."""
    usable, drops = _sorted_out(view, rules)
    written = tuple(one for one in view.written if is_used(one, rules))[: rules.written_max]
    counted = _counted(usable, view, rules)
    missing = max(0, rules.batch_ratings - len(counted))
    if blocked := _blocked(view):
        # What is dropped is dropped for good, and what blocks now may end with another version live.
        return dataclasses.replace(blocked, ratings_until_update=missing)
    ratings = _decide_ratings(usable, counted, missing, view, now, rules)
    written_due_at = written[0].written_at + rules.max_wait_s if written else None
    if ratings.batch or (written_due_at is not None and (view.asked or now >= written_due_at)):
        parts = [f"{len(ratings.batch)} new ratings"] if ratings.batch else []
        parts += [f"{len(written)} new pairs and corrections"] if written else []
        return dataclasses.replace(
            ratings,
            state="training",
            drops=drops,
            written=written,
            want_trainer=True,
            wake_at=None,
            why=", ".join(parts),
        )
    if written_due_at is None:
        return dataclasses.replace(ratings, drops=drops)
    wakes = [at for at in (ratings.wake_at, written_due_at) if at is not None]
    waiting = dataclasses.replace(ratings, drops=drops, wake_at=min(wakes))
    if ratings.state != "idle":
        return waiting
    why = f"{len(written)} pairs and corrections wait for ratings, or for their time"
    return dataclasses.replace(waiting, state="collecting", why=why)


def _sorted_out(view: View, rules: Rules) -> tuple[list[RatedChoice], tuple[tuple[RatedChoice, DropReason], ...]]:
    """The unused ratings that can be trained on, and those that never can."""
    usable: list[RatedChoice] = []
    drops: list[tuple[RatedChoice, DropReason]] = []
    if not rules.feeds & {"rated", "groups", "thumbs"}:
        return usable, ()  # they wait for another objective
    for choice in view.unused:
        reason = unfit(choice, view, rules)
        if reason is None:
            usable.append(choice)
        elif reason != "other_base" and reason != "aside":
            drops.append((choice, reason))
    return usable, tuple(drops)


def _waiting(
    state: LearnerState, why: str, *, missing: int = 0, want_trainer: bool = False, wake_at: float | None = None
) -> Decision:
    return Decision(
        state=state,
        batch=(),
        drops=(),
        ratings_until_update=missing,
        want_trainer=want_trainer,
        wake_at=wake_at,
        why=why,
    )


def _blocked(view: View) -> Decision | None:
    """Why nothing at all is trained, if so."""
    if view.paused:
        return _waiting("paused", "paused by the operator")
    if view.pinned:
        return _waiting("paused", "a version is pinned")
    if view.reference not in view.versions_on_disk:
        return _waiting("paused", f"version {view.reference} (learn.reference) is not on this box")
    return None


def _counted(usable: Sequence[RatedChoice], view: View, rules: Rules) -> list[RatedChoice]:
    """Those that count towards a batch: all, or where not all are compared with each other, those that have something
    beside them."""
    if not (rules.compares_groups or rules.leaves_some_to_thumbs):
        return list(usable)
    chosen = {choice.episode_id for part in comparable(usable, view, rules) for choice in part}
    if rules.leaves_some_to_thumbs and not chosen:  # what comes next may give any of them its contrast
        return list(usable)
    return [choice for choice in usable if choice.episode_id in chosen]


def _decide_ratings(
    usable: Sequence[RatedChoice], counted: Sequence[RatedChoice], missing: int, view: View, now: float, rules: Rules
) -> Decision:
    """Whether the ratings make an update now."""
    if not usable:
        n_aside = sum(unfit(choice, view, rules) == "aside" for choice in view.unused)
        why = f"{n_aside} rated answers wait: their version is far from the live one" if n_aside else "no new ratings"
        return _waiting("idle", why, missing=missing)
    alone = ""
    if n_alone := len(usable) - len(counted):
        lacks = "no other answer of their completion is rated otherwise"
        if rules.leaves_some_to_thumbs:
            lacks = "those that only KTO can take, or all others, are rated alike"
        alone = f"{n_alone} rated answers wait: {lacks}"
    if not counted:
        return _waiting("waiting_for_contrast", alone, missing=missing)
    due_at = counted[0].rated_at + rules.max_wait_s
    enough = missing == 0 or view.asked or now >= due_at
    want_trainer = len(counted) * 2 >= rules.batch_ratings or enough
    if not enough:
        why = "; ".join(part for part in (f"{missing} more ratings make an update", alone) if part)
        return _waiting("collecting", why, missing=missing, want_trainer=want_trainer, wake_at=due_at)
    in_parts = rules.compares_groups or rules.leaves_some_to_thumbs
    batch = _of_parts(counted, view, rules) if in_parts else _oldest(counted, rules)
    if not batch:
        why = "one rating has nothing to be compared with"
        if len(usable) >= RATINGS_MIN:
            why = "all new ratings are of one kind" if rules.asks_for_both_kinds else "all new ratings are equal"
        return _waiting("waiting_for_contrast", why, missing=missing, want_trainer=want_trainer)
    return Decision(
        state="training",
        batch=batch,
        drops=(),
        ratings_until_update=0,
        want_trainer=True,
        wake_at=None,
        why=f"{len(batch)} new ratings",
    )


def _oldest(usable: Sequence[RatedChoice], rules: Rules) -> tuple[RatedChoice, ...]:
    """At most `max_batch`, the oldest, and two that differ; () if all ratings are equal."""
    batch = tuple(usable[: rules.max_batch])
    if len(batch) >= RATINGS_MIN and has_contrast(batch, rules):
        return batch
    # The newest of many equal ratings may bring the contrast: it must not be cut off by the batch's limit.
    return with_contrast(usable, rules)


def _of_parts(counted: Sequence[RatedChoice], view: View, rules: Rules) -> tuple[RatedChoice, ...]:
    """At most `max_batch`: whole parts, the one with the oldest rating first, and of the first that is larger than what
    is left so much that two differ. A group is cut only if it is the first."""
    chosen: set[int] = set()
    for part in sorted(comparable(counted, view, rules), key=lambda part: counted.index(part[0])):
        room = rules.max_batch - len(chosen)
        if len(part) > room and chosen and (rules.compares_groups or room < RATINGS_MIN):
            continue
        differing = _contrast(part, rules, by_sign=True) or _contrast(part, rules, by_sign=False)
        chosen |= {choice.episode_id for choice in _cut(part, differing, room)}
    return tuple(choice for choice in counted if choice.episode_id in chosen)


def comparable(choices: Sequence[RatedChoice], view: View, rules: Rules) -> list[tuple[RatedChoice, ...]]:
    """The choices that can be learned from, in parts that suffice each for itself.

    For a policy gradient these are the groups in which two ratings differ, or where it learns from single answers, all
    that it can use, if two differ. For KTO it is all others together, if both kinds are among them.
    """
    fit = [choice for choice in choices if unfit_for_policy(choice, view, rules) is None]
    groups: dict[str, list[RatedChoice]] = {}
    if "rated" in rules.feeds:
        groups = {"": fit}
    elif "groups" in rules.feeds:
        for choice in fit:
            groups.setdefault(choice.group, []).append(choice)
    parts = [tuple(group) for group in groups.values() if _contrast(group, rules, by_sign=False)]
    if "thumbs" in rules.feeds:
        compared = {one.episode_id for part in ([fit] if "rated" in rules.feeds else parts) for one in part}
        others = [choice for choice in choices if choice.episode_id not in compared]
        if _contrast(others, rules, by_sign=True):
            parts.append(tuple(others))
    return parts


def sees_enough(view: View, rules: Rules) -> bool:
    """Whether more unused ratings than `view` has would change nothing but how many wait."""
    if not rules.feeds & {"rated", "groups", "thumbs"}:
        return True
    counted = _counted(_sorted_out(view, rules)[0], view, rules)
    if len(counted) < max(rules.batch_ratings, rules.max_batch):
        return False  # behind others that wait for something else
    return bool(comparable(counted, view, rules))


def written_suffice(written: Sequence[Written], rules: Rules) -> bool:
    """Whether more pairs and corrections than these would change nothing but how many wait."""
    if not rules.feeds & {"pairs", "corrections"}:
        return True
    return sum(is_used(one, rules) for one in written) >= rules.written_max


def is_used(written: Written, rules: Rules) -> bool:
    """Whether an objective feeds on a pair or correction."""
    if "pairs" in rules.feeds and written.differs:
        return True
    return written.kind == "correction" and "corrections" in rules.feeds


def unfit(choice: RatedChoice, view: View, rules: Rules) -> DropReason | WaitReason | None:
    """Why no objective can train on `choice`; None if one can."""
    reason = unfit_for_policy(choice, view, rules)
    return None if "thumbs" in rules.feeds and reason in FOR_THUMBS else reason


def unfit_for_policy(choice: RatedChoice, view: View, rules: Rules) -> DropReason | WaitReason | None:
    """Why a policy gradient cannot train on `choice`; None if it can.

    It needs the logprob of each token under the distribution that was sampled, with full support, and the weights
    that sampled it, not too far from the live ones. What learning has gone past by more than that is stale; what lies
    aside of it (after a rollback, say) is within reach again if its version is promoted.
    """
    if choice.base_sha256 != view.base_sha256:
        return "other_base"
    if choice.n_tokens == 0:
        return "empty"
    if choice.temperature == 0.0:
        return "greedy"
    if choice.top_p < 1.0 or choice.top_k > 0:
        return "cut_support"
    if not CONSTRAINTS.isdisjoint(choice.shaped_by.split()):
        return "constrained"
    if choice.shaped_by:
        return "shaped"
    if not choice.logprobs_complete:
        return "no_logprobs"
    age = view.ages.steps.get(choice.version)
    if age is None or age > rules.staleness:
        return "stale" if choice.version in view.ages.behind else "aside"
    if choice.version not in view.versions_on_disk:
        return "adapter_gone"
    return None


def has_contrast(choices: Sequence[RatedChoice], rules: Rules) -> bool:
    """Whether at least two ratings differ."""
    return _contrast(choices, rules, by_sign=rules.asks_for_both_kinds) is not None


def with_contrast(usable: Sequence[RatedChoice], rules: Rules) -> tuple[RatedChoice, ...]:
    """At most `max_batch` choices, the oldest ones and two that differ, in their order; () if all ratings are equal."""
    return _cut(usable, _contrast(usable, rules, by_sign=rules.asks_for_both_kinds), rules.max_batch)


def _cut(usable: Sequence[RatedChoice], differing: tuple[int, int] | None, limit: int) -> tuple[RatedChoice, ...]:
    """At most `limit`, the oldest and the two that differ."""
    if differing is None:
        return ()
    others = [number for number in range(min(len(usable), limit)) if number not in differing]
    chosen = sorted([*differing, *others[: limit - len(differing)]])
    return tuple(usable[number] for number in chosen)


def _contrast(choices: Sequence[RatedChoice], rules: Rules, *, by_sign: bool) -> tuple[int, int] | None:
    """The numbers of the first two choices that differ as the trainer sees them, or of which one is liked and one
    disliked."""
    if not choices:
        return None
    if by_sign:
        liked = next((number for number, choice in enumerate(choices) if choice.rating > 0.0), None)
        disliked = next((number for number, choice in enumerate(choices) if choice.rating < 0.0), None)
        return None if liked is None or disliked is None else (liked, disliked)
    rewards = [reward_of(choice.rating, clip=rules.reward_clip) for choice in choices]
    other = (number for number, reward in enumerate(rewards) if abs(reward - rewards[0]) > CONTRAST_MIN)
    return next(((0, number) for number in other), None)


def replay(used: Sequence[RatedChoice], *, n_new: int, seed: int, view: View, rules: Rules) -> tuple[RatedChoice, ...]:
    """Which of the already used choices join an update of `n_new` new ones, drawn by `seed`.

    Up to replay_ratio * n_new, and not past `max_batch` in all. The draw depends on nothing but the arguments, and
    comes back in the order of `used`. Where groups are compared it is of whole groups in which two ratings differ, as
    far as they fit; beside KTO also of single others.
    """
    fit = [choice for choice in used if unfit(choice, view, rules) is None]
    wanted = min(int(rules.replay_ratio * n_new), rules.max_batch - n_new)
    if not rules.compares_groups:
        return _drawn(fit, wanted, seed)
    groups_only = dataclasses.replace(rules, feeds=rules.feeds - {"thumbs"})
    units = comparable(fit, view, groups_only)
    if "thumbs" in rules.feeds:
        compared = {choice.episode_id for group in units for choice in group}
        units += [(choice,) for choice in fit if choice.episode_id not in compared]
    chosen: set[int] = set()
    for unit in random.Random(seed).sample(units, len(units)):
        if len(chosen) + len(unit) <= wanted:
            chosen |= {choice.episode_id for choice in unit}
    return tuple(choice for choice in fit if choice.episode_id in chosen)


def replay_written(used: Sequence[Written], *, n_new: int, seed: int, rules: Rules) -> tuple[Written, ...]:
    """Which of the already used pairs and corrections join an update of `n_new` new ones: as `replay` does."""
    fit = [one for one in used if is_used(one, rules)]
    return _drawn(fit, min(int(rules.replay_ratio * n_new), rules.written_max - n_new), seed)


def _drawn(fit: Sequence[T], wanted: int, seed: int) -> tuple[T, ...]:
    """At most `wanted` of `fit`, in its order."""
    chosen = set(random.Random(seed).sample(range(len(fit)), max(0, min(len(fit), wanted))))
    return tuple(one for index, one in enumerate(fit) if index in chosen)
