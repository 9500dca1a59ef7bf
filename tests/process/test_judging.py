"""The score worker under its daemon's client, as real processes: whatever a judge does, each answer gets its reward or
a named reason, and the next batch is judged."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.server
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from edged.learn.judging import Judging, JudgingRules
from edged.system import supervise
from edged.system.workers import Role, Worker, Workers
from engine import protocol
from tests.engine.train.tiny import write_tiny_model

GUARD_S = 120.0  # ten times what the slowest scenario needs
RULES = JudgingRules(clip=1.0, batch=4, timeout_s=60.0, fitted_ratings_min=32, fitted_accuracy_min=0.65)
HASTE = dataclasses.replace(RULES, timeout_s=0.3)
LIMITS = supervise.Limits(start_timeout_s=60.0, hang_timeout_s=60.0, stop_timeout_s=5.0, backoff_first_s=0.05)
BY_ORDER = protocol.FunctionSource(entry_point="judges:by_order", folder=str(Path(__file__).parent))

Source = protocol.FunctionSource | protocol.HttpSource | protocol.FittedSource
Ratings = Callable[[], Awaitable[Sequence[protocol.RatedTokens]]]


@dataclasses.dataclass
class Bench:
    """A client and its worker. `rules` may be changed between calls, as a reload does."""

    judging: Judging
    worker: Worker
    rules: JudgingRules
    deaths: list[str]

    async def judge(self, *answers: str) -> list[tuple[float | None, str | None]]:
        items = [make_item(answer, number) for number, answer in enumerate(answers)]
        judgements = await self.judging.judge(items)
        assert [judgement.episode_id for judgement in judgements] == list(range(len(answers)))
        return [(judgement.reward, judgement.reason) for judgement in judgements]

    async def judge_in_haste(self, *answers: str) -> list[tuple[float | None, str | None]]:
        await self.judging.prepare()  # only the batch itself is in haste
        self.rules = HASTE
        try:
            return await self.judge(*answers)
        finally:
            self.rules = RULES

    def went_down(self, why: str) -> None:
        self.deaths.append(why)
        self.judging.down()

    async def is_well(self) -> None:
        assert await self.judge("12345") == [(0.5, None)]


def make_item(answer: str, episode_id: int) -> protocol.JudgeItem:
    return protocol.JudgeItem(
        episode_id=episode_id,
        messages=(protocol.ChatMessage(role="user", content="Why?"),),
        prompt=None,
        answer=answer,
        finish_reason="stop",
        metadata={},
        prompt_ids=(1,),
        completion_ids=(2,),
    )


@contextlib.asynccontextmanager
async def opened(folder: Path, source: Source, ratings: Ratings | None) -> AsyncIterator[Bench]:
    workers = Workers(folder)

    async def told() -> protocol.StartScore:
        return protocol.StartScore(source=source, threads=1, device="cpu", idle_class=False)

    worker = workers.add(
        Role(
            name="score",
            role="score",
            limits=LIMITS,
            start=told,
            on_ready=lambda ready: bench.judging.ready(),
            on_message=lambda message: bench.judging.received(message) or pytest.fail(f"unexpected {message}"),
            on_down=lambda why: bench.went_down(why),
            on_fault=lambda fault: bench.judging.fault(fault),
        )
    )
    judging = Judging(worker, rules=lambda: bench.rules, start_timeout_s=60.0, ratings=ratings)
    bench = Bench(judging, worker, RULES, [])
    workers.open()
    try:
        yield bench
    finally:
        await workers.close()


def run(
    folder: Path, source: Source, scenario: Callable[[Bench], Awaitable[None]], ratings: Ratings | None = None
) -> None:
    async def main() -> None:
        async with asyncio.timeout(GUARD_S), opened(folder, source, ratings) as bench:
            await scenario(bench)

    asyncio.run(main())


def test_a_function_judges_and_its_mistakes_are_reasons_while_the_process_lives_on(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        assert await bench.judge("12345", "1") == [(0.5, None), (0.9, None)]
        epoch = bench.worker.state.epoch
        assert await bench.judge("raise", "b") == [(None, "judge_raised")] * 2
        assert bench.judging.detail == "ValueError: no such word"
        assert await bench.judge("mute") == [(None, "judge_raised")]
        assert bench.judging.detail == "Mute: (its text cannot be had: ValueError)"
        assert await bench.judge("set", "b") == [(None, "judge_bad_answer")] * 2
        assert await bench.judge("exit") == [(None, "judge_raised")]
        assert await bench.judge("none") == [(None, "judge_abstained")]
        assert await bench.judge("few") == [(None, "judge_wrong_length")]
        assert await bench.judge("nan") == [(None, "judge_not_finite")]
        assert await bench.judge("text") == [(None, "judge_not_a_number")]
        assert await bench.judge("much") == [(1.0, "judge_clipped")]
        await bench.is_well()
        assert bench.worker.state.epoch == epoch
        assert bench.judging.judged == 14
        assert bench.judging.reasons["judge_raised"] == 4

    run(tmp_path, BY_ORDER, scenario)


def test_a_function_that_sleeps_costs_its_batch_and_its_process(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        assert await bench.judge_in_haste("sleep", "b") == [(None, "judge_timeout")] * 2
        await bench.is_well()
        assert bench.deaths == ["killed by SIGKILL"]

    run(tmp_path, BY_ORDER, scenario)


def test_a_function_that_holds_the_interpreter_is_killed_by_the_daemon(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        assert await bench.judge_in_haste("hold", "b") == [(None, "judge_timeout")] * 2
        await bench.is_well()
        assert bench.deaths == ["killed by SIGKILL"]

    run(tmp_path, BY_ORDER, scenario)


@pytest.mark.parametrize("order", ["hold", "die"])
def test_what_a_judge_has_started_ends_with_its_process(order: str, tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.judge_in_haste(f"{order} child:{tmp_path / 'child'}")
        await bench.is_well()
        child = int((tmp_path / "child").read_text())
        async with asyncio.timeout(GUARD_S):
            while Path(f"/proc/{child}").exists() and "(zombie)" not in Path(f"/proc/{child}/status").read_text():
                await asyncio.sleep(0.05)

    run(tmp_path, BY_ORDER, scenario)


def test_a_function_that_takes_the_process_with_it_costs_its_batch_and_no_other(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        found = await bench.judge("a", "b", "c", "d", "die", "f", "g", "h", "12345")
        assert found[:4] == [(0.9, None)] * 4
        assert found[4:8] == [(None, "judge_worker_lost")] * 4
        assert found[8:] == [(0.5, None)]

    run(tmp_path, BY_ORDER, scenario)


def test_a_function_that_cannot_be_imported_is_told_once_and_left_alone(tmp_path: Path) -> None:
    missing = protocol.FunctionSource(entry_point="judges:missing", folder=BY_ORDER.folder)

    async def scenario(bench: Bench) -> None:
        assert await bench.judge("a") == [(None, "judge_unavailable")]
        assert "has no attribute 'missing'" in bench.judging.detail
        epoch = bench.worker.state.epoch
        assert await bench.judge("a") == [(None, "judge_unavailable")]
        why = await bench.judging.prepare()
        assert why is not None
        assert "has no attribute 'missing'" in why
        assert bench.worker.state.epoch == epoch

    run(tmp_path, missing, scenario)


class Service(http.server.BaseHTTPRequestHandler):
    """A reward service that does what the first answer says."""

    protocol_version = "HTTP/1.1"
    hung_up = threading.Event()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        if '"hang"' in body:
            self.hung_up.clear()
            self.connection.recv(1)  # until the other side gives up
            self.hung_up.set()
            self.close_connection = True
        elif '"close"' in body:
            self.close_connection = True
        elif '"lie"' in body:
            self.say(b'{"rewards": "all good"}')
        else:
            self.say(b'{"rewards": [0.5]}')

    def say(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def service() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/judge"
        server.shutdown()
        thread.join(GUARD_S)


def test_a_reward_service_that_answers_lies_closes_and_hangs_never_costs_the_process(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        assert await bench.judge("fine") == [(0.5, None)]
        epoch = bench.worker.state.epoch
        assert await bench.judge("lie") == [(None, "judge_bad_answer")]
        assert await bench.judge("close") == [(None, "judge_unreachable")]
        assert await bench.judge_in_haste("hang") == [(None, "judge_timeout")]
        assert await asyncio.to_thread(Service.hung_up.wait, GUARD_S)
        assert await bench.judge("fine") == [(0.5, None)]
        assert bench.worker.state.epoch == epoch

    with service() as url:
        run(tmp_path, protocol.HttpSource(url=url), scenario)


def test_a_call_that_is_cancelled_leaves_a_client_that_judges_on(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.is_well()
        call = asyncio.create_task(bench.judge("sleep"))
        while bench.worker.busy != "judging":
            await asyncio.sleep(0.01)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        await bench.is_well()

    run(tmp_path, BY_ORDER, scenario)


def test_a_worker_at_rest_is_gone_and_comes_back_when_it_is_needed(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.is_well()
        bench.judging.rest()
        await bench.worker.stopped()
        assert bench.deaths == ["exit code 0"]
        await bench.is_well()

    run(tmp_path, BY_ORDER, scenario)


def test_a_fitted_judge_learns_what_ratings_there_are_and_learns_it_again_after_a_kill(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    fitted = protocol.FittedSource(
        model_path=str(tmp_path / "model"), base_sha256="5" * 64, cache_folder="unused", dtype="float32"
    )
    # Token 10 is liked and token 50 is not, whatever stands around them.
    known = [
        protocol.RatedTokens(
            episode_id=number,
            prompt_ids=(5, 6),
            completion_ids=(10 + 40 * (number % 2), 60 + number),
            rating=(1.0, -1.0)[number % 2],
        )
        for number in range(34)
    ]
    count = 10

    async def ratings() -> Sequence[protocol.RatedTokens]:
        return known[:count]

    async def scenario(bench: Bench) -> None:
        nonlocal count
        assert await bench.judging.prepare() == "10 rated answers; it is fitted from 32 on"
        assert await bench.judge("any") == [(None, "judge_not_fitted")]
        count = len(known)
        bench.judging.rated()
        assert await bench.judging.prepare() is None
        assert bench.judging.report is not None
        assert (bench.judging.report.n_ratings, bench.judging.report.head) == (34, "logistic")
        unrated = [dataclasses.replace(make_item("", n), prompt_ids=(5, 6), completion_ids=(n, 95)) for n in (10, 50)]
        liked, disliked = await bench.judging.judge(unrated)
        assert liked.reward is not None
        assert disliked.reward is not None
        assert liked.reward > 0.0 > disliked.reward
        bench.worker.kill("the test says so")
        while not bench.deaths:
            await asyncio.sleep(0.01)
        assert await bench.judging.judge(unrated) == [liked, disliked]

    run(tmp_path, fitted, scenario, ratings)
