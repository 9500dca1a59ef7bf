"""When the box practises: never in anybody's way, one thing at a time, and never for long without people."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.learn import plan, practice
from edged.learn.ages import ages
from edged.learn.practice import (
    FRUITLESS_MAX,
    Blocked,
    Changed,
    Count,
    Done,
    Interrupt,
    Judge,
    Prepare,
    Rated,
    Rest,
    Rules,
    Sample,
    State,
    Tick,
    Train,
    Users,
    describe,
    draw,
    hindrance,
    pick,
    step,
    wake_at,
)
from edged.records import JudgedAnswer, PracticeCounts, RatedChoice

RULES = Rules(off="", idle_s=30.0, round_prompts=4, updates_max=3)
ASKED = PracticeCounts(prompts=9)
BEGINS = (Count, Prepare, Sample, Judge, Train)


def after(*events: tuple[float, practice.Event], rules: Rules = RULES) -> tuple[State, list[practice.Action]]:
    """The state and all actions after events at these times."""
    state = State()
    actions: list[practice.Action] = []
    for now, event in events:
        state, new = step(state, event, now, rules)
        actions += new
    return state, actions


def test_a_round_is_counted_prepared_sampled_judged_and_trained() -> None:
    state, actions = after(
        (30.0, Tick()),
        (31.0, Done(ASKED)),
        (32.0, Done(ASKED)),
        (40.0, Done(dataclasses.replace(ASKED, unjudged=16, groups=4))),
        (45.0, Done(dataclasses.replace(ASKED, judged=16, groups=4))),
        (60.0, Done(dataclasses.replace(ASKED, in_a_row=1))),
        (89.9, Tick()),
        (90.0, Tick()),
    )
    assert actions == [Count(), Prepare(), Sample(4, fresh=True), Judge(), Train(), Prepare()]
    assert describe(state, 90.0, RULES) == ("preparing", "")


def test_nothing_begins_before_the_box_was_idle_for_the_whole_time() -> None:
    events: list[tuple[float, practice.Event]] = [
        (10.0, Users(1)),
        (20.0, Users(0)),
        (40.0, Blocked("an update is under way")),
        (45.0, Blocked("")),
    ]
    state, actions = after(*events, (74.9, Tick()))
    assert actions == []
    assert wake_at(state, 74.9, RULES) == 75.0
    assert describe(state, 74.9, RULES) == ("waiting", "for the box to be idle")
    assert step(state, Tick(), 75.0, RULES)[1] == (Count(),)


def test_a_request_interrupts_sampling_at_once_and_once_and_the_round_goes_on_later() -> None:
    sampling: list[tuple[float, practice.Event]] = [(30.0, Tick()), (30.0, Done(ASKED)), (30.0, Done(ASKED))]
    state, actions = after(*sampling, (35.0, Users(1)), (36.0, Users(2)), (37.0, Users(0)))
    assert actions[3:] == [Interrupt()]
    state, new = step(state, Done(dataclasses.replace(ASKED, unjudged=4, groups=1)), 38.0, RULES)
    assert new == ()
    assert step(state, Tick(), 67.0, RULES)[1] == (Sample(3, fresh=False),)


def test_prompts_that_turn_out_to_be_the_same_make_a_smaller_round() -> None:
    fewer = dataclasses.replace(ASKED, unjudged=8, groups=2)
    _, actions = after((30.0, Tick()), (30.0, Done(ASKED)), (30.0, Done(ASKED)), (40.0, Done(fewer)))
    assert actions[-1] == Judge()


def test_a_crash_between_judging_and_training_costs_nothing_and_between_sampling_and_judging_neither() -> None:
    _, actions = after((30.0, Tick()), (30.0, Done(dataclasses.replace(ASKED, judged=8, groups=2))))
    assert actions == [Count(), Train()]
    half = dataclasses.replace(ASKED, judged=8, unjudged=8, groups=4)
    _, actions = after((30.0, Tick()), (30.0, Done(half)), (30.0, Done(half)))
    assert actions == [Count(), Prepare(), Judge()]


def test_it_waits_for_a_person_after_so_many_updates_in_a_row() -> None:
    state, actions = after((30.0, Tick()), (30.0, Done(dataclasses.replace(ASKED, in_a_row=3))), (9000.0, Tick()))
    assert actions == [Count(), Rest()]
    assert describe(state, 9000.0, RULES)[0] == "limit"
    state, new = step(state, Rated(), 9000.0, RULES)
    assert new == (Count(),)
    assert step(state, Done(ASKED), 9000.0, RULES)[1] == (Prepare(),)


@pytest.mark.parametrize("freed", [Rated(), Changed()])
def test_rounds_that_teach_nothing_end_after_so_many_in_a_row_until_somebody_rates_or_changes_the_settings(
    freed: practice.Event,
) -> None:
    def a_round(state: State, now: float, updates: int) -> tuple[State, float]:
        """From idle to the end of training, after which so many updates were made in all."""
        ends = [dataclasses.replace(ASKED, unjudged=16, groups=4), dataclasses.replace(ASKED, judged=16, groups=4)]
        state, begun = step(state, Tick(), now, RULES)
        for counts in [*([ASKED] if begun == (Count(),) else []), ASKED, *ends, ASKED]:
            state, _ = step(state, Done(dataclasses.replace(counts, updates=updates)), now, RULES)
        return state, now + RULES.idle_s

    state, now = State(), 30.0
    for _ in range(FRUITLESS_MAX - 1):
        state, now = a_round(state, now, 0)
    trained = dataclasses.replace(state, doing="training", counts=ASKED)
    assert step(trained, Done(dataclasses.replace(ASKED, updates=1)), now, RULES)[0].fruitless == 0
    state, now = a_round(state, now, 0)
    assert step(state, Tick(), now + 1e6, RULES)[1] == ()
    assert describe(state, now, RULES)[0] == "limit"
    assert describe(state, now, RULES)[1].startswith("16 rounds in a row had no rewards to learn from")
    assert step(state, freed, now, RULES)[1] == (Count(),)


def test_what_fails_rests_the_judge_and_is_left_alone_for_a_time_that_doubles_until_somebody_rates() -> None:
    state, actions = after((30.0, Tick()), (30.0, Done(ASKED)), (30.0, Done(ASKED, "the judge cannot start")))
    assert actions == [Count(), Prepare(), Rest()]
    assert wake_at(state, 31.0, RULES) == 90.0
    assert describe(state, 31.0, RULES)[1] == "the judge cannot start; it is tried again later"
    state, new = step(state, Tick(), 90.0, RULES)
    assert new == (Prepare(),)
    state, _ = step(state, Done(ASKED, "the judge cannot start"), 90.0, RULES)
    assert wake_at(state, 91.0, RULES) == 90.0 + 120.0
    assert step(state, Rated(), 92.0, RULES)[1] == (Count(),)


def test_without_prompts_nothing_is_sampled_and_a_file_of_the_operator_is_enough() -> None:
    state, actions = after((30.0, Tick()), (30.0, Done(PracticeCounts())))
    assert actions == [Count()]
    assert describe(state, 31.0, RULES) == ("waiting", "there are no prompts yet")
    assert step(state, Changed(), 31.0, RULES)[1] == (Count(),)
    few = dataclasses.replace(RULES, prompts=2)
    _, actions = after((30.0, Tick()), (30.0, Done(PracticeCounts())), (30.0, Done(PracticeCounts())), rules=few)
    assert actions[-1] == Sample(2, fresh=True)


def test_practice_that_is_off_does_nothing_and_says_why() -> None:
    off = dataclasses.replace(RULES, off="reward.source is feedback")
    state, actions = after((30.0, Tick()), (90.0, Users(1)), (91.0, Users(0)), (900.0, Tick()), rules=off)
    assert actions == []
    assert wake_at(state, 900.0, off) is None
    assert describe(state, 900.0, off) == ("off", "reward.source is feedback")


def test_something_that_ends_without_having_begun_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="nothing was under way"):
        step(State(), Done(ASKED), 0.0, RULES)


counts = st.builds(
    PracticeCounts,
    unjudged=st.integers(0, 8),
    judged=st.integers(0, 8),
    groups=st.integers(0, 5),
    prompts=st.integers(0, 6),
    in_a_row=st.integers(0, 4),
)
others = st.one_of(
    st.builds(Users, st.integers(0, 2)),
    st.builds(Blocked, st.sampled_from(["", "an update is under way"])),
    st.just(Rated()),
    st.just(Changed()),
    st.just(Tick()),
)
ends = st.builds(Done, counts, st.sampled_from(["", "", "", "it failed"]))


@given(st.data(), st.lists(st.tuples(st.floats(0.0, 40.0), st.booleans()), max_size=40))
def test_whatever_happens_it_does_one_thing_at_a_time_and_only_while_nobody_needs_the_box(
    data: st.DataObject, course: list[tuple[float, bool]]
) -> None:
    state, now, interrupted = State(), 0.0, 0
    for wait_s, wants_end in course:
        now += wait_s
        event = data.draw(ends if state.doing and wants_end else others)
        before = state
        state, actions = step(state, event, now, RULES)
        begun = [action for action in actions if isinstance(action, BEGINS)]
        assert len(begun) <= 1
        assert collections.Counter(map(type, actions))[Interrupt] <= 1
        if begun:
            assert not before.doing or isinstance(event, Done)
            assert (state.users, state.blocked) == (0, "")
            assert now >= max(state.quiet_since + RULES.idle_s, state.held_until)
            if not isinstance(begun[0], Count):
                assert state.counts is not None
                assert state.counts.in_a_row < RULES.updates_max
        if Interrupt() in actions:
            assert before.doing == "sampling"
            assert not before.leaving
        if before.doing == "sampling" and state.doing == "sampling" and (state.users or state.blocked):
            assert state.leaving
        due = wake_at(state, now, RULES)
        assert due is None or (due > now and not state.doing)
        if due is None and not state.doing:
            assert step(state, Tick(), now + 1e6, RULES)[1] == ()
        describe(state, now, RULES)
        interrupted += Interrupt() in actions


# --------------------------------------------------------------------------------------------------- what makes a round


def test_prompts_are_drawn_by_the_seed_each_at_most_once() -> None:
    prompts = tuple("abcdefgh")
    assert draw(prompts, 3, 1) == draw(prompts, 3, 1)
    assert len({draw(prompts, 3, seed) for seed in range(20)}) > 10
    assert sorted(draw(prompts, 99, 5)) == list(prompts)
    assert draw((), 3, 1) == ()


@pytest.mark.parametrize(
    ("state", "due", "why"),
    [
        ("idle", False, ""),
        ("collecting", False, ""),
        ("waiting_for_contrast", False, ""),
        ("collecting", True, "ratings wait for their update (w)"),
        ("waiting_for_contrast", True, "ratings wait for their update (w)"),
        ("training", False, "the learner is training (w)"),
        ("gating", True, "the learner is gating (w)"),
        ("paused", False, "the learner is paused (w)"),
    ],
)
def test_ratings_that_make_an_update_go_before_practice(state: Any, due: bool, why: str) -> None:
    assert hindrance(state, "w", due=due) == why


def judged(rewards: str, group: str = "g", first: int = 1, **changes: Any) -> list[JudgedAnswer]:
    """Answers of one group; "+" and "-" are their rewards."""
    return [
        JudgedAnswer(
            choice=RatedChoice(
                **{
                    "episode_id": first + number,
                    "feedback_id": "",
                    "rating": 1.0 if sign == "+" else -1.0,
                    "rated_at": 1.0,
                    "version": 3,
                    "base_sha256": "b",
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "top_k": 0,
                    "n_tokens": 5,
                    "logprobs_complete": True,
                    "used_by": None,
                    "group": group,
                    **changes,
                }
            ),
            answers_to=group,
        )
        for number, sign in enumerate(rewards)
    ]


VIEW = plan.View(
    unused=(),
    base_sha256="b",
    ages=ages({version: version - 1 for version in range(1, 6)}, 5),
    versions_on_disk=frozenset({0, 2, 3}),
    reference=0,
    paused=False,
    pinned=False,
    asked=False,
)
GROUPS = plan.Rules(
    batch_ratings=16, max_wait_s=1.0, max_batch=8, replay_ratio=0.0, staleness=2, feeds=frozenset({"groups"})
)
SINGLE = dataclasses.replace(GROUPS, feeds=frozenset({"rated"}))


def picked(answers: list[JudgedAnswer], rules: plan.Rules) -> tuple[list[int], dict[str, int]]:
    found = pick(answers, VIEW, rules)
    return [choice.episode_id for choice in found.batch], dict(collections.Counter(why for _, why in found.skipped))


def test_groups_of_one_and_of_equal_rewards_are_skipped_where_groups_are_compared() -> None:
    answers = judged("+-", "a", 1) + judged("+", "b", 10) + judged("--", "c", 20) + judged("-+", "d", 30)
    assert picked(answers, GROUPS) == ([1, 2, 30, 31], {"group_of_one": 1, "equal_rewards": 2})


def test_single_answers_need_contrast_in_the_batch_only() -> None:
    answers = judged("++", "a", 1) + judged("-", "b", 10)
    assert picked(answers, SINGLE) == ([1, 2, 10], {})
    assert picked(judged("++", "a", 1), SINGLE) == ([], {"equal_rewards": 2})
    assert picked(judged("+", "a", 1), SINGLE) == ([], {"group_of_one": 1})


def test_what_a_policy_gradient_cannot_use_is_skipped_and_whole_groups_that_do_not_fit_wait() -> None:
    stale, gone = judged("+-", "a", 1, version=2), judged("+-", "b", 10, version=4)
    assert picked(stale + gone, GROUPS) == ([], {"stale": 2, "adapter_gone": 2})
    answers = judged("+-+-+", "a", 1) + judged("+-+-", "b", 10) + judged("+-", "c", 20)
    assert picked(answers, GROUPS) == ([1, 2, 3, 4, 5, 20, 21], {})
    assert picked(judged("+-+-+-+-+-", "a", 1), GROUPS) == ([1, 2, 3, 4, 5, 6, 7, 8], {})


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("+-"), st.integers(0, 4)), max_size=12), st.booleans()
)
def test_every_judged_answer_is_used_skipped_or_waits_and_a_batch_always_has_contrast(
    rows: list[tuple[str, str, int]], single: bool
) -> None:
    answers = [
        answer
        for number, (group, sign, version) in enumerate(rows)
        for answer in judged(sign, f"{group}{version}", number, version=version)
    ]
    rules = SINGLE if single else GROUPS
    found = pick(answers, VIEW, rules)
    used, skipped = {choice.episode_id for choice in found.batch}, {choice.episode_id for choice, _ in found.skipped}
    assert not used & skipped
    assert len(found.batch) <= rules.max_batch
    assert not found.batch or plan.has_contrast(found.batch, rules)
    assert used | skipped or not rows
