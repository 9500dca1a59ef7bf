"""What people read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edged.cli import show
from edged.cli.adapters import diff_text, version_text

cells = st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=8)


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(cells, min_size=n, max_size=n), min_size=1, max_size=5)))
def test_columns_hold_every_cell_and_end_no_line_with_spaces(rows: list[list[str]]) -> None:
    lines = show.columns(rows).split("\n")
    assert len(lines) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        assert line == line.rstrip()
        assert all(cell.rstrip() in line for cell in row)


def test_times_may_be_unix_seconds_rfc_3339_or_missing() -> None:
    assert show.when(None) == "-"
    assert show.when(1_700_000_000.0) == show.when("2023-11-14T22:13:20.000Z")


def test_an_update_reads_as_one_line_with_its_reason() -> None:
    update = {"id": 3, "verdict": "refused", "version": 3, "reason": "it stammers", "seconds": {"train": 2, "gate": 1}}
    assert show.update_text(update) == "#3 refused v3 in 3.0 s: it stammers"
    assert "in 4.5 s" in show.update_text({**update, "seconds": {"train": 2, "gate": 1, "total": 4.5}})


def test_a_status_of_an_older_daemon_is_shown_as_far_as_it_goes() -> None:
    assert "v0" in show.status_text({})


def test_a_status_tells_why_it_went_back_and_how_the_live_version_is_rated() -> None:
    adapter = {"version": 1, "reason": "version 2 was rated badly", "stage": "kept", "watch": {"why": "it stood"}}
    lines = show.status_text({"adapter": adapter}).splitlines()
    assert "- went back  version 2 was rated badly" in lines
    assert [line.split(None, 2)[1:] for line in lines if line.startswith("- kept")] == [["kept", "it stood"]]


def test_the_learner_shows_its_progress_and_what_it_waits_for() -> None:
    learner = {"state": "training", "updates_total": 2, "progress": {"stage": "epoch", "done": 1, "total": 2}}
    assert show.learner_text(learner) == "training (epoch 1/2), 2 updates"
    waiting = {"state": "waiting_for_contrast", "updates_total": 0, "ratings_until_update": 4}
    assert show.learner_text(waiting) == "waiting for contrast, 0 updates, 4 more ratings until the next update"


def test_the_wait_for_a_first_token_is_shown_with_what_training_costs_it() -> None:
    known = {"idle_s": 0.21, "training_s": None, "inflation": None, "target": 1.3, "share": 1.0}
    assert "first token  after 0.21 s\n" in show.status_text({"serve": {"ttft": known}}) + "\n"
    late = {**known, "training_s": 0.4, "inflation": 1.75, "share": 0.25}
    text = show.status_text({"serve": {"ttft": late}})
    assert "1.75 times as long while training, to be held to 1.3: it has 25% of the time while somebody waits" in text
    assert "first token" not in show.status_text({"serve": {"ttft": {**known, "idle_s": None}}})


def test_practice_is_shown_where_there_is_some_with_what_its_judge_is_worth() -> None:
    practice = {"state": "waiting", "why": "people are served", "rounds": 2, "answers": 8, "judged": 7, "updates": 1}
    line = "waiting (people are served), 2 rounds, 7 of 8 answers judged, 1 updates"
    assert show.practice_text(practice) == line
    fitted = {"in_use": False, "ratings": 20}
    assert show.practice_text({**practice, "fitted": fitted}) == f"{line}, the judge is not in use after 20 ratings"
    assert "practice" not in show.status_text({"learner": {"practice": {"state": "off", "why": "no judge"}}})


def test_every_reason_that_something_waits_or_is_left_out_is_shown() -> None:
    learner = {
        "state": "paused",
        "why": "a version is pinned",
        "pairs": {"waiting": 3, "used": 0},
        "corrections": {"waiting": 0, "used": 0},
        "calibration": {"measured": False, "why": "the trainer starts"},
        "dropped": {"greedy": 2},
        "practice": {
            "state": "waiting",
            "why": "",
            "reasons": {"judge_failed": 4},
            "skipped": {"equal_rewards": 5},
            "detail": "NameError: x",
        },
    }
    text = show.status_text({"learner": learner, "placement": "one process trains"})
    rows = {tuple(part.strip() for part in line.split("  ") if part) for line in text.splitlines()}
    assert {
        ("- why", "a version is pinned"),
        ("- pairs", "3 waiting, 0 used"),
        ("- calibration", "not measured: the trainer starts"),
        ("dropped", "greedy 2"),
        ("- no reward", "judge_failed 4"),
        ("- skipped", "equal_rewards 5"),
        ("- judge", "NameError: x"),
        ("placement", "one process trains"),
    } <= rows
    assert "corrections" not in text
    measured = {"measured": True, "mean": 0.00123, "tokens": 96}
    assert "measured: mean 0.00123" in show.status_text({"learner": {"calibration": measured}})


def test_the_processes_that_share_a_workers_work_are_shown_below_it() -> None:
    ranks = [{"pid": 11, "rss_bytes": 600_000_000}]
    text = show.status_text({"workers": [{"name": "train", "pid": 8, "state": "ready", "ranks": ranks}]})
    assert [line.split("  ")[-1].strip() for line in text.splitlines()[-2:]] == ["ready, pid 8", "pid 11, 600 MB"]


def test_a_version_is_shown_with_its_metrics_and_a_diff_with_the_largest_module_first() -> None:
    text = version_text({"version": 2, "created_at": 1_700_000_000.0, "folder": None, "metrics": {"kl/live": 0.12345}})
    assert "0.1235" in text or "0.1234" in text
    assert "folder" not in text
    body = {"norm": 1.0, "other_norm": 2.0, "distance": 1.5, "cosine": None, "modules": {"a": 0.1, "b": 0.9}}
    assert diff_text(1, 2, body).splitlines()[-2].startswith("b")
