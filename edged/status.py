"""What GET /v1/status and /metrics show. Pure: parts in, text or a plain map out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from edged.records import Anchor, Live, PracticeCounts, Update, WrittenCounts
from edged.standing import DeepView, FilesView, WatchView, files_object, watch_object
from edged.times import rfc3339
from edged.ttft import FirstTokens
from engine import protocol

# What `edged.serve` counts, in words.
COUNTER_HELP = {
    "finished_total": "Answers that ended.",
    "failed_total": "Answers that broke off.",
    "refused_total": "Requests that were refused because the daemon was full or stopping.",
    "rerun_total": "Answers that were begun again after the serve worker was lost.",
    "completion_tokens_total": "Tokens that were generated.",
}
SHOWN_METRICS = (
    "reward/mean",
    "kl/live",
    "kl/reference",
    "ppo/clip_frac",
    "critic/explained_variance",
    "is/ess",
    "is/age_mean",
    "episodes/cut_share",
    "swap_ms",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A worker's process. ranks: pid and resident memory of the others that share its work. fault: why it cannot do its
    role, if it said so since it was last ready."""

    name: str
    pid: int | None
    state: str
    rss_bytes: int
    busy: str
    restarts: int
    ranks: tuple[tuple[int, int], ...] = ()
    fault: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PracticeView:
    """Where practice stands. detail: the judge's newest failure, for people. fitted: what a judge that is fitted to the
    box's ratings is worth; None for another one, or before it was fitted."""

    state: str
    why: str
    counts: PracticeCounts
    detail: str
    fitted: protocol.FitReport | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that a status shows, as it is now.

    serving: the version that new requests run on, which follows what is live; None while no serve worker is ready.
    anchor: what the reference of the KL penalty moved to, while that is in force.
    dropped: reason -> ratings that no update will use. left_out: reason -> answers that updates could not use.
    noise: between trainer and server; None while it is not known, for the reason noise_why.
    placement: the plan that updates are carried out by, in words, or why there is none.
    """

    version: str
    started_at: float
    model_name: str
    model_sha256: str
    live: Live
    serving: int | None
    learner_state: str
    learner_why: str
    ratings_until_update: int
    batch_ratings: int
    progress: tuple[str, int, int] | None
    updates_total: int
    latest: Update | None
    reference: int
    anchor: Anchor | None
    practice: PracticeView
    deep: DeepView
    dropped: Mapping[str, int]
    left_out: Mapping[str, int]
    alarms: tuple[str, ...]
    noise: protocol.EngineNoise | None
    noise_why: str
    written: WrittenCounts
    active: int
    queued: int
    counters: Mapping[str, int]
    first_tokens: FirstTokens
    episodes: int
    feedback: int
    ratings: int
    placement: str
    workers: tuple[WorkerView, ...]
    daemon_rss_bytes: int
    watch: WatchView
    files: FilesView | None = None


def status(parts: Parts) -> dict[str, Any]:
    """The body of GET /v1/status."""
    latest = parts.latest
    return {
        "version": parts.version,
        "since": rfc3339(parts.started_at),
        "model": {"name": parts.model_name, "sha256": parts.model_sha256},
        "adapter": {
            "version": parts.live.version,
            "serving": parts.serving,
            "since": rfc3339(parts.live.since),
            "why": parts.live.why,
            "pinned": parts.live.pinned,
            "reason": parts.live.reason,
            **watch_object(parts.watch),
            "deep_gate": dataclasses.asdict(parts.deep),
        },
        "learner": {
            "state": parts.learner_state,
            "why": parts.learner_why,
            "ratings_until_update": parts.ratings_until_update,
            "batch_ratings": parts.batch_ratings,
            "progress": None
            if parts.progress is None
            else dict(zip(("stage", "done", "total"), parts.progress, strict=True)),
            "updates_total": parts.updates_total,
            "last_update": None if latest is None else last_update(latest),
            "reference": reference_object(parts.reference, parts.anchor),
            "practice": practice_object(parts.practice),
            "dropped": dict(parts.dropped),
            "left_out": dict(parts.left_out),
            "alarms": list(parts.alarms),
            "calibration": {"measured": False, "why": parts.noise_why}
            if parts.noise is None
            else {"measured": True, **dataclasses.asdict(parts.noise)},
            "pairs": {"waiting": parts.written.pairs_waiting, "used": parts.written.pairs_used},
            "corrections": {
                "waiting": parts.written.corrections_waiting,
                "used": parts.written.corrections_used,
            },
        },
        "serve": {
            "active": parts.active,
            "queued": parts.queued,
            **parts.counters,
            "ttft": dataclasses.asdict(parts.first_tokens),
        },
        "adapters": files_object(parts.files),
        "sync": {"state": "offline"},
        "energy": {"source": "unavailable"},
        "store": {"episodes": parts.episodes, "feedback": parts.feedback, "ratings": parts.ratings},
        "placement": parts.placement,
        "workers": [worker_object(worker) for worker in parts.workers],
        "daemon": {"rss_bytes": parts.daemon_rss_bytes},
    }


def worker_object(worker: WorkerView) -> dict[str, Any]:
    """A worker and the processes that share its work."""
    ranks = [{"pid": pid, "rss_bytes": rss_bytes} for pid, rss_bytes in worker.ranks]
    return {**dataclasses.asdict(worker), "ranks": ranks}


def reference_object(version: int, anchor: Anchor | None) -> dict[str, Any]:
    """What the KL penalty pulls towards, and what moved it there; `moved` is null where it is as configured."""
    moved = None
    if anchor is not None:
        moved = {
            "since": rfc3339(anchor.since),
            "from": anchor.before,
            "ratings": anchor.ratings,
            "mean_rating": anchor.mean_rating,
        }
    return {"version": version, "moved": moved}


def practice_object(view: PracticeView) -> dict[str, Any]:
    """What the box does on its own: counts since the state folder was made, and what waits now."""
    counts, report = view.counts, view.fitted
    return {
        "state": view.state,
        "why": view.why,
        "rounds": counts.rounds,
        "answers": counts.answers,
        "judged": counts.rewards,
        "waiting": {"for_judge": counts.unjudged, "for_update": counts.judged},
        "updates": counts.updates,
        "updates_in_a_row": counts.in_a_row,
        "reasons": counts.reasons,
        "skipped": counts.skipped,
        "detail": view.detail,
        "fitted": None
        if report is None
        else {
            "ratings": report.n_ratings,
            "accuracy": report.accuracy,
            "in_use": report.used,
            "head": report.head,
            "why": report.why,
        },
    }


def last_update(update: Update) -> dict[str, Any]:
    """An update as GET /v1/status shows it."""
    return {
        "id": update.id,
        "verdict": update.verdict,
        "reason": update.reason,
        "version": update.version,
        "parent_version": update.parent_version,
        "finished_at": None if update.finished_at is None else rfc3339(update.finished_at),
        "seconds": update.seconds,
        "metrics": update.metrics,
    }


def one_line(parts: Parts) -> str:
    """For `systemctl status`."""
    behind = "" if parts.serving in (None, parts.live.version) else f" (new requests still run on v{parts.serving})"
    return (
        f"v{parts.live.version} live{behind}, learner {parts.learner_state}, {parts.updates_total} updates, "
        f"{parts.episodes} episodes, {parts.ratings} ratings"
    )


def prometheus(parts: Parts) -> str:
    """The text of /metrics. A figure that is unknown is left out, never 0."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(parts))
    return generate_latest(registry).decode()


