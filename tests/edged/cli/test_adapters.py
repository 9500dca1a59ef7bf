"""What `edged adapters show` prints of a version's figures."""

from __future__ import annotations

from edged.cli.adapters import SHOWN_FIGURES, version_text, versions_text

ADAPTER = {"version": 3, "created_at": "2026-01-31T12:00:00Z", "reason": None}
METRICS = {"reward/mean": -0.28, "kl/live": 0.054388, "policy/ratio_max": 1.7194, "gate/load_ms": 8.5555}


def test_a_version_shows_the_telling_figures_with_what_they_say() -> None:
    text = version_text({**ADAPTER, "metrics": METRICS})
    assert [line.split()[0] for line in text.splitlines() if "/" in line] == ["reward/mean", "kl/live"]
    assert f"0.05439  {SHOWN_FIGURES['kl/live']}" in text
    assert text.splitlines()[-1] == "2 more figures: --all"


def test_all_shows_every_figure_by_name() -> None:
    text = version_text({**ADAPTER, "metrics": METRICS}, every=True)
    assert [line.split()[0] for line in text.splitlines() if "." in line] == sorted(METRICS)
    assert "--all" not in text


def test_a_version_that_was_never_measured_shows_no_figures() -> None:
    assert version_text({**ADAPTER, "metrics": {}}) == version_text(ADAPTER)
    assert len(version_text(ADAPTER).splitlines()) == 2


def test_a_version_that_was_rolled_back_is_listed_with_what_spoke_against_it() -> None:
    row = {
        "version": 2,
        "parent_version": 1,
        "origin": "trained",
        "state": "published",
        "created_at": 1.0,
        "kept": True,
    }
    rolled_back = {**row, "verdict": "rolled_back", "verdict_reason": "version 2 was rated -0.50"}
    text = versions_text({"live": {"version": 1}, "data": [rolled_back, {**row, "verdict": "kept"}]})
    first, second = text.splitlines()[1:]
    assert "rolled back, kept" in first
    assert first.endswith("version 2 was rated -0.50")
    assert "published, kept" in second


def test_the_verdict_of_the_deep_gate_stands_in_the_list_and_its_sentence_with_the_version() -> None:
    deep = {"verdict": "refused", "against": 2, "at": 1.0, "reason": "it stammers", "rolled_back_to": 2, "kept_why": ""}
    lists = {"origin": "trained", "state": "published"}
    body = {"live": {"version": 2}, "data": [{**ADAPTER, **lists, "version": 2}, {**ADAPTER, **lists, "deep": deep}]}
    rows = versions_text(body).splitlines()
    at = rows[0].index("deep gate")
    assert [row[at:].split()[0] for row in rows[1:]] == ["-", "refused"]
    assert "refused against v2: it stammers; rolled back to v2" in version_text({**ADAPTER, "deep": deep})
    stays = version_text({**ADAPTER, "deep": {**deep, "rolled_back_to": None, "kept_why": "v3 is pinned"}})
    assert "it stammers; still served: v3 is pinned" in stays
