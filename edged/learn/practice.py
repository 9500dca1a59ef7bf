"""When the box practises, and what it does next: a pure state machine. Events and `now` in, actions out.

Practice goes in rounds, and only while nobody needs the box:

    counting -> preparing -> sampling -> judging -> training -> counting ...

`counting` asks the store what waits there, `preparing` starts the judge. A round that a user's request interrupts goes
on later: groups that were complete are in the store, and what is in the store decides where it goes on. So a start
after a crash needs no other path. `edged.learn.practising` executes the actions and reports back as events.

Invariants: one action is under way at a time; none begins unless the box has been quiet for `idle_s`; a request during
sampling is answered by `Interrupt` at once; nothing is sampled or trained once `updates_max` updates in a row have had
no rating by a person, nor once FRUITLESS_MAX rounds in a row had nothing to learn from: rewards that are all alike, or
of one sign where only KTO learns. What fails is left alone for a while that doubles, until somebody rates.

What a round is made of is decided here too: which prompts, and which of the judged answers make an update.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Sequence
from typing import Literal, TypeVar

from edged.learn import plan
from edged.records import JudgedAnswer, PracticeCounts, RatedChoice

T = TypeVar("T")

HOLD_FIRST_S = 60.0  # after something failed; doubles up to HOLD_MAX_S
HOLD_MAX_S = 3600.0
FRUITLESS_MAX = 16  # a habit that one answer in fifty has is missed by so many rounds once in 30,000 times

FREE = ("idle", "collecting", "waiting_for_contrast")  # states of the learner in which it needs nothing of the box

Doing = Literal["", "counting", "preparing", "sampling", "judging", "training"]
# What a status shows. off: nothing judges. waiting: for the box to be idle, for prompts, or after a failure.
# limit: for a person's rating, or for other settings.
PracticeState = Literal["off", "waiting", "limit", "preparing", "sampling", "judging", "training"]
SkipReason = Literal[plan.DropReason, plan.WaitReason, "group_of_one", "equal_rewards"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """`[practice]`. off: why there is none at all; "" if there is. round_prompts: groups in a round. prompts: how many
    the operator's file has."""

    off: str
    idle_s: float
    round_prompts: int
    updates_max: int
    prompts: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """users: requests under way. blocked: why nothing may begin, besides users; "" if nothing speaks against it.

    quiet_since: since when neither was the case, and no practice update was made. leaving: sampling was told to stop.
    sampled: it came to its end, so the round goes on with what there is, if prompts turned out to be the same too.
    counts: None when they are not known any more. fruitless: rounds in a row that made no update. ready: the judge said
    that it can be asked. hold_s: how long the next failure holds.
    """

    doing: Doing = ""
    users: int = 0
    blocked: str = ""
    quiet_since: float = 0.0
    leaving: bool = False
    sampled: bool = False
    counts: PracticeCounts | None = None
    fruitless: int = 0
    ready: bool = False
    held_until: float = 0.0
    held_why: str = ""
    hold_s: float = HOLD_FIRST_S


@dataclasses.dataclass(frozen=True, slots=True)
class Users:
    """So many requests are under way."""

    active: int


@dataclasses.dataclass(frozen=True, slots=True)
class Blocked:
    """The rest of the box needs it, for the reason `why`; "": it does not."""

    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class Rated:
    """A person rated: what was held is tried again, and the judge may know more now."""


@dataclasses.dataclass(frozen=True, slots=True)
class Changed:
    """There may be other prompts, or other rules."""


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """The action under way has ended, and the store stands at `counts`. trouble: what is not to be tried again soon."""

    counts: PracticeCounts
    trouble: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Users | Blocked | Rated | Changed | Done | Tick


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """Ask the store what waits."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prepare:
    """Start the judge."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """Sample `groups` groups. fresh: they begin a round."""

    groups: int
    fresh: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Interrupt:
    """Stop sampling; what is complete is kept. `Done` follows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Judge:
    """Have the judge reward what waits for it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Train:
    """Make an update of what was judged."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rest:
    """The judge is not needed for a while."""


Action = Count | Prepare | Sample | Interrupt | Judge | Train | Rest

