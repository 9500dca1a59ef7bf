"""What commands print: JSON for scripts, aligned text for people. Pure, but for the two `print_` functions."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any


def print_json(value: Any) -> None:
    """One JSON document, indented, keys in their own order."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_error(message: str, hint: str = "") -> None:
    """An error, and what to do about it, on stderr."""
    print(f"edged: {message}", file=sys.stderr)
    if hint:
        print(f"       {hint}", file=sys.stderr)


def columns(rows: Sequence[Sequence[str]], *, header: Sequence[str] = ()) -> str:
    """`rows` as left-aligned columns two spaces apart, each as wide as its widest cell."""
    every = [list(header), *map(list, rows)] if header else [list(row) for row in rows]
    if not every:
        return ""
    widths = [max(len(row[i]) for row in every) for i in range(len(every[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in every)


def when(moment: Any) -> str:
    """RFC 3339 text or Unix seconds as local "2026-01-31 12:00:05", or "-" for None."""
    if moment is None:
        return "-"
    if isinstance(moment, int | float):
        instant = datetime.fromtimestamp(moment, UTC)
    else:
        instant = datetime.fromisoformat(str(moment))
    return instant.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def size(n_bytes: float) -> str:
    """Bytes as "83 MB" or "1.4 GB" (powers of ten)."""
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB"


def seconds(value: float) -> str:
    """A duration as people read it."""
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"


def status_text(status: dict[str, Any]) -> str:
    """The body of GET /v1/status for people. Fields that this daemon does not report are left out."""
    model, adapter = status.get("model", {}), status.get("adapter", {})
    learner, serve, store = status.get("learner", {}), status.get("serve", {}), status.get("store", {})
    pinned = ", pinned" if adapter.get("pinned") else ""
    rows = [
        ["model", str(model.get("name", "-"))],
        ["adapter", f"v{adapter.get('version', 0)} since {when(adapter.get('since'))}{pinned}"],
        *_watch_rows(adapter),
        ["learner", learner_text(learner)],
        *_learner_rows(learner),
        ["serving", f"{serve.get('active', 0)} running, {serve.get('queued', 0)} waiting"],
        *_ttft_rows(serve.get("ttft", {})),
        [
            "store",
            f"{store.get('episodes', 0)} episodes, {store.get('feedback', 0)} feedback rows, "
            f"{store.get('ratings', 0)} current ratings",
        ],
    ]
    practice = learner.get("practice", {})
    if practice.get("state", "off") != "off":
        rows += _practice_rows(practice)
    if last := learner.get("last_update"):
        rows.append(["last update", update_text(last)])
    rows += _counted([("dropped", learner.get("dropped")), ("left out", learner.get("left_out"))])
    if files := status.get("adapters"):
        collected = f", {files['collected']} collected" if files.get("collected") else ""
        rows.append(["adapters", f"{files['on_disk']} on disk, {size(files['bytes'])}{collected}"])
        rows += [["- disk", str(files["why"])]] if files.get("why") else []
    rows += [["alarm", str(alarm)] for alarm in learner.get("alarms", [])]
    if placement := status.get("placement"):
        rows.append(["placement", str(placement)])
    for worker in status.get("workers", []):
        rss = worker.get("rss_bytes")
        resident = f", {size(rss)}" if rss else ""
        pid = f", pid {worker['pid']}" if worker.get("pid") else ""
        rows.append([f"worker {worker.get('name', '?')}", f"{worker.get('state', '?')}{pid}{resident}"])
        rows += [["- fault", str(worker["fault"])]] if worker.get("fault") else []
        rows += [
            [f"- rank {rank}", f"pid {other['pid']}, {size(other['rss_bytes'])}"]
            for rank, other in enumerate(worker.get("ranks", []), start=1)
        ]
    return columns(rows)


def _watch_rows(adapter: dict[str, Any]) -> list[list[str]]:
    """What was said against the version before, and how the live one is rated."""
    rows = [["- went back", str(adapter["reason"])]] if adapter.get("reason") else []
    watch = adapter.get("watch", {})
    if watch.get("why"):
        rows.append([f"- {str(adapter.get('stage', '')).replace('_', ' ')}", str(watch["why"])])
    if watch.get("withheld"):
        rows.append(["- withheld", f"{watch['withheld']} rollbacks of pinned versions"])
    return rows


def _learner_rows(learner: dict[str, Any]) -> list[list[str]]:
    """What is behind the learner's line: why, what people wrote, and how far trainer and server round apart."""
    rows = [["- why", str(learner["why"])]] if learner.get("why") else []
    for kind in ("pairs", "corrections"):
        counts = learner.get(kind, {})
        if any(counts.values()):
            rows.append([f"- {kind}", f"{counts.get('waiting', 0)} waiting, {counts.get('used', 0)} used"])
    calibration = learner.get("calibration", {})
    if calibration.get("measured") is False:
        rows.append(["- calibration", f"not measured: {calibration.get('why') or 'it has not begun'}"])
    elif calibration:
        figures = (f"{name} {value:.3g}" for name, value in calibration.items() if isinstance(value, float))
        rows.append(["- calibration", f"measured: {', '.join(figures)}"])
    return rows


def _ttft_rows(ttft: dict[str, Any]) -> list[list[str]]:
    """How long first tokens take, and what training costs them."""
    if ttft.get("idle_s") is None:
        return []
    text = f"after {ttft['idle_s']:.2f} s"
    if ttft.get("inflation") is not None:
        text += f"; {ttft['inflation']:.2f} times as long while training, to be held to {ttft['target']:g}"
        if ttft["share"] < 1.0:
            text += f": it has {ttft['share']:.0%} of the time while somebody waits"
    return [["first token", text]]


def _practice_rows(practice: dict[str, Any]) -> list[list[str]]:
    """Practice, and what did not go well in it."""
    rows = [["practice", practice_text(practice)]]
    rows += _counted([("- no reward", practice.get("reasons")), ("- skipped", practice.get("skipped"))])
    if detail := practice.get("detail"):
        rows.append(["- judge", str(detail)])
    return rows


def _counted(rows: Sequence[tuple[str, dict[str, int] | None]]) -> list[list[str]]:
    """A row for each name with counts: reason and number."""
    return [
        [name, ", ".join(f"{reason} {count}" for reason, count in counts.items())] for name, counts in rows if counts
    ]


def learner_text(learner: dict[str, Any]) -> str:
    """What the learner does and what it waits for."""
    state = str(learner.get("state", "?")).replace("_", " ")
    missing = learner.get("ratings_until_update")
    waits = f", {missing} more ratings until the next update" if missing else ""
    progress = learner.get("progress")
    stage = f" ({progress['stage']} {progress['done']}/{progress['total']})" if progress else ""
    return f"{state}{stage}, {learner.get('updates_total', 0)} updates{waits}"


def practice_text(practice: dict[str, Any]) -> str:
    """What the box does on its own, in a line."""
    why = f" ({practice['why']})" if practice.get("why") else ""
    judged = f"{practice.get('judged', 0)} of {practice.get('answers', 0)} answers judged"
    text = (
        f"{practice['state']}{why}, {practice.get('rounds', 0)} rounds, {judged}, {practice.get('updates', 0)} updates"
    )
    if fitted := practice.get("fitted"):
        text += f", the judge is {'' if fitted['in_use'] else 'not '}in use after {fitted['ratings']} ratings"
    return text


def update_text(update: dict[str, Any]) -> str:
    """One finished update in a line: verdict, version, time and reason."""
    by_stage = update.get("seconds", {})
    # "train/gather" and the like are parts of "train"; a refused update has no "total".
    spent = by_stage.get("total", sum(value for stage, value in by_stage.items() if "/" not in stage))
    version = f" v{update['version']}" if update.get("version") is not None else ""
    reason = f": {update['reason']}" if update.get("reason") else ""
    return f"#{update.get('id', '?')} {update.get('verdict', '?')}{version} in {seconds(spent)}{reason}"
