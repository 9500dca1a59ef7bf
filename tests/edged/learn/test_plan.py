"""When an update is made and on what: the rules one by one, and what holds for every store and every setting."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.learn import plan
from edged.learn.ages import Ages, ages
from edged.learn.plan import Decision, Rules, View, decide
from edged.records import RatedChoice, Written

BASE = "b" * 64
RULES = Rules(batch_ratings=4, max_wait_s=900.0, max_batch=8, replay_ratio=0.5, staleness=3)


def rated(number: int, rating: float = 1.0, **changes: Any) -> RatedChoice:
    values: dict[str, Any] = {
        "episode_id": number,
        "feedback_id": f"fb-{number}",
        "rating": rating,
        "rated_at": 1000.0 + number,
        "version": 5,
        "base_sha256": BASE,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "n_tokens": 12,
        "logprobs_complete": True,
        "used_by": None,
        "group": f"chatcmpl-{number}",
    }
    return RatedChoice(**{**values, **changes})


def mixed(n: int, first: int = 1) -> list[RatedChoice]:
    """Choices rated up and down in turn."""
    return [rated(number, 1.0 if number % 2 else -1.0) for number in range(first, first + n)]


def in_a_row(live: int) -> Ages:
    """Each version made from the one before, and the last one live."""
    return ages({version: version - 1 for version in range(1, live + 1)}, live)


def view(unused: Sequence[RatedChoice] = (), **changes: Any) -> View:
    values: dict[str, Any] = {
        "unused": unused,
        "base_sha256": BASE,
        "ages": in_a_row(5),
        "versions_on_disk": frozenset({0, 2, 3, 4, 5}),
        "reference": 0,
        "paused": False,
        "pinned": False,
        "asked": False,
    }
    return View(**{**values, **changes})


def decide_now(seen: View, rules: Rules = RULES, now: float = 1010.0) -> Decision:
    return decide(seen, now, rules)


# ------------------------------------------------------------------------------------------------------------ when


def test_without_new_ratings_the_learner_is_idle() -> None:
    decision = decide_now(view())
    assert (decision.state, decision.batch, decision.want_trainer) == ("idle", (), False)
    assert decision.ratings_until_update == 4


def test_too_few_ratings_are_collected_until_the_oldest_has_waited_long_enough() -> None:
    decision = decide_now(view(mixed(3)))
    assert (decision.state, decision.batch, decision.ratings_until_update) == ("collecting", (), 1)
    assert decision.wake_at == 1001.0 + 900.0


def test_enough_ratings_make_an_update_of_all_of_them() -> None:
    choices = mixed(5)
    decision = decide_now(view(choices))
    assert (decision.state, decision.batch, decision.ratings_until_update) == ("training", tuple(choices), 0)


@pytest.mark.parametrize(("n", "wanted"), [(1, False), (2, True), (3, True)])
def test_the_trainer_is_started_at_half_a_batch(n: int, wanted: bool) -> None:
    assert decide_now(view(mixed(n))).want_trainer is wanted


@pytest.mark.parametrize(("now", "n_batch"), [(1900.5, 0), (1901.0, 2)])
def test_fewer_ratings_make_an_update_once_the_oldest_has_waited(now: float, n_batch: int) -> None:
    assert len(decide_now(view(mixed(2)), now=now).batch) == n_batch


def test_fewer_ratings_make_an_update_when_somebody_asks() -> None:
    assert len(decide_now(view(mixed(2), asked=True)).batch) == 2


def test_a_single_rating_makes_no_update_even_when_somebody_asks() -> None:
    decision = decide_now(view(mixed(1), asked=True))
    assert (decision.state, decision.batch) == ("waiting_for_contrast", ())
    assert decision.why == "one rating has nothing to be compared with"


def test_equal_ratings_wait_for_contrast() -> None:
    decision = decide_now(view([rated(number) for number in range(1, 7)]))
    assert (decision.state, decision.batch, decision.wake_at) == ("waiting_for_contrast", (), None)
    assert decision.why == "all new ratings are equal"
    assert decision.want_trainer


def test_equal_ratings_join_the_first_batch_that_has_contrast() -> None:
    choices = [*[rated(number) for number in range(1, 6)], rated(6, -1.0)]
    assert decide_now(view(choices)).batch == tuple(choices)


def test_a_contrast_that_lies_beyond_the_largest_batch_is_reached_for() -> None:
    choices = [*[rated(number) for number in range(1, 20)], rated(20, -1.0)]
    assert [choice.episode_id for choice in decide_now(view(choices)).batch] == [1, 2, 3, 4, 5, 6, 7, 20]


def test_ratings_that_differ_by_less_than_a_millionth_are_equal() -> None:
    assert not plan.has_contrast([rated(1, 0.5), rated(2, 0.5 + 1e-7)], RULES)
    assert plan.has_contrast([rated(1, 0.5), rated(2, 0.51)], RULES)


@pytest.mark.parametrize("feed", ["rated", "groups"])
def test_ratings_that_the_clip_makes_equal_are_equal(feed: Any) -> None:
    choices = [rated(number, 1.0 if number % 2 else 0.5, group="g") for number in range(1, 9)]
    rules = dataclasses.replace(RULES, feeds=frozenset({feed}))
    assert decide_now(view(choices), rules).batch == tuple(choices)
    clipped = decide_now(view(choices), dataclasses.replace(rules, reward_clip=0.4))
    assert (clipped.state, clipped.batch, clipped.drops) == ("waiting_for_contrast", (), ())
    apart = [*choices, rated(9, 0.3, group="g")]
    assert choices[0] in decide_now(view(apart), dataclasses.replace(rules, reward_clip=0.4)).batch


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"paused": True}, "paused by the operator"),
        ({"pinned": True}, "a version is pinned"),
        ({"reference": 9}, "version 9 .* is not on this box"),
    ],
)
def test_nothing_is_trained_while_the_operator_says_so(changes: dict[str, Any], why: str) -> None:
    decision = decide_now(view(mixed(8), asked=True, **changes))
    assert (decision.state, decision.batch, decision.want_trainer, decision.wake_at) == ("paused", (), False, None)
    assert re.search(why, decision.why)


def test_t_kto_1_where_kto_alone_learns_ratings_of_one_sign_wait_for_one_of_the_other() -> None:
    rules = dataclasses.replace(RULES, feeds=frozenset({"thumbs"}))
    liked = [rated(n, rating) for n, rating in enumerate([1.0, 0.5, 0.0, 0.25, 1.0], start=1)]
    waiting = decide_now(view(liked, asked=True), rules)
    assert (waiting.state, waiting.why) == ("waiting_for_contrast", "all new ratings are of one kind")
    both = [*liked, *[rated(n) for n in range(6, 20)], rated(20, -0.5)]
    assert [choice.episode_id for choice in decide_now(view(both), rules).batch] == [1, 2, 3, 4, 5, 6, 7, 20]
    assert decide_now(view(liked)).batch, "a policy gradient learns from degrees"


GROUPS = dataclasses.replace(RULES, feeds=frozenset({"groups"}))


def test_where_groups_are_compared_single_ratings_wait_and_do_not_count_towards_a_batch() -> None:
    singles = mixed(16)
    waiting = decide_now(view(singles, asked=True), GROUPS, now=1e6)
    assert (waiting.state, waiting.makes_update, waiting.want_trainer) == ("waiting_for_contrast", False, False)
    assert (waiting.ratings_until_update, waiting.wake_at) == (4, None)
    assert waiting.why == "16 rated answers wait: no other answer of their completion is rated otherwise"
    pair = [rated(17, 1.0, group="x"), rated(18, -1.0, group="x")]
    one_pair = decide_now(view([*singles, *pair]), GROUPS)
    assert (one_pair.state, one_pair.ratings_until_update, one_pair.wake_at) == ("collecting", 2, 1017.0 + 900.0)
    assert one_pair.why.startswith("2 more ratings make an update; 16 rated answers wait")
    other = [rated(19, 1.0, group="y"), rated(20, 0.5, group="y")]
    assert decide_now(view([*singles, *pair, *other]), GROUPS).batch == (*pair, *other)


def test_a_group_of_equal_ratings_has_nothing_to_compare() -> None:
    equal = [rated(number, 1.0, group="x") for number in range(1, 5)]
    assert decide_now(view([*equal, rated(5, -1.0)]), GROUPS).state == "waiting_for_contrast"


def test_a_group_larger_than_a_batch_is_cut_to_answers_that_differ() -> None:
    group = [*[rated(number, 1.0, group="x") for number in range(1, 20)], rated(20, -1.0, group="x")]
    assert [choice.episode_id for choice in decide_now(view(group), GROUPS).batch] == [1, 2, 3, 4, 5, 6, 7, 20]


def test_single_ratings_count_as_soon_as_another_objective_takes_them() -> None:
    for feed in ("rated", "thumbs"):
        rules = dataclasses.replace(RULES, feeds=frozenset({"groups", feed}))
        assert decide_now(view(mixed(4)), rules).batch == tuple(mixed(4))


# --------------------------------------------------------------------------------------------------- what is unfit


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"base_sha256": "c" * 64}, "other_base"),
        ({"n_tokens": 0}, "empty"),
        ({"temperature": 0.0}, "greedy"),
        ({"top_p": 0.9}, "cut_support"),
        ({"top_k": 40}, "cut_support"),
        ({"shaped_by": "logit_bias"}, "shaped"),
        ({"shaped_by": "min_p response_format"}, "constrained"),
        ({"shaped_by": "response_format", "logprobs_complete": False}, "constrained"),
        ({"shaped_by": "response_format", "temperature": 0.0}, "greedy"),
        ({"logprobs_complete": False}, "no_logprobs"),
        ({"version": 1}, "stale"),
        ({"version": 2}, None),
    ],
)
def test_what_ppo_cannot_use_is_dropped_with_a_reason(changes: dict[str, Any], reason: str | None) -> None:
    assert plan.unfit(rated(1, **changes), view(), RULES) == reason


def test_a_choice_whose_adapter_is_gone_is_dropped() -> None:
    assert plan.unfit(rated(1, version=4), view(versions_on_disk=frozenset({0, 5})), RULES) == "adapter_gone"


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12))
def test_t_stale_1_an_answer_is_used_up_to_the_cap_and_not_one_version_older(
    newest: int, age: int, staleness: int
) -> None:
    version = max(0, newest - age)
    rules = dataclasses.replace(RULES, staleness=staleness)
    seen = view(ages=in_a_row(newest), versions_on_disk=frozenset(range(13)))
    expected = "stale" if newest - version > staleness else None
    assert plan.unfit(rated(1, version=version), seen, rules) == expected
    replayed = plan.replay([rated(1, version=version)], n_new=4, seed=1, view=seen, rules=rules)
    assert bool(replayed) == (expected is None)


@st.composite
def lineages(draw: st.DrawFn) -> tuple[dict[int, int | None], int]:
    """Published versions with gaps where numbers went to candidates, each made from an earlier one; and a live one."""
    parents: dict[int, int | None] = {0: None}
    for version in sorted(draw(st.sets(st.integers(1, 40), max_size=12))):
        parents[version] = draw(st.sampled_from([*sorted(parents), None]))
    return parents, draw(st.sampled_from(sorted(parents)))


@given(lineages(), st.integers(0, 8))
def test_a_rating_on_an_answer_of_the_live_version_is_never_stale_whatever_happened_before(
    lineage: tuple[dict[int, int | None], int], staleness: int
) -> None:
    parents, live = lineage
    seen = view(ages=ages(parents, live), versions_on_disk=frozenset(parents))
    rules = dataclasses.replace(RULES, staleness=staleness)
    choices = [rated(number, 1.0 if number % 2 else -1.0, version=live) for number in range(1, 5)]
    decision = decide_now(dataclasses.replace(seen, unused=choices), rules)
    assert (decision.batch, decision.drops) == (tuple(choices), ())


@given(lineages(), st.integers(0, 8), st.integers(0, 40))
def test_only_what_learning_has_gone_past_is_dropped_and_the_rest_waits_for_its_version(
    lineage: tuple[dict[int, int | None], int], staleness: int, version: int
) -> None:
    parents, live = lineage
    seen = view([rated(1, version=version)], ages=ages(parents, live), versions_on_disk=frozenset(range(41)))
    rules = dataclasses.replace(RULES, staleness=staleness)
    decision = decide_now(seen, rules)
    if decision.drops:
        assert version in seen.ages.behind
        assert seen.ages.steps[version] > staleness
    for paused in ({"paused": True}, {"pinned": True}):
        assert decide_now(dataclasses.replace(seen, **paused), rules).drops == ()
    if version in parents:
        promoted = dataclasses.replace(seen, ages=ages(parents, version))
        assert plan.unfit(rated(1, version=version), promoted, rules) is None


def test_ratings_that_wait_for_their_version_are_told_and_nothing_hides_behind_them() -> None:
    waiting = [rated(number, 1.0 if number % 2 else -1.0, version=7) for number in range(1, 9)]
    seen = view(waiting, ages=ages({**{n: n - 1 for n in range(1, 8)}}, 1), versions_on_disk=frozenset(range(8)))
    decision = decide_now(seen)
    assert (decision.state, decision.why) == ("idle", "8 rated answers wait: their version is far from the live one")
    assert not plan.sees_enough(seen, RULES)
    fresh = [rated(number, 1.0 if number % 2 else -1.0, version=1) for number in range(11, 19)]
    both = dataclasses.replace(seen, unused=[*waiting, *fresh])
    assert decide_now(both).batch == tuple(fresh)
    assert plan.sees_enough(both, RULES)


def test_what_is_dropped_does_not_count_towards_a_batch() -> None:
    choices = [*mixed(3), rated(4, temperature=0.0)]
    decision = decide_now(view(choices))
    assert (decision.batch, decision.ratings_until_update) == ((), 1)
    assert decision.drops == ((choices[3], "greedy"),)


# ---------------------------------------------------------------------------------------------------------- always

CHOICES = st.builds(
    rated,
    number=st.just(0),
    rating=st.sampled_from([-1.0, -0.5, 0.0, 1.0]),
    version=st.sampled_from([5, 5, 5, 4, 3, 2, 1, 0]),
    temperature=st.sampled_from([0.7] * 9 + [0.0]),
    top_k=st.sampled_from([0] * 9 + [40]),
    n_tokens=st.sampled_from([30] * 9 + [0]),
    logprobs_complete=st.sampled_from([True] * 9 + [False]),
    group=st.sampled_from("abcdefgh"),
)


@st.composite
def views(draw: st.DrawFn) -> View:
    choices = draw(st.lists(CHOICES, max_size=40))
    unused = [
        dataclasses.replace(choice, episode_id=n, feedback_id=f"fb-{n}", rated_at=1000.0 + n)
        for n, choice in enumerate(choices)
    ]
    return view(
        unused,
        ages=dataclasses.replace(in_a_row(draw(st.integers(5, 7))), behind=draw(st.frozensets(st.integers(0, 7)))),
        versions_on_disk=frozenset(range(8)) - draw(st.frozensets(st.integers(1, 7), max_size=2)),
        reference=draw(st.sampled_from([0, 0, 0, 7])),
        paused=draw(st.sampled_from([False, False, True])),
        pinned=draw(st.sampled_from([False, False, True])),
        asked=draw(st.booleans()),
    )


RULE_SETS = st.builds(
    Rules,
    batch_ratings=st.sampled_from([1, 2, 4, 8, 16]),
    max_wait_s=st.integers(0, 100).map(float),
    max_batch=st.sampled_from([2, 3, 8, 16]),
    replay_ratio=st.floats(0, 3),
    staleness=st.integers(0, 8),
)
NOWS = st.integers(1000, 1200).map(float)


@settings(deadline=None, max_examples=300)
@given(views(), NOWS, RULE_SETS)
def test_a_decision_keeps_its_promises(seen: View, now: float, rules: Rules) -> None:
    decision = decide(seen, now, rules)
    dropped = {choice.episode_id for choice, _ in decision.drops}
    taken = [choice.episode_id for choice in decision.batch]
    usable = [choice for choice in seen.unused if plan.unfit(choice, seen, rules) is None]
    # Every unused rating is usable, waits for its version or is dropped; only usable ones are trained on, once.
    assert dropped.isdisjoint(taken)
    others = [choice.episode_id for choice in seen.unused if choice not in usable]
    waits = {choice.episode_id for choice in seen.unused if plan.unfit(choice, seen, rules) == "aside"}
    assert sorted(dropped) == ([] if decision.state == "paused" else [one for one in others if one not in waits])
    assert len(set(taken)) == len(taken)
    assert taken == sorted(taken)
    assert set(decision.batch) <= set(usable)
    if decision.batch:
        assert 2 <= len(decision.batch) <= rules.max_batch
        assert plan.has_contrast(decision.batch, rules)
        assert usable[0] in decision.batch  # the oldest never waits behind newer ones
        assert (decision.state, decision.want_trainer) == ("training", True)
        assert not seen.paused
        assert not seen.pinned
    else:
        assert decision.state != "training"
    assert 0 <= decision.ratings_until_update <= rules.batch_ratings


@settings(deadline=None, max_examples=300)
@given(views(), NOWS, RULE_SETS, st.booleans())
def test_where_groups_are_compared_every_batch_can_be_learned_from(
    seen: View, now: float, rules: Rules, thumbs: bool
) -> None:
    rules = dataclasses.replace(rules, feeds=frozenset({"groups", "thumbs"} if thumbs else {"groups"}))
    decision = decide(seen, now, rules)
    by_group: dict[str, set[float]] = {}
    for choice in decision.batch:
        if plan.unfit_for_policy(choice, seen, rules) is None:
            by_group.setdefault(choice.group, set()).add(choice.rating)
    alone = [c for c in decision.batch if c.group not in by_group or len(by_group[c.group]) < 2]
    if thumbs:
        others = [*alone, *[c for c in decision.batch if plan.unfit_for_policy(c, seen, rules) is not None]]
        ratings = [choice.rating for choice in others]
        assert not others or min(ratings) < 0.0 < max(ratings)
    else:
        assert not alone
    assert len(decision.batch) <= rules.max_batch
    assert len(decision.batch) != 1


@settings(deadline=None, max_examples=300)
@given(views(), NOWS, RULE_SETS, st.sampled_from([0.3, 1.0]))
def test_what_only_kto_can_take_is_trained_on_with_both_kinds_and_the_rest_with_contrast(
    seen: View, now: float, rules: Rules, clip: float
) -> None:
    rules = dataclasses.replace(rules, feeds=frozenset({"rated", "thumbs"}), reward_clip=clip)
    decision = decide(seen, now, rules)
    fit = [one.rating for one in decision.batch if plan.unfit_for_policy(one, seen, rules) is None]
    others = [one.rating for one in decision.batch if plan.unfit_for_policy(one, seen, rules) is not None]
    assert not others or min(others) < 0.0 < max(others)
    assert not fit or len({max(-clip, min(clip, rating)) for rating in fit}) > 1
    assert len(decision.batch) <= rules.max_batch
    if decision.state == "waiting_for_contrast":
        usable = [one for one in seen.unused if plan.unfit(one, seen, rules) is None]
        assert not plan.comparable(usable, seen, rules)


BESIDE_KTO = dataclasses.replace(RULES, feeds=frozenset({"rated", "thumbs"}))


def test_answers_that_only_kto_can_take_wait_for_both_kinds_among_them() -> None:
    liked = [rated(number, 1.0 if number % 2 else 0.5, temperature=0.0) for number in range(1, 5)]
    waiting = decide_now(view(liked), BESIDE_KTO)
    assert (waiting.state, waiting.batch, waiting.drops) == ("waiting_for_contrast", (), ())
    beside = [*[rated(number) for number in range(1, 4)], rated(4, -1.0, temperature=0.0)]
    assert decide_now(view(beside), BESIDE_KTO).batch == ()
    with_both = [*liked, rated(5, -1.0, temperature=0.0)]
    assert decide_now(view(with_both), BESIDE_KTO).batch == tuple(with_both)


def test_a_few_that_wait_for_their_kind_neither_hold_the_others_up_nor_count() -> None:
    lonely = [rated(number, temperature=0.0) for number in range(1, 4)]
    three = decide_now(view([*lonely, *mixed(3, first=4)]), BESIDE_KTO)
    assert (three.state, three.ratings_until_update) == ("collecting", 1)
    assert three.why.endswith("3 rated answers wait: those that only KTO can take, or all others, are rated alike")
    four = mixed(4, first=4)
    assert decide_now(view([*lonely, *four]), BESIDE_KTO).batch == tuple(four)


def test_replay_takes_whole_groups_where_groups_are_compared() -> None:
    rules = dataclasses.replace(RULES, max_batch=64, feeds=frozenset({"groups"}))
    used = [rated(number, 1.0 if number % 4 == 0 else -1.0, group=f"g{number // 4}") for number in range(256)]
    used += [rated(number, group=f"alone{number}") for number in range(256, 300)]
    replayed = plan.replay(used, n_new=18, seed=3, view=view(), rules=rules)
    assert len(replayed) == 8, "nine are wanted, and two groups of four fit"
    assert {len([one for one in replayed if one.group == choice.group]) for choice in replayed} == {4}
    assert len({plan.replay(used, n_new=18, seed=seed, view=view(), rules=rules) for seed in range(5)}) > 1
    assert plan.replay(used, n_new=6, seed=3, view=view(), rules=rules) == ()
    beside_kto = dataclasses.replace(rules, feeds=frozenset({"groups", "thumbs"}))
    mixed_in = plan.replay(used, n_new=18, seed=3, view=view(), rules=beside_kto)
    assert len(mixed_in) == 9
    for choice in mixed_in:
        assert len([one for one in mixed_in if one.group == choice.group]) in (1, 4)


@settings(deadline=None, max_examples=200)
@given(views(), NOWS, RULE_SETS)
def test_only_time_or_new_ratings_change_a_decision(seen: View, now: float, rules: Rules) -> None:
    decision = decide(seen, now, rules)
    assert decide(seen, now, rules) == decision
    later = decide(seen, now + 10_000.0, rules)
    if decision.wake_at is None:
        assert later == decision
    else:
        assert decision.wake_at > now
        assert decide(seen, decision.wake_at, rules).state != "collecting"


@settings(deadline=None, max_examples=200)
@given(views(), st.integers(2, 20), st.integers(0, 2**31), RULE_SETS)
def test_replay_takes_old_choices_within_its_share_by_seed(seen: View, n_new: int, seed: int, rules: Rules) -> None:
    used = [dataclasses.replace(choice, used_by=1) for choice in seen.unused]
    replayed = plan.replay(used, n_new=n_new, seed=seed, view=seen, rules=rules)
    assert plan.replay(used, n_new=n_new, seed=seed, view=seen, rules=rules) == replayed
    fit = [choice for choice in used if plan.unfit(choice, seen, rules) is None]
    assert len(replayed) == max(0, min(len(fit), int(rules.replay_ratio * n_new), rules.max_batch - n_new))
    assert [choice for choice in fit if choice in replayed] == list(replayed)
    assert len({choice.episode_id for choice in replayed}) == len(replayed)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.lists(st.sampled_from([-1.0, -0.5, 1.0]), min_size=1, max_size=6), min_size=1, max_size=6),
    RULE_SETS,
    st.integers(0, 1000),
)
def test_every_kept_rating_is_new_in_exactly_one_update_and_only_then_replayed(
    arrivals: list[list[float]], rules: Rules, seed: int
) -> None:
    """Ratings come in bursts, updates are made of them as the learner does, every version is published at once."""
    waiting = [list(ratings) for ratings in arrivals]
    unused: list[RatedChoice] = []
    used: list[RatedChoice] = []  # newest first, as the store gives them
    used_by: dict[int, int] = {}
    version = n = 0
    while True:
        for rating in waiting.pop(0) if waiting else ():
            n += 1
            unused.append(rated(n, rating, version=version, rated_at=1000.0 + n))
        seen = view(unused, ages=in_a_row(version), versions_on_disk=frozenset(range(version + 1)))
        decision = decide(seen, 1e6, rules)
        gone = {choice.episode_id for choice, _ in decision.drops}
        assert all(version - choice.version > rules.staleness for choice, _ in decision.drops)
        if decision.makes_update:
            replayed = plan.replay(used, n_new=len(decision.batch), seed=seed, view=seen, rules=rules)
            batch = {choice.episode_id for choice in decision.batch}
            assert batch.isdisjoint(used_by)
            assert {choice.episode_id for choice in replayed} <= set(used_by)
            assert len(batch) + len(replayed) <= rules.max_batch
            assert all(version - choice.version <= rules.staleness for choice in (*decision.batch, *replayed))
            version += 1
            used_by |= dict.fromkeys(batch, version)
            used = [*decision.batch, *used]
            gone |= batch
        unused = [choice for choice in unused if choice.episode_id not in gone]
        if not waiting and not decision.makes_update:
            break
    assert not plan.has_contrast(unused, rules), "what is left of the kept ones has nothing to be compared with"


def test_another_seed_draws_another_replay() -> None:
    used = mixed(40)
    rules = dataclasses.replace(RULES, max_batch=64)
    drawn = {plan.replay(used, n_new=10, seed=seed, view=view(), rules=rules) for seed in range(5)}
    assert len(drawn) == 5


# -------------------------------------------------------------------------------------------- pairs and corrections

ALL = dataclasses.replace(RULES, feeds=frozenset({"rated", "thumbs", "pairs", "corrections"}))


def wrote(number: int, kind: Any = "pair", **changes: Any) -> Written:
    values: dict[str, Any] = {"written_at": 1000.0 + number, "differs": True, "used_by": None}
    return Written(id=number, kind=kind, **{**values, **changes})


def test_pairs_join_the_next_update() -> None:
    decision = decide_now(view(mixed(4), written=[wrote(1), wrote(2, "correction")]), ALL)
    assert ([one.id for one in decision.written], len(decision.batch)) == ([1, 2], 4)
    assert decision.why == "4 new ratings, 2 new pairs and corrections"


def test_a_pair_alone_waits_for_ratings_or_for_its_time() -> None:
    seen = view(written=[wrote(1)])
    decision = decide_now(seen, ALL)
    assert (decision.state, decision.makes_update, decision.wake_at) == ("collecting", False, 1901.0)
    assert [one.id for one in decide_now(seen, ALL, now=1901.0).written] == [1]
    assert [one.id for one in decide_now(dataclasses.replace(seen, asked=True), ALL).written] == [1]


def test_ratings_without_contrast_do_not_hold_up_a_pair() -> None:
    seen = view([rated(number) for number in range(1, 7)], written=[wrote(1)])
    waiting = decide_now(seen, ALL)
    assert (waiting.state, waiting.wake_at) == ("waiting_for_contrast", 1901.0)
    decision = decide_now(seen, ALL, now=1901.0)
    assert (decision.batch, [one.id for one in decision.written]) == ((), [1])


@pytest.mark.parametrize(
    ("written", "feeds", "is_used"),
    [
        (wrote(1), {"rated"}, False),
        (wrote(1), {"pairs"}, True),
        (wrote(1), {"corrections"}, False),
        (wrote(1, "correction"), {"pairs"}, True),
        (wrote(1, "correction", differs=False), {"pairs"}, False),
        (wrote(1, "correction", differs=False), {"corrections"}, True),
    ],
)
def test_what_was_written_waits_for_an_objective_that_feeds_on_it(written: Written, feeds: Any, is_used: bool) -> None:
    rules = dataclasses.replace(RULES, feeds=frozenset(feeds))
    decision = decide_now(view(written=[written], asked=True), rules)
    assert decision.makes_update is is_used


@pytest.mark.parametrize(
    "changes", [{"temperature": 0.0}, {"top_p": 0.9}, {"logprobs_complete": False}, {"version": 1}, {"version": 9}]
)
def test_kto_takes_what_a_policy_gradient_cannot(changes: dict[str, Any]) -> None:
    choices = [*mixed(4), rated(5, -1.0, **changes), rated(6, 1.0, **changes)]
    assert decide_now(view(choices), ALL).batch == tuple(choices)
    assert plan.unfit_for_policy(choices[4], view(), ALL) is not None


def test_kto_cannot_use_an_empty_answer_either() -> None:
    assert decide_now(view([rated(1, n_tokens=0)]), ALL).drops == ((rated(1, n_tokens=0), "empty"),)


def test_ratings_wait_while_no_objective_feeds_on_them() -> None:
    rules = dataclasses.replace(RULES, feeds=frozenset({"pairs"}))
    decision = decide_now(view([*mixed(8), rated(9, temperature=0.0)], written=[wrote(1)], asked=True), rules)
    assert (decision.batch, decision.drops, [one.id for one in decision.written]) == ((), (), [1])


WRITTEN = st.lists(
    st.builds(wrote, number=st.just(0), kind=st.sampled_from(["pair", "correction"]), differs=st.booleans()),
    max_size=30,
).map(lambda many: [dataclasses.replace(one, id=n + 1, written_at=1000.0 + n) for n, one in enumerate(many)])
FEEDS = st.frozensets(st.sampled_from(["rated", "groups", "thumbs", "pairs", "corrections"]), min_size=1)


@settings(deadline=None, max_examples=300)
@given(views(), WRITTEN, FEEDS, NOWS, RULE_SETS)
def test_every_rating_pair_and_correction_is_used_once_its_time_has_come(
    seen: View, written: list[Written], feeds: Any, now: float, rules: Rules
) -> None:
    """Update after update, as the store would show them, until nothing more is due."""
    rules = dataclasses.replace(rules, feeds=feeds)
    seen = dataclasses.replace(seen, written=written, paused=False, pinned=False, reference=0)
    used: list[int] = []
    late = now + 10_000.0
    while (decision := decide(seen, late, rules)).makes_update:
        assert len(decision.written) <= rules.written_max
        used += [one.id for one in decision.written]
        gone = {choice.episode_id for choice in (*decision.batch, *[choice for choice, _ in decision.drops])}
        seen = dataclasses.replace(
            seen,
            unused=[choice for choice in seen.unused if choice.episode_id not in gone],
            written=[one for one in seen.written if one.id not in used],
        )
    assert used == [one.id for one in written if plan.is_used(one, rules)]
    left = [choice for choice in seen.unused if plan.unfit(choice, seen, rules) is None]
    takes_ratings = bool(feeds & {"rated", "groups", "thumbs"})
    assert not takes_ratings or not plan.comparable(left, seen, rules)
    assert decision.wake_at is None


@settings(deadline=None, max_examples=100)
@given(WRITTEN, st.integers(0, 20), st.integers(0, 2**31), RULE_SETS)
def test_written_answers_are_replayed_within_their_share_by_seed(
    written: list[Written], n_new: int, seed: int, rules: Rules
) -> None:
    rules = dataclasses.replace(rules, feeds=frozenset({"pairs"}))
    again = plan.replay_written(written, n_new=n_new, seed=seed, rules=rules)
    assert again == plan.replay_written(written, n_new=n_new, seed=seed, rules=rules)
    assert len(again) <= max(0, min(int(rules.replay_ratio * n_new), rules.written_max - n_new))
    assert all(plan.is_used(one, rules) for one in again)
