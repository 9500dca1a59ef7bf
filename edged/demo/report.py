"""What the demo leaves behind: the before/after table, example answers, the reward curve (PNG) and result.json."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edged.demo.outcome import Answer, Comparison, Round, Summary

EXAMPLES = 3
EXAMPLE_CHARS = 240
CURVE_FILE = "reward.png"
RESULT_FILE = "result.json"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that a finished demo knows."""

    preference: str
    likes: str
    rounds: Sequence[Round]
    before: Summary
    after: Summary
    comparison: Comparison
    before_answers: Sequence[Answer]
    after_answers: Sequence[Answer]
    seconds: float
    state_folder: str


def table_rows(report: Report) -> list[tuple[str, str, str]]:
    """The before/after table: name, before, after. A figure that was not measured is "-"."""

    def number(pattern: str, value: float | None) -> str:
        return "-" if value is None else pattern.format(value)

    lines: tuple[tuple[str, str, Callable[[Summary], float | None]], ...] = (
        ("reward (mean rating, -1 to 1)", "{:+.2f}", lambda s: s.reward),
        ("words", "{:.1f}", lambda s: s.words),
        ("finished within the limit", "{:.0%}", lambda s: s.finished_frac),
        ("KL to the base (nats/token)", "{:.3f}", lambda s: s.kl),
        ("fluency (logprob under the base)", "{:.2f}", lambda s: s.fluency),
    )
    return [
        (name, number(pattern, of(report.before)), number(pattern, of(report.after))) for name, pattern, of in lines
    ]


def verdict_text(report: Report) -> str:
    """One sentence: did it learn, and how sure is that."""
    c = report.comparison
    ratings = 16 * len(report.rounds)
    outcome = "It learned" if c.learned else "It did not learn enough to be sure"
    return (
        f"{outcome}: after {ratings} ratings the mean rating of {report.after.n_answers} answers to questions that were"
        f" never rated moved by {c.difference:+.2f} (standard error {c.standard_error:.2f})."
    )


def examples(report: Report) -> list[tuple[str, str, str]]:
    """(prompt, answer before, answer after) of the first held-out prompts: fixed, so never the best ones on purpose."""
    after = {answer.prompt: answer for answer in reversed(report.after_answers)}
    before = {answer.prompt: answer for answer in reversed(report.before_answers)}
    prompts = list(dict.fromkeys(answer.prompt for answer in report.before_answers))[:EXAMPLES]
    return [(prompt, shortened(before[prompt].text), shortened(after[prompt].text)) for prompt in prompts]


def shortened(text: str) -> str:
    """`text` on one line, cut at a word with an ellipsis."""
    line = " ".join(text.split())
    return line if len(line) <= EXAMPLE_CHARS else line[:EXAMPLE_CHARS].rsplit(" ", 1)[0] + " ..."


def result(report: Report) -> dict[str, Any]:
    """The content of result.json."""
    return {
        "preference": report.preference,
        "learned": report.comparison.learned,
        "before": dataclasses.asdict(report.before),
        "after": dataclasses.asdict(report.after),
        "difference": report.comparison.difference,
        "standard_error": report.comparison.standard_error,
        "ratings": 16 * len(report.rounds),
        "updates": sum(r.verdict is not None for r in report.rounds),
        "published": sum(r.verdict == "published" for r in report.rounds),
        "refused": [r.reason for r in report.rounds if r.verdict == "refused"],
        "rounds": [dataclasses.asdict(r) for r in report.rounds],
        "seconds": round(report.seconds, 1),
        "state_folder": report.state_folder,
    }


def save(report: Report, folder: Path) -> tuple[Path, Path]:
    """Write the curve and result.json into `folder`; their paths. Each appears whole or not at all."""
    curve, result_path = folder / CURVE_FILE, folder / RESULT_FILE
    draw_curve(report, curve.with_name(f".{CURVE_FILE}"))
    os.replace(curve.with_name(f".{CURVE_FILE}"), curve)
    part = result_path.with_name(f".{RESULT_FILE}")
    part.write_text(json.dumps(result(report), indent=2) + "\n")
    os.replace(part, result_path)
    return curve, result_path


def draw_curve(report: Report, path: Path) -> None:
    """The mean rating of each round over the number of ratings given, with the held-out means as lines."""
    from matplotlib.figure import Figure  # the object interface: no window system, no global state

    figure = Figure(figsize=(7.2, 4.0), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    given = [16 * (i + 1) for i in range(len(report.rounds))]
    axes.plot(given, [r.mean_rating for r in report.rounds], marker="o", color="#1f6feb", label="rated answers")
    refused = [(x, r.mean_rating) for x, r in zip(given, report.rounds, strict=True) if r.verdict == "refused"]
    if refused:
        xs, ys = zip(*refused, strict=True)
        axes.scatter(xs, ys, marker="x", s=70, color="#cf222e", zorder=3, label="candidate refused")
    for summary, name, style in ((report.before, "before", ":"), (report.after, "after", "--")):
        axes.axhline(summary.reward, linestyle=style, color="#57606a", label=f"held-out questions, {name}")
    axes.set(
        xlabel="ratings given", ylabel="mean rating", ylim=(-1.05, 1.05), title=f"A person who likes {report.likes}"
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, format="png")
