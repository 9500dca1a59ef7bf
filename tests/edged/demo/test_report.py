"""What the demo leaves behind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from edged.demo import report
from edged.demo.outcome import Answer, Round, compare, summarise


def a_report(**changes: object) -> report.Report:
    def ask(rating: float, text: str) -> list[Answer]:
        return [
            Answer(prompt=f"q{i % 4}", completion_id=f"c{i}", text=text, finish_reason="stop", version=0, rating=rating)
            for i in range(8)
        ]

    before, after = ask(-0.5, "a long " + "winding answer " * 40), ask(0.9, "A short answer.")
    fields: dict[str, object] = {
        "preference": "short",
        "likes": "short and plain answers",
        "rounds": [
            Round(mean_rating=-0.5, mean_words=50, verdict="published", version=1, reason="", update_s=4.0),
            Round(mean_rating=0.1, mean_words=30, verdict="refused", version=1, reason="it stammers", update_s=4.0),
            Round(mean_rating=0.4, mean_words=20, verdict=None, version=1, reason="", update_s=3.0),
        ],
        "before": summarise(before, {}),
        "after": summarise(after, {}),
        "comparison": compare(summarise(before, {}), summarise(after, {})),
        "before_answers": before,
        "after_answers": after,
        "seconds": 12.3,
        "state_folder": "var",
    }
    return report.Report(**{**fields, **changes})  # type: ignore[arg-type]


def test_the_result_file_says_whether_it_learned_and_what_was_measured(tmp_path: Path) -> None:
    finished = a_report()
    curve, path = report.save(finished, tmp_path)
    result = json.loads(path.read_text())
    assert path == tmp_path / "result.json"
    assert (result["preference"], result["learned"]) == ("short", True)
    assert (result["updates"], result["published"], result["refused"]) == (2, 1, ["it stammers"])
    assert result["before"]["reward"] < result["after"]["reward"]
    assert curve.read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["result.json", "reward.png"]


def test_the_table_shows_a_dash_for_what_was_not_measured() -> None:
    rows = {name: (before, after) for name, before, after in report.table_rows(a_report())}
    assert rows["fluency (logprob under the base)"] == ("-", "-")
    assert rows["words"] == ("82.0", "3.0")


def test_examples_are_the_first_prompts_and_are_cut_at_a_word() -> None:
    shown = report.examples(a_report())
    assert [prompt for prompt, _, _ in shown] == ["q0", "q1", "q2"]
    assert shown[0][1].endswith(" ...")
    assert len(shown[0][1]) <= report.EXAMPLE_CHARS + 4
    assert shown[0][2] == "A short answer."


def test_the_verdict_is_honest_when_nothing_was_learned() -> None:
    finished = a_report()
    same = dataclasses.replace(finished, comparison=compare(finished.before, finished.before))
    assert "did not learn" in report.verdict_text(same)