_DOING: dict[type[Action], Doing] = {
    Count: "counting",
    Prepare: "preparing",
    Sample: "sampling",
    Judge: "judging",
    Train: "training",
}


def step(state: State, event: Event, now: float, rules: Rules) -> tuple[State, tuple[Action, ...]]:
    """The state after `event`, and what to do. now: seconds of a clock that only goes forward.

    Raises ValueError: `Done` while nothing is under way.
    """
    after, rests = _heard(state, event, now, rules)
    actions: list[Action] = [Rest()] if rests else []
    if after.doing:
        if after.doing == "sampling" and not after.leaving and not _is_quiet(after):
            after = dataclasses.replace(after, leaving=True)
            actions.append(Interrupt())
        return after, tuple(actions)
    following = _next(after, now, rules)
    if following is not None:
        after = dataclasses.replace(after, doing=_DOING[type(following)])
        actions.append(following)
    return after, tuple(actions)


def wake_at(state: State, now: float, rules: Rules) -> float | None:
    """When time alone can change what is done; None if only events can. now: of the latest `step`."""
    if state.doing or rules.off or not _is_quiet(state):
        return None
    due = max(state.quiet_since + rules.idle_s, state.held_until)
    return due if due > now else None


def describe(state: State, now: float, rules: Rules) -> tuple[PracticeState, str]:
    """What a status shows: the word, and why."""
    if rules.off:
        return "off", rules.off
    if state.doing and state.doing != "counting":
        return state.doing, ""
    if state.counts is not None and state.counts.in_a_row >= rules.updates_max:
        return "limit", f"{state.counts.in_a_row} practice updates in a row; it goes on when a person rates"
    if state.fruitless >= FRUITLESS_MAX:
        why = f"{state.fruitless} rounds in a row had no rewards to learn from; it goes on when a person rates"
        return "limit", f"{why}, or with other settings"
    if state.users:
        return "waiting", "people are served"
    if state.blocked:
        return "waiting", state.blocked
    if now < state.held_until:
        return "waiting", f"{state.held_why}; it is tried again later"
    if now < state.quiet_since + rules.idle_s or state.counts is None:
        return "waiting", "for the box to be idle"
    return "waiting", "there are no prompts yet"


def _heard(state: State, event: Event, now: float, rules: Rules) -> tuple[State, bool]:
    """What is known after `event`, and whether the judge may rest."""
    match event:
        case Users(active):
            return _with_quiet(dataclasses.replace(state, users=active), state, now), False
        case Blocked(why):
            if state.doing == "training":  # that is our own update
                return state, False
            return _with_quiet(dataclasses.replace(state, blocked=why), state, now), False
        case Rated():
            freed = dataclasses.replace(state, counts=None, fruitless=0, ready=False, held_until=0.0, held_why="")
            return dataclasses.replace(freed, hold_s=HOLD_FIRST_S), False
        case Changed():
            return dataclasses.replace(state, counts=None, fruitless=0), False
        case Done(counts, trouble):
            ended = _done(state, counts, trouble, now)
            return ended, bool(trouble) or _is_at_limit(ended, counts, rules)
        case Tick():
            return state, False


def _with_quiet(after: State, before: State, now: float) -> State:
    """Quiet begins anew once what disturbed it is over."""
    return after if _is_quiet(before) else dataclasses.replace(after, quiet_since=now)


def _done(state: State, counts: PracticeCounts, trouble: str, now: float) -> State:
    if not state.doing:
        raise ValueError(f"practice: something ended while nothing was under way: {state}")
    ended = dataclasses.replace(state, doing="", leaving=False, counts=counts)
    if state.doing in ("sampling", "judging", "training"):
        whole = state.doing == "sampling" and not state.leaving and counts.unjudged > 0
        ended = dataclasses.replace(ended, sampled=whole)
    if state.doing == "preparing":
        ended = dataclasses.replace(ended, ready=not trouble)
    if trouble:
        return dataclasses.replace(
            ended,
            ready=False,
            held_until=now + state.hold_s,
            held_why=trouble,
            hold_s=min(HOLD_MAX_S, 2 * state.hold_s),
        )
    if state.doing == "training":
        made = state.counts is None or counts.updates > state.counts.updates
        fruitless = 0 if made else state.fruitless + 1
        return dataclasses.replace(ended, fruitless=fruitless, ready=False, hold_s=HOLD_FIRST_S, quiet_since=now)
    return ended


