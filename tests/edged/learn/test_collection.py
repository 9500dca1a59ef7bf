"""Which old versions go: never one that is in use, and of the others the newest and a few old ones stay."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from edged.learn.collection import DAY_S, Decision, Files, InUse, Rules, decide, describe

NOTHING = InUse(
    wanted=frozenset({0}),
    last_good=frozenset(),
    kept=frozenset(),
    references=frozenset(),
    in_updates=frozenset(),
    named=frozenset(),
)
ROOMY = 10**12

versions = st.integers(1, 30)
some = st.frozensets(versions, max_size=4)
in_use = st.builds(
    InUse,
    wanted=some,
    last_good=some,
    kept=some,
    references=some,
    in_updates=some,
    named=some,
)
rules = st.builds(Rules, keep_versions=st.integers(0, 12), min_free_bytes=st.integers(0, 500))


@st.composite
def on_disk(draw: st.DrawFn) -> list[Files]:
    """Versions on the disk: the higher the number, the younger."""
    numbers = sorted(draw(st.sets(versions)))
    ages = sorted((draw(st.floats(0.0, 400 * DAY_S)) for _ in numbers), reverse=True)
    sizes = [draw(st.integers(1, 100)) for _ in numbers]
    return [
        Files(version=version, n_bytes=n_bytes, age_s=age_s)
        for version, n_bytes, age_s in zip(numbers, sizes, ages, strict=True)
    ]


def made(*ages_in_days: float) -> list[Files]:
    """Versions 1, 2, ... of these ages, 10 bytes each."""
    return [Files(version=n, n_bytes=10, age_s=days * DAY_S) for n, days in enumerate(ages_in_days, start=1)]


@given(files=on_disk(), used=in_use, rules=rules, free_bytes=st.integers(0, 600))
def test_a_version_that_is_in_use_is_never_removed(
    files: list[Files], used: InUse, rules: Rules, free_bytes: int
) -> None:
    decision = decide(files, used, rules, free_bytes=free_bytes)
    protected = used.wanted | used.last_good | used.kept | used.references | used.in_updates | used.named
    assert not protected & set(decision.removed)
    assert not set(describe(used, files)) & set(decision.removed)
    assert set(decision.removed) <= {one.version for one in files}
    assert list(decision.removed) == sorted(set(decision.removed))


@given(files=on_disk(), used=in_use, rules=rules)
def test_with_room_on_the_disk_the_newest_stay_and_collecting_again_removes_nothing(
    files: list[Files], used: InUse, rules: Rules
) -> None:
    decision = decide(files, used, rules, free_bytes=ROOMY)
    free = [one.version for one in files if used.why(one.version) is None]
    newest = set(free[len(free) - min(rules.keep_versions, len(free)) :])
    assert not newest & set(decision.removed)
    assert not decision.is_short
    left = [one for one in files if one.version not in decision.removed]
    assert decide(left, used, rules, free_bytes=ROOMY) == Decision(removed=(), is_short=False)


@given(files=on_disk(), used=in_use, rules=rules, free_bytes=st.integers(0, 600))
def test_a_short_disk_gets_what_it_lacks_or_all_that_is_not_in_use(
    files: list[Files], used: InUse, rules: Rules, free_bytes: int
) -> None:
    decision = decide(files, used, rules, free_bytes=free_bytes)
    sizes = {one.version: one.n_bytes for one in files}
    freed = free_bytes + sum(sizes[version] for version in decision.removed)
    assert decision.is_short == (freed < rules.min_free_bytes)
    if decision.is_short:
        assert {one.version for one in files if used.why(one.version) is None} == set(decision.removed)
    roomy = decide(files, used, rules, free_bytes=ROOMY)
    assert set(roomy.removed) <= set(decision.removed)


def test_behind_the_newest_one_of_each_doubling_of_age_stays() -> None:
    files = made(40, 36, 20, 17, 9, 5, 3, 2.5, 1.5, 1.2, 0.5, 0.25)
    decision = decide(files, NOTHING, Rules(keep_versions=2, min_free_bytes=0), free_bytes=0)
    assert decision.removed == (2, 4, 8, 10)


def test_a_short_disk_loses_the_oldest_first_and_no_more_than_it_lacks() -> None:
    files = made(3, 2, 1, 0.5)
    rules = Rules(keep_versions=9, min_free_bytes=100)
    for free_bytes, removed, is_short in ((100, (), False), (85, (1, 2), False), (40, (1, 2, 3, 4), True)):
        assert decide(files, NOTHING, rules, free_bytes=free_bytes) == Decision(removed=removed, is_short=is_short)


def test_who_asks_is_told_why_a_version_is_in_use() -> None:
    used = dataclasses.replace(
        NOTHING,
        wanted=frozenset({6}),
        last_good=frozenset({5}),
        kept=frozenset({2}),
        references=frozenset({1}),
        in_updates=frozenset({3}),
        named=frozenset({6, 7}),
    )
    assert describe(used, made(*range(8, 1, -1))) == {
        1: "reference of learning",
        2: "kept",
        3: "an update needs it",
        5: "a rollback leads there",
        6: "live",
        7: "its answers may be trained on",
    }
