"""What the last updates say that somebody should look at."""

from __future__ import annotations

import pytest

from edged.learn.alarms import LOOK_BACK, alarms
from edged.records import Update


def update(**metrics: float) -> Update:
    return Update(
        id=1,
        state="finished",
        version=1,
        parent_version=0,
        seed=0,
        attempts=0,
        created_at=0.0,
        finished_at=1.0,
        verdict="published",
        reason=None,
        seconds={},
        metrics={name.replace("__", "/"): value for name, value in metrics.items()},
        new_episode_ids=(),
        replay_episode_ids=(),
    )


def cut(share: float, answers: float = 16.0) -> Update:
    return update(episodes__cut_share=share, episodes=answers)


def test_without_updates_nothing_is_wrong() -> None:
    assert alarms([]) == ()
    assert alarms([update()]) == ()


def test_a_trainer_that_dies_under_every_update_is_an_alarm_until_one_is_made() -> None:
    (alarm,) = alarms([update(trainer__deaths=3.0), update(trainer__deaths=3.0), update()])
    assert alarm.startswith("the trainer died 6 times, under every attempt at the last updates, and their ratings wait")
    assert alarms([update(), update(trainer__deaths=3.0)]) == ()


def test_t_mask_4_a_rising_share_of_answers_cut_by_their_length_is_an_alarm() -> None:
    (alarm,) = alarms([cut(0.5), *[cut(0.1)] * 8])
    assert alarm.startswith("50% of the last rated answers were cut off by their length limit, 10% before")


@pytest.mark.parametrize("last", [0.1, 0.125, 0.25, 0.0])
def test_t_mask_4_a_share_that_stays_or_falls_is_none(last: float) -> None:
    assert alarms([cut(last), *[cut(0.12)] * 8]) == ()


def test_t_mask_4_a_share_that_was_always_high_is_none_and_few_answers_prove_nothing() -> None:
    assert alarms([cut(0.9), *[cut(0.9)] * 8]) == ()
    assert alarms([cut(0.5, answers=2), *[cut(0.1, answers=2)] * 2]) == ()
    assert alarms([cut(0.04, answers=1000), *[cut(0.0, answers=1000)] * 8]) == (), "too small to mind"


def test_t_mask_4_only_the_updates_just_before_are_compared_with() -> None:
    assert alarms([cut(0.5), *[cut(0.5)] * (LOOK_BACK - 1), *[cut(0.0)] * 50]) == ()


def test_t_mask_4_replayed_answers_do_not_count() -> None:
    last = update(episodes__cut_share=0.5, episodes=18.0, episodes__replayed=16.0)
    assert alarms([last, *[cut(0.25)] * 2]) == (), "two new answers, of which one was cut"


def test_t_is_3_samples_of_policies_too_far_away_are_an_alarm() -> None:
    (alarm,) = alarms([update(dropped__low_effective_share=24.0)])
    assert "low_effective_share" in alarm
    assert alarms([update(), update(dropped__low_effective_share=24.0)]) == (), "it is over"


def test_engines_that_disagree_about_many_answers_are_an_alarm() -> None:
    (alarm,) = alarms([update(dropped__engine_mismatch=8.0, episodes=16.0)])
    assert "33% of the last batch" in alarm
    assert alarms([update(dropped__engine_mismatch=1.0, episodes=16.0)]) == ()
