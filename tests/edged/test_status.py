"""What a status and a scrape show."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from edged import status
from edged.records import Anchor, DeepVerdict, Live, PracticeCounts, Update, WrittenCounts
from edged.standing import DeepView, FilesView, RatedView, WatchView
from edged.status import Parts, PracticeView, WorkerView
from edged.ttft import FirstTokens
from engine import protocol

UPDATE = Update(
    id=3,
    state="finished",
    version=4,
    parent_version=2,
    seed=1,
    attempts=1,
    created_at=100.0,
    finished_at=160.5,
    verdict="published",
    reason="all checks passed",
    seconds={"train": 1.5, "train/epochs": 1.25},
    metrics={"kl/live": 0.1, "swap_ms": 2.0, "bytes/written": 4096.0},
    new_episode_ids=(1, 2),
    replay_episode_ids=(),
)


def parts(**changes: Any) -> Parts:
    values: dict[str, Any] = {
        "version": "0.1.0",
        "started_at": 1_700_000_000.0,
        "model_name": "smollm2-135m",
        "model_sha256": "a" * 64,
        "live": Live(version=4, since=1_700_000_060.25, why="published", caller="learner", pinned=False),
        "serving": 4,
        "learner_state": "collecting",
        "learner_why": "5 more ratings make an update",
        "ratings_until_update": 5,
        "batch_ratings": 16,
        "progress": None,
        "updates_total": 7,
        "latest": UPDATE,
        "reference": 0,
        "placement": "timeslice",
        "anchor": Anchor(
            version=2, since=50.0, ratings=130, mean_rating=0.5, before=0, configured=0, base_sha256="a" * 64
        ),
        "practice": PracticeView(
            state="waiting",
            why="people are served",
            counts=PracticeCounts(
                rounds=3,
                answers=48,
                rewards=40,
                unjudged=4,
                updates=2,
                in_a_row=1,
                reasons={"judge_timeout": 8},
                skipped={"equal_rewards": 4},
            ),
            detail="too slow",
            fitted=protocol.FitReport(
                n_ratings=40, n_pairs=90, head="ridge", accuracy=0.8, chance_se=0.05, used=True, why="it is used"
            ),
        ),
        "deep": DeepView(
            state="idle", why="", verdict=DeepVerdict(verdict="passed", against=2, at=50.0, reason="no worse")
        ),
        "written": WrittenCounts(pairs_waiting=2, pairs_used=3, corrections_waiting=1),
        "dropped": {"greedy": 2, "stale": 1},
        "left_out": {"engine_mismatch": 3},
        "alarms": ("more answers are cut off",),
        "noise": protocol.EngineNoise(bias=-0.005, spread=0.09, tokens=20.0, temperature=0.7),
        "noise_why": "",
        "active": 3,
        "queued": 1,
        "counters": {"finished_total": 11, "failed_total": 1},
        "first_tokens": FirstTokens(idle_s=0.25, training_s=0.5, inflation=1.75, target=1.3, share=0.25),
        "episodes": 40,
        "feedback": 30,
        "ratings": 25,
        "workers": (
            WorkerView(name="serve", pid=7, state="ready", rss_bytes=1000, busy="", restarts=0),
            WorkerView(name="train", pid=None, state="waiting", rss_bytes=0, busy="", restarts=2),
        ),
        "daemon_rss_bytes": 5000,
        "watch": WatchView(
            stage="watched",
            is_on=True,
            why="version 4 was rated 0.25 on average over 8 answers, version 2 0.50 over 16",
            rollbacks=2,
            withheld=1,
            evidence=1.5,
            alarm_at=100.0,
            rated=RatedView(versions=[4], ratings=8, mean=0.25),
            reference=RatedView(versions=[2], ratings=16, mean=0.5),
        ),
    }
    return Parts(**{**values, **changes})


def samples(shown: Parts) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, labels) -> value of a scrape."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(status.prometheus(shown))
        for sample in family.samples
    }


def test_a_status_has_everything_that_the_contract_names() -> None:
    body = status.status(parts())
    assert body["model"]["name"] == "smollm2-135m"
    assert (body["adapter"]["version"], body["adapter"]["since"]) == (4, "2023-11-14T22:14:20.250Z")
    learner = body["learner"]
    assert (learner["state"], learner["ratings_until_update"], learner["updates_total"]) == ("collecting", 5, 7)
    assert learner["dropped"] == {"greedy": 2, "stale": 1}
    latest = learner["last_update"]
    assert {"id", "verdict", "reason", "version", "seconds", "metrics"} <= latest.keys()
    assert (latest["id"], latest["verdict"], latest["finished_at"]) == (3, "published", "1970-01-01T00:02:40.500Z")
    assert (body["serve"]["active"], body["serve"]["queued"], body["serve"]["finished_total"]) == (3, 1, 11)
    assert body["store"] == {"episodes": 40, "feedback": 30, "ratings": 25}
    assert {"name", "pid", "state", "rss_bytes"} <= body["workers"][0].keys()
    assert {"state"} <= body["sync"].keys()
    assert "energy" in body


def test_a_status_shows_how_the_live_version_is_rated_and_what_speaks_against_it() -> None:
    adapter = status.status(parts())["adapter"]
    assert (adapter["stage"], adapter["reason"], adapter["watch"]["is_on"]) == ("watched", None, True)
    assert (adapter["watch"]["evidence"], adapter["watch"]["alarm_at"]) == (1.5, 100.0)
    assert adapter["watch"]["reference"] == {"versions": [2], "ratings": 16, "mean": 0.5}
    found = samples(parts())
    assert found["edged_adapter_rollbacks_total", ()] == 2
    assert found["edged_adapter_evidence", ()] == 1.5


def test_a_status_shows_what_adapters_take_of_the_disk_once_that_was_looked_at() -> None:
    assert status.status(parts())["adapters"] is None
    shown = parts(files=FilesView(on_disk=3, n_bytes=4096, collected=2, free_bytes=10**9, why=""))
    files = {"on_disk": 3, "bytes": 4096, "collected": 2, "disk_free_bytes": 10**9, "why": ""}
    assert status.status(shown)["adapters"] == files
    assert samples(shown)["edged_adapters_collected_total", ()] == 2
    assert samples(shown)["edged_adapters_bytes", ()] == 4096


def test_a_status_shows_what_practice_has_come_to_and_what_its_judge_is_worth() -> None:
    practice = status.status(parts())["learner"]["practice"]
    assert (practice["state"], practice["why"]) == ("waiting", "people are served")
    assert (practice["rounds"], practice["answers"], practice["judged"], practice["updates"]) == (3, 48, 40, 2)
    assert practice["waiting"] == {"for_judge": 4, "for_update": 0}
    assert (practice["reasons"], practice["skipped"]) == ({"judge_timeout": 8}, {"equal_rewards": 4})
    fitted = practice["fitted"]
    assert (fitted["ratings"], fitted["accuracy"], fitted["in_use"]) == (40, 0.8, True)
    found = samples(parts())
    assert found["edged_practice_judged_total", ()] == 40
    assert found["edged_practice_failures_total", (("reason", "judge_timeout"),)] == 8


def test_a_status_shows_what_training_costs_first_tokens_and_leaves_out_what_is_not_known() -> None:
    assert status.status(parts())["serve"]["ttft"] == {
        "idle_s": 0.25,
        "training_s": 0.5,
        "inflation": 1.75,
        "target": 1.3,
        "share": 0.25,
    }
    found = samples(parts())
    assert found["edged_serve_ttft_seconds", (("while", "training"),)] == 0.5
    assert found["edged_serve_ttft_inflation", ()] == 1.75
    unknown = FirstTokens(idle_s=0.25, training_s=None, inflation=None, target=1.3, share=1.0)
    assert {name for name, _ in samples(parts(first_tokens=unknown)) if "ttft" in name} == {"edged_serve_ttft_seconds"}


def test_a_status_shows_where_the_reference_moved_and_that_it_did_not() -> None:
    moved = {"since": "1970-01-01T00:00:50.000Z", "from": 0, "ratings": 130, "mean_rating": 0.5}
    assert status.status(parts(reference=2))["learner"]["reference"] == {"version": 2, "moved": moved}
    assert status.status(parts(anchor=None))["learner"]["reference"] == {"version": 0, "moved": None}


def test_what_updates_left_out_the_alarms_and_the_calibration_are_shown() -> None:
    learner = status.status(parts())["learner"]
    assert learner["left_out"] == {"engine_mismatch": 3}
    assert learner["alarms"] == ["more answers are cut off"]
    assert learner["calibration"] == {
        "measured": True,
        "bias": -0.005,
        "spread": 0.09,
        "tokens": 20.0,
        "temperature": 0.7,
    }
    unknown = status.status(parts(noise=None, noise_why="not measured yet"))["learner"]["calibration"]
    assert unknown == {"measured": False, "why": "not measured yet"}


def test_a_status_is_plain_json() -> None:
    body = status.status(parts())
    assert json.loads(json.dumps(body, allow_nan=False)) == body


def test_before_the_first_update_there_is_no_last_one() -> None:
    assert status.status(parts(latest=None))["learner"]["last_update"] is None


@pytest.mark.parametrize(
    ("progress", "shown"), [(None, None), (("epochs", 1, 4), {"stage": "epochs", "done": 1, "total": 4})]
)
def test_progress_is_shown_while_there_is_some(progress: object, shown: object) -> None:
    assert status.status(parts(progress=progress))["learner"]["progress"] == shown


def test_a_scrape_parses_and_shows_the_same_figures() -> None:
    found = samples(parts())
    assert found["edged_adapter_version", ()] == 4
    assert found["edged_serve_active", ()] == 3
    assert found["edged_serve_finished_total", ()] == 11
    assert found["edged_learner_updates_total", ()] == 7
    assert found["edged_learner_dropped_total", (("reason", "greedy"),)] == 2
    assert found["edged_store_ratings", ()] == 25
    assert found["edged_update_seconds", (("stage", "train/epochs"),)] == 1.25
    assert found["edged_update_metric", (("name", "kl/live"),)] == 0.1


def test_every_figure_of_a_scrape_is_explained_in_a_sentence() -> None:
    counters = dict.fromkeys(status.COUNTER_HELP, 1)
    families = list(text_string_to_metric_families(status.prometheus(parts(counters=counters))))
    assert "Answers that ended." in {family.documentation for family in families}
    assert [f.name for f in families if not (f.documentation[:1].isupper() and " " in f.documentation)] == []
    assert len({family.documentation for family in families}) == len(families)


def test_every_counter_of_serving_has_its_sentence() -> None:
    source = (Path(status.__file__).parent / "serve" / "answers.py").read_text()
    assert set(re.findall(r'"(\w+_total)": self', source)) == set(status.COUNTER_HELP)


def test_the_processes_that_share_the_trainers_work_are_shown() -> None:
    trainer = WorkerView(name="train", pid=8, state="ready", rss_bytes=9, busy="", restarts=0, ranks=((11, 600),))
    seen = parts(workers=(trainer,))
    assert status.status(seen)["workers"][0]["ranks"] == [{"pid": 11, "rss_bytes": 600}]
    assert samples(seen)["edged_process_rss_bytes", (("process", "train/1"),)] == 600.0


def test_a_figure_that_is_unknown_is_left_out_of_a_scrape() -> None:
    found = samples(parts(latest=None))
    assert ("edged_process_rss_bytes", (("process", "serve"),)) in found
    assert ("edged_process_rss_bytes", (("process", "train"),)) not in found
    assert found["edged_worker_ready", (("worker", "train"),)] == 0.0
    assert not any(name.startswith("edged_update") for name, _ in found)


def test_a_name_with_odd_characters_does_not_break_a_scrape() -> None:
    found = samples(parts(dropped={'a "quoted"\nreason\\': 1}))
    assert found["edged_learner_dropped_total", (("reason", 'a "quoted"\nreason\\'),)] == 1


def test_every_figure_of_a_scrape_is_finite() -> None:
    assert all(math.isfinite(value) for value in samples(parts()).values())


def test_the_line_for_the_service_manager_is_one_line() -> None:
    assert status.one_line(parts()) == "v4 live, learner collecting, 7 updates, 40 episodes, 25 ratings"