def _is_at_limit(state: State, counts: PracticeCounts, rules: Rules) -> bool:
    """Whether it waits for a person."""
    return counts.in_a_row >= rules.updates_max or state.fruitless >= FRUITLESS_MAX


def _is_quiet(state: State) -> bool:
    return state.users == 0 and not state.blocked


def _next(state: State, now: float, rules: Rules) -> Action | None:
    """What to begin, if anything."""
    if rules.off or not _is_quiet(state) or now < max(state.held_until, state.quiet_since + rules.idle_s):
        return None
    counts = state.counts
    if counts is None:
        return Count()
    if _is_at_limit(state, counts, rules):
        return None
    if counts.judged and not counts.unjudged:
        return Train()
    missing = min(rules.round_prompts, counts.prompts + rules.prompts) - counts.groups
    samples = missing > 0 and not counts.judged and not state.sampled
    if not samples and not counts.unjudged:
        return None
    if not state.ready:
        return Prepare()
    return Sample(missing, fresh=counts.groups == 0) if samples else Judge()


def hindrance(state: plan.LearnerState, why: str, *, due: bool) -> str:
    """Why the learner keeps the box from practising; "" if it does not.

    due: ratings make an update as soon as it can be made: it waits for a worker, say.
    """
    if state not in FREE:
        return f"the learner is {state} ({why})"
    return f"ratings wait for their update ({why})" if due else ""


def draw(prompts: Sequence[T], wanted: int, seed: int) -> tuple[T, ...]:
    """`wanted` different prompts at most, drawn by `seed`, in an order that is drawn too."""
    return tuple(random.Random(seed).sample(prompts, min(wanted, len(prompts))))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """batch: what makes an update; () if nothing does. skipped: what never will."""

    batch: tuple[RatedChoice, ...]
    skipped: tuple[tuple[RatedChoice, SkipReason], ...]


def pick(judged: Sequence[JudgedAnswer], view: plan.View, rules: plan.Rules) -> Picked:
    """Which judged answers make an update.

    Answers that are too old, or whose adapter is gone, are skipped. Where only groups are compared (GRPO, RLOO), so are
    groups of one and of equal rewards: nothing is better there. Where single answers are learned from as well, they may
    stay, but all rewards must not be equal, and what only KTO can take must be of both kinds. At most `max_batch`
    answers, in whole groups unless one is larger; what does not fit waits for the next update.
    """
    skipped: list[tuple[RatedChoice, SkipReason]] = []
    groups: dict[str, list[RatedChoice]] = collections.defaultdict(list)
    for one in judged:
        reason = plan.unfit_for_policy(one.choice, view, rules)
        if reason is None:
            groups[one.answers_to].append(one.choice)
        else:
            skipped.append((one.choice, reason))
    batch: list[RatedChoice] = []
    for group in groups.values():
        if (why := _nothing_to_compare(group, rules)) and not rules.feeds & {"rated", "thumbs"}:
            skipped += [(choice, why) for choice in group]
        elif len(batch) + len(group) <= rules.max_batch:
            batch += group
        elif not batch:
            batch += group[: rules.max_batch]
    useless = batch if not plan.has_contrast(batch, rules) else []
    if rules.compares_groups:
        compared = {choice.episode_id for part in plan.comparable(batch, view, rules) for choice in part}
        useless = [choice for choice in batch if choice.episode_id not in compared]
    if useless:
        skipped += [(choice, "equal_rewards" if len(batch) > 1 else "group_of_one") for choice in useless]
        batch = [choice for choice in batch if choice not in useless]
    return Picked(batch=tuple(batch), skipped=tuple(skipped))


def _nothing_to_compare(group: Sequence[RatedChoice], rules: plan.Rules) -> SkipReason | None:
    if len(group) < plan.RATINGS_MIN:
        return "group_of_one"
    return None if plan.has_contrast(group, rules) else "equal_rewards"
