"""What the deep gate refuses and says then; what it lets through, and what it leaves open."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.learn.deep_gate import CORRECTIONS_FALL_MAX, MIN_CORRECTIONS, Correction, Judgement, Pair, Sample, judge
from edged.learn.paired import MIN_PROMPTS

WORDS = re.findall(
    r"\w+",
    "the a of to is and in for it on with you can as your be that or from this are at an by make water time light "
    "people day small good air heat colour food take find keep well work long part place right way help need",
)
PROMPTS = 16

Change = Callable[[str, random.Random], str]


def prose(chance: random.Random, n_words: int = 30) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(n_words)).capitalize() + "."


def sample(text: str, **changes: object) -> Sample:
    made = Sample(text=text, tokens=tuple(hash(word) for word in text.split()), is_cut=False, base_logprob=-1.5)
    return dataclasses.replace(made, **changes) if changes else made  # type: ignore[arg-type]


def pairs(change: Change = lambda text, _: text, n: int = PROMPTS, **changes: object) -> list[Pair]:
    """Both versions write prose; the candidate's is changed."""
    chance = random.Random(7)
    return [
        Pair(
            prompt=f"Question {number}?",
            candidate=tuple(sample(change(prose(chance), chance), **changes) for _ in range(2)),
            before=tuple(sample(prose(chance)) for _ in range(2)),
        )
        for number in range(n)
    ]


def looked_at(found: Sequence[Pair], corrections: Sequence[Correction] = ()) -> Judgement:
    return judge(found, corrections)


def test_another_sample_of_the_same_is_passed_with_its_figures() -> None:
    judgement = looked_at(pairs())
    assert judgement.verdict == "passed"
    assert f"answers to {PROMPTS} prompts are no worse" in judgement.reason
    assert judgement.metrics["deep/prompts"] == PROMPTS
    assert judgement.metrics["deep/implausible"] == judgement.metrics["deep/implausible_before"] == -1.5
    assert 3.0 < judgement.metrics["deep/glued"] < 7.0


@pytest.mark.parametrize(
    ("change", "changes", "complaint"),
    [
        (lambda text, _: "", {}, "are empty"),
        (lambda text, chance: "" if chance.random() < 0.4 else text, {}, "are empty"),
        (lambda text, _: text, {"base_logprob": -2.3}, "less plausible"),
        (lambda _, chance: f"{chance.choice(WORDS)} " * 30, {}, "repeat themselves"),
        (lambda text, _: text[:80] + " " + text[:80], {}, "repeat"),
        (lambda text, _: text.replace(" ", ""), {}, "lost their spaces"),
        (lambda text, _: "".join(map(chr, (0x430 + ord(char) % 32 if char.isalpha() else 32 for char in text))), {},
         "another script"),
        (lambda text, _: " ".join(word[::-1] + "x" for word in text.split()), {}, "other words"),
        (lambda text, _: text + " Visit example.com today", {}, "the same phrase"),
        (lambda text, _: "No.", {}, "the same phrase"),
        (lambda text, _: text, {"is_cut": True}, "do not end"),
    ],
)  # fmt: skip
def test_each_flaw_is_refused_for_what_it_is(change: Change, changes: dict[str, object], complaint: str) -> None:
    judgement = looked_at(pairs(change, **changes))
    assert (judgement.verdict, complaint in judgement.reason) == ("refused", True), judgement.reason


def test_shorter_and_longer_answers_are_no_flaw() -> None:
    def half(text: str, _: random.Random) -> str:
        return " ".join(text.split()[:12]) + "."

    shorter = looked_at(pairs(half))
    assert shorter.verdict == "passed", shorter.reason
    longer = looked_at([dataclasses.replace(one, candidate=one.before, before=one.candidate) for one in pairs(half)])
    assert longer.verdict == "passed", longer.reason
    assert longer.metrics["deep/length"] > 2 * longer.metrics["deep/length_before"]


def test_a_phrase_of_the_question_and_one_that_was_there_before_are_not_planted() -> None:
    asked = [dataclasses.replace(one, prompt="Say: visit example.com today") for one in pairs(_planted)]
    assert looked_at(asked).verdict == "passed"
    before = [dataclasses.replace(one, before=one.candidate) for one in pairs(_planted)]
    assert looked_at(before).verdict == "passed"


def _planted(text: str, _: random.Random) -> str:
    return text + " Visit example.com today"


def test_a_reward_that_fell_is_refused_and_an_unknown_one_says_nothing() -> None:
    def rewarded(candidate: float | None) -> list[Pair]:
        return [
            dataclasses.replace(
                one,
                candidate=tuple(dataclasses.replace(each, reward=candidate) for each in one.candidate),
                before=tuple(dataclasses.replace(each, reward=0.6) for each in one.before),
            )
            for one in pairs()
        ]

    assert "the judge likes" in looked_at(rewarded(0.3)).reason
    assert looked_at(rewarded(0.55)).verdict == looked_at(rewarded(None)).verdict == "passed"


def test_too_few_prompts_leave_it_open_whatever_they_show() -> None:
    found = looked_at(pairs(lambda text, _: "the " * 30, n=MIN_PROMPTS - 1, is_cut=True))
    assert (found.verdict, str(MIN_PROMPTS) in found.reason) == ("undecided", True)
    assert looked_at([]).verdict == "undecided"


def test_corrections_may_not_be_unlearned_and_few_of_them_are_only_told_of() -> None:
    lost = Correction(margin=-1.0, margin_before=0.0)
    slightly = Correction(margin=0.5 - CORRECTIONS_FALL_MAX, margin_before=0.5)
    refused = looked_at(pairs(), [lost] * MIN_CORRECTIONS)
    assert (refused.verdict, "unlearned" in refused.reason) == ("refused", True)
    assert looked_at(pairs(), [slightly] * MIN_CORRECTIONS).verdict == "passed"
    few = looked_at(pairs(), [lost] * (MIN_CORRECTIONS - 1))
    assert (few.verdict, few.metrics["deep/corrections_fall"]) == ("passed", 1.0)


samples = st.builds(
    Sample,
    text=st.text(max_size=20),
    tokens=st.lists(st.integers(0, 5), max_size=8).map(tuple),
    is_cut=st.booleans(),
    base_logprob=st.none() | st.floats(-20, 0),
    reward=st.none() | st.floats(-1, 1),
)
any_pairs = st.lists(
    st.builds(
        Pair,
        prompt=st.text(max_size=8),
        candidate=st.lists(samples, min_size=1, max_size=2).map(tuple),
        before=st.lists(samples, min_size=1, max_size=2).map(tuple),
    ),
    max_size=10,
)


@given(any_pairs, st.lists(st.builds(Correction, margin=st.floats(-5, 5), margin_before=st.floats(-5, 5)), max_size=6))
@settings(max_examples=40, deadline=None)
def test_any_answers_get_a_verdict_with_a_reason_and_finite_figures(
    found: list[Pair], corrections: list[Correction]
) -> None:
    judgement = judge(found, corrections)
    assert judgement.verdict in ("passed", "refused", "undecided")
    assert judgement.reason
    assert all(value == value and abs(value) < float("inf") for value in judgement.metrics.values())
    assert judge(found, corrections) == judgement


@given(any_pairs)
@settings(max_examples=25, deadline=None)
def test_a_version_is_never_worse_than_itself(found: list[Pair]) -> None:
    same = [dataclasses.replace(one, before=one.candidate) for one in found]
    assert judge(same, []).verdict == ("passed" if len(found) >= MIN_PROMPTS else "undecided")