class _Families:
    """The collector of one scrape."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        parts = self._parts
        yield _gauge("edged_adapter_version", "Version that is live.", parts.live.version)
        if parts.serving is not None:
            yield _gauge("edged_adapter_serving", "Version that new requests run on.", parts.serving)
        yield CounterMetricFamily(
            "edged_adapter_rollbacks", "Rollbacks by the box itself.", value=parts.watch.rollbacks
        )
        yield _gauge(
            "edged_adapter_rollbacks_withheld",
            "Rollbacks since the start that did not happen because the version was pinned.",
            parts.watch.withheld,
        )
        if parts.watch.evidence is not None:
            yield _gauge("edged_adapter_evidence", "Evidence that the live version is worse.", parts.watch.evidence)
        if parts.files is not None:
            yield _gauge("edged_adapters_on_disk", "Adapter versions whose files are there.", parts.files.on_disk)
            yield _gauge("edged_adapters_bytes", "Bytes that they take.", parts.files.n_bytes)
            yield CounterMetricFamily(
                "edged_adapters_collected", "Versions whose files were removed.", value=parts.files.collected
            )
            yield _gauge("edged_disk_free_bytes", "Free bytes of their disk.", parts.files.free_bytes)
        yield _gauge("edged_serve_active", "Answers that are under way, waiting ones included.", parts.active)
        yield _gauge("edged_serve_queued", "Answers that wait for a slot.", parts.queued)
        for name, value in parts.counters.items():
            yield CounterMetricFamily(f"edged_serve_{name.removesuffix('_total')}", COUNTER_HELP[name], value=value)
        yield from self._first_tokens()
        yield _gauge(
            "edged_learner_ratings_until_update",
            "Ratings that are missing until the next update.",
            parts.ratings_until_update,
        )
        yield CounterMetricFamily(
            "edged_learner_updates", "Updates that have a verdict, whichever it is.", value=parts.updates_total
        )
        dropped = CounterMetricFamily(
            "edged_learner_dropped",
            "Ratings, pairs and corrections that cannot be trained on, by reason.",
            labels=["reason"],
        )
        for reason, count in parts.dropped.items():
            dropped.add_metric([reason], count)
        yield dropped
        left_out = CounterMetricFamily(
            "edged_learner_left_out",
            "Answers that updates could not use, by reason; a replayed one counts each time.",
            labels=["reason"],
        )
        for reason, count in parts.left_out.items():
            left_out.add_metric([reason], count)
        yield left_out
        yield _gauge("edged_learner_alarms", "Alarms that somebody should look at.", len(parts.alarms))
        yield from self._written()
        yield from self._practice()
        yield _gauge("edged_store_episodes", "Episodes that are stored.", parts.episodes)
        yield _gauge("edged_store_feedback", "Feedback rows that are stored, replaced ones included.", parts.feedback)
        yield _gauge("edged_store_ratings", "Ratings that count now, the newest of each choice.", parts.ratings)
        yield from self._workers()
        if parts.latest is not None:
            yield from self._latest(parts.latest)

    def _first_tokens(self) -> Iterator[Metric]:
        firsts = self._parts.first_tokens
        seconds = GaugeMetricFamily(
            "edged_serve_ttft_seconds",
            "Median wait for the first token of an answer, of the newest ones.",
            labels=["while"],
        )
        for name, value in (("idle", firsts.idle_s), ("training", firsts.training_s)):
            if value is not None:
                seconds.add_metric([name], value)
        yield seconds
        if firsts.inflation is not None:
            yield _gauge(
                "edged_serve_ttft_inflation",
                "How many times as long first tokens take while training, of requests of the same kind.",
                firsts.inflation,
            )

    def _written(self) -> Iterator[Metric]:
        written = self._parts.written
        for kind, waiting, used in (
            ("pairs", written.pairs_waiting, written.pairs_used),
            ("corrections", written.corrections_waiting, written.corrections_used),
        ):
            family = GaugeMetricFamily(f"edged_learner_{kind}", f"Stored {kind}, by state.", labels=["state"])
            family.add_metric(["waiting"], waiting)
            family.add_metric(["used"], used)
            yield family

    def _practice(self) -> Iterator[Metric]:
        counts = self._parts.practice.counts
        yield CounterMetricFamily("edged_practice_rounds", "Rounds of practice.", value=counts.rounds)
        yield CounterMetricFamily(
            "edged_practice_answers", "Answers that were sampled in practice.", value=counts.answers
        )
        yield CounterMetricFamily(
            "edged_practice_judged", "Of those, the ones that got a reward.", value=counts.rewards
        )
        yield CounterMetricFamily(
            "edged_practice_updates", "Updates of practice that have a verdict, whichever it is.", value=counts.updates
        )
        for name, text, reasons in (
            ("failures", "What got no reward, or a cut one, by reason.", counts.reasons),
            ("skipped", "Judged answers that no update can use, by reason.", counts.skipped),
        ):
            family = CounterMetricFamily(f"edged_practice_{name}", text, labels=["reason"])
            for reason, count in reasons.items():
                family.add_metric([reason], count)
            yield family

    def _workers(self) -> Iterator[Metric]:
        rss = GaugeMetricFamily("edged_process_rss_bytes", "Resident memory of each process.", labels=["process"])
        ready = GaugeMetricFamily("edged_worker_ready", "Whether the worker is ready: 1 or 0.", labels=["worker"])
        rss.add_metric(["daemon"], self._parts.daemon_rss_bytes)
        for worker in self._parts.workers:
            ready.add_metric([worker.name], float(worker.state == "ready"))
            if worker.pid is not None:
                rss.add_metric([worker.name], worker.rss_bytes)
            for rank, (_, rss_bytes) in enumerate(worker.ranks, start=1):
                rss.add_metric([f"{worker.name}/{rank}"], rss_bytes)
        yield rss
        yield ready

    def _latest(self, latest: Update) -> Iterator[Metric]:
        seconds = GaugeMetricFamily(
            "edged_update_seconds", "Seconds that each stage of the last update took.", labels=["stage"]
        )
        for stage, value in latest.seconds.items():
            seconds.add_metric([stage], value)
        yield seconds
        figures = GaugeMetricFamily("edged_update_metric", "Figures that the last update measured.", labels=["name"])
        for name in SHOWN_METRICS:
            if name in latest.metrics:
                figures.add_metric([name], latest.metrics[name])
        yield figures


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)
