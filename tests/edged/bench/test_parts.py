"""What the parts of the benchmark conclude from what they saw."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from edged.bench import serve, session, swap, switch
from edged.bench.figures import Figure
from edged.bench.provenance import Step, Trace
from edged.bench.session import Session
from edged.cli.child import DaemonChild
from edged.cli.connect import Peer, open_async_http


def by_name(figures: list[Figure]) -> dict[str, float | None]:
    return {figure.name: figure.value for figure in figures}


def said(logprob: float) -> Trace:
    return (Step("Yes", logprob, {"Yes": logprob, "No": -2.0}),)


OLD, NEW = said(-0.2), said(-0.9)
KNOWN = swap.Known({0: {"p": OLD}, 1: {"p": NEW}}, bound_nats=0.1)


def test_an_answer_whose_chunks_or_episode_name_another_adapter_is_mixed() -> None:
    load = swap.Load(
        answers={
            "a": swap.Seen({0}, "p", OLD),
            "b": swap.Seen({0, 1}, "p", NEW),
            "c": swap.Seen({1}, "p", NEW),
            "d": swap.Seen({1}, "p", NEW),
        }
    )
    values = by_name(swap.figures_of(load, [3.0, 5.0, 4.0], {"a": 0, "b": 1, "c": 0}, KNOWN))
    assert values["answers mixing adapters"] == 2.0
    assert values["answers without episode"] == 1.0
    assert values["failed answers"] == 0.0
    assert values["swap under load, median of 3"] == 4.0


def mixed_among(answers: dict[str, swap.Seen], recorded: dict[str, int], known: swap.Known = KNOWN) -> float | None:
    return by_name(swap.figures_of(swap.Load(answers), [], recorded, known))["answers mixing adapters"]


def test_an_answer_that_other_weights_made_is_mixed_whatever_it_names() -> None:
    good = {"a": swap.Seen({0}, "p", said(-0.25)), "b": swap.Seen({1}, "p", said(-0.85))}
    assert mixed_among(good, {"a": 0, "b": 1}) == 0.0
    assert mixed_among({**good, "c": swap.Seen({1}, "p", OLD)}, {"a": 0, "b": 1, "c": 1}) == 1.0


def test_without_answers_of_both_versions_or_a_prompt_that_tells_them_apart_nothing_was_measured() -> None:
    both = {"a": swap.Seen({0}, "p", OLD), "b": swap.Seen({1}, "p", NEW)}
    assert mixed_among({"a": both["a"]}, {"a": 0}) is None
    assert mixed_among(both, {"a": 0, "b": 1}, swap.Known({0: {"p": OLD}, 1: {"p": said(-0.21)}}, 0.1)) is None


def test_a_daemon_that_reports_no_swaps_misses_the_target() -> None:
    figure = swap.figures_of(swap.Load(), [], {}, KNOWN)[0]
    assert figure.is_met is False
    assert "swap_ms" in figure.note


def against(light_daemon, steps):
    async def run():
        async with open_async_http(Peer(socket=light_daemon.socket)) as http:
            return await steps(
                Session(child=cast(DaemonChild, None), http=http, folder=Path("."), runs=1, show=lambda text: None)
            )

    return asyncio.run(run())


def test_swaps_under_load_are_measured_against_a_daemon(light_daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "SWAPS", 4)
    monkeypatch.setattr(swap, "BETWEEN_SWAPS_S", 0.02)
    light_daemon.answers.pause_s = 0.01
    values = by_name(against(light_daemon, swap.measure))
    assert values["failed answers"] == 0.0
    assert values["answers without episode"] == 0.0
    assert values["answers mixing adapters"] is None, "the light daemon says the same under every version"
    assert light_daemon.control.live.version == 0


def test_sampling_speed_counts_the_tokens_of_all_clients(light_daemon) -> None:
    loaded = against(light_daemon, lambda session: serve.load(session, 4, seed=1))
    assert len(light_daemon.answers.asked) == len(loaded.answers) == serve.ANSWERS[4]
    throughput, *latencies = serve.figures_of("4 clients", [loaded], target=None)
    assert throughput.value == sum(answer.tokens for answer in loaded.answers) / loaded.seconds > 0
    assert [figure.name for figure in latencies][:2] == ["4 clients, first token, p50", "4 clients, first token, p95"]


def test_a_switch_is_told_by_the_bytes_that_either_way_moves() -> None:
    values = by_name(switch.figures_of([12.0, 10.0], [2_000_000, 2_000_000], [300.0, 200.0], 100_000_000))
    assert values["bytes, adapter / whole weights"] == 0.02
    assert values["adapter: load and swap"] == 11.0
    assert values["whole weights: written and read once"] == 250.0


def test_a_switch_that_never_came_is_no_figure_and_misses_its_target() -> None:
    figures = switch.figures_of([], [], [300.0], 100_000_000)
    assert figures[-1].value is None
    assert figures[-1].is_met is False
    assert "refused" in figures[-1].note


def test_moving_weights_takes_time_and_leaves_no_file(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(bytes(1_000_000))
    assert switch.moved_ms(weights, tmp_path) > 0
    assert list(tmp_path.iterdir()) == [weights]


def test_an_adapter_that_is_there_is_used(light_daemon) -> None:
    assert against(light_daemon, session.require_adapter) == 3
