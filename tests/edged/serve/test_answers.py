"""Answers under way: the order of their events, what is on disk when, and what happens when a worker dies.

The tests play the serve worker: they see what was sent to it and hand in its messages."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest

from edged.answer import AnswerEvent, Ask, Ended, Piece, Started, Usage
from edged.records import Caller, Episode, ShownCalls
from edged.refusal import Refused
from edged.serve.admission import Limits
from edged.serve.answers import RUNS_MAX, Answers
from edged.serve.translation import Serving
from engine import protocol

GUARD_S = 30.0


class LightEngine:
    """Keeps what was sent to the worker."""

    def __init__(self) -> None:
        self.is_ready = True
        self.sent: list[protocol.Message] = []

    def send(self, message: protocol.Message) -> None:
        assert self.is_ready
        self.sent.append(message)

    @property
    def cancelled(self) -> list[str]:
        return [message.request_id for message in self.sent if isinstance(message, protocol.Cancel)]

    @property
    def asked(self) -> list[protocol.Generate]:
        return [message for message in self.sent if isinstance(message, protocol.Generate)]


class LightDisk:
    """Keeps episodes; a test may hold the disk back, or break it."""

    def __init__(self) -> None:
        self.episodes: list[Episode] = []
        self.stored: dict[str, ShownCalls | None] = {}
        self.works = asyncio.Event()
        self.works.set()
        self.failure: Exception | None = None

    async def add(self, episode: Episode, *, store: bool = False, shown: ShownCalls | None = None) -> int:
        await self.works.wait()
        if self.failure is not None:
            raise self.failure
        self.episodes.append(episode)
        if store:
            self.stored[episode.completion_id] = shown
        return len(self.episodes)


class Serve:
    """Answers on a light engine and a light disk, and readers of them."""

    def __init__(
        self,
        *,
        slots: int = 4,
        max_queue: int = 4,
        wait_s: float = GUARD_S,
        ready: bool = True,
        queue_timeout_s: float = 600.0,
    ) -> None:
        self.engine = LightEngine()
        self.disk = LightDisk()
        self.recorded: list[tuple[int, Episode]] = []
        self.waiting: list[int] = []  # requests without a text, whenever that may have changed
        self.load: list[tuple[int, int]] = []  # sequences under way, and requests that the worker had by then
        self.answers = Answers(
            Serving(model="small", base_sha256="0123456789abcdef" * 4, wait_s=wait_s),
            lambda: Limits(slots=slots, max_queue=max_queue),
            lambda: 64,
            lambda: queue_timeout_s,
            self.engine,
            self.disk,
            lambda episode_id, episode: self.recorded.append((episode_id, episode)),
            lambda: self.load.append((self.answers.active, len(self.engine.asked))),
            self.waiting.append,
        )
        if ready:
            self.worker_ready()

    def worker_ready(self) -> None:
        self.engine.is_ready = True
        self.answers.ready()

    def worker_dies(self) -> None:
        self.engine.is_ready = False
        self.answers.down()

    def says(self, *messages: protocol.Message) -> None:
        for message in messages:
            assert self.answers.received(message)

    def read(self, ask: Ask) -> Reader:
        return Reader(self.answers.ask(ask))

    async def settle(self) -> None:
        """Until nothing is left to do without the worker, the disk or time."""
        for _ in range(20):
            await asyncio.sleep(0)


class Reader:
    """Reads an answer in a task of its own."""

    def __init__(self, events: AsyncIterator[AnswerEvent]) -> None:
        self.got: list[AnswerEvent] = []
        self.events = events
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for event in self.events:
            self.got.append(event)

    async def end(self) -> list[AnswerEvent]:
        async with asyncio.timeout(GUARD_S):
            await self.task
        return self.got

    async def refusal(self) -> Refused:
        with pytest.raises(Refused) as caught:
            await self.end()
        return caught.value

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    @property
    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.got]


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(cast(Any, scenario()))


def ask(completion_id: str = "c1", **changes: Any) -> Ask:
    values: dict[str, Any] = {
        "completion_id": completion_id,
        "messages": [{"role": "user", "content": "Why?"}],
        "prompt": None,
        "n": 1,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "seed": 5,
        "max_tokens": None,
        "stop": (),
        "logprobs": False,
        "top_logprobs": 0,
        "user": "ann",
        "metadata": {"page": "1"},
        "caller": Caller(name="uid:1000", scopes=frozenset()),
    }
    return Ask(**{**values, **changes})


def begun(request_id: str = "c1", version: int = 2) -> protocol.Begun:
    return protocol.Begun(request_id=request_id, version=version, prompt_ids=(1, 2, 3))


def chunk(text: str, choice: int = 0, request_id: str = "c1", **changes: Any) -> protocol.Chunk:
    return protocol.Chunk(request_id=request_id, choice=choice, text=text, **changes)


def choice_done(choice: int = 0, request_id: str = "c1", **changes: Any) -> protocol.ChoiceDone:
    values: dict[str, Any] = {
        "finish_reason": "stop",
        "completion_ids": (4, 5),
        "logprobs": (-0.5, None),
        "raw_logprobs": (-0.75, -1.5),
        "text": "Because.",
        "seed": 77,
    }
    return protocol.ChoiceDone(request_id=request_id, choice=choice, **{**values, **changes})


def request_done(request_id: str = "c1") -> protocol.RequestDone:
    return protocol.RequestDone(
        request_id=request_id,
        prompt_tokens=3,
        cached_tokens=1,
        completion_tokens=2,
        queue_s=0.0,
        prefill_s=0.0,
        decode_s=0.0,
    )


# --------------------------------------------------------------------------------------------------------- events


def test_the_events_of_an_answer_come_in_order() -> None:
    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(ask())
        await serve.settle()
        serve.says(begun(), chunk("Be"), chunk("cause."), choice_done(), request_done())
        started, *rest = await reader.end()
        assert isinstance(started, Started)
        assert (started.version, started.fingerprint) == (2, "edged-01234567-v2")
        assert rest == [
            Piece(choice=0, text="Be", tokens=()),
            Piece(choice=0, text="cause.", tokens=()),
            Ended(choice=0, finish_reason="stop"),
            Usage(prompt_tokens=3, cached_tokens=1, completion_tokens=2),
        ]

    run(scenario)


def test_who_gives_way_to_users_hears_of_a_request_before_the_worker_does_and_of_its_end() -> None:
    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(ask(n=1))
        await serve.settle()
        assert serve.load == [(1, 0)]
        assert len(serve.engine.asked) == 1
        serve.says(begun(), choice_done(), request_done())
        await reader.end()
        assert serve.load == [(1, 0), (0, 1)]

    run(scenario)


def test_an_answer_without_text_still_starts_before_it_ends() -> None:
    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(ask())
        await serve.settle()
        serve.says(begun(), chunk(""), choice_done(completion_ids=(), text=""), request_done())
        await reader.end()
        assert reader.kinds == ["Started", "Ended", "Usage"]

    run(scenario)


def test_the_episode_is_on_disk_before_its_choice_ends() -> None:
    async def scenario() -> None:
        serve = Serve()
        serve.disk.works.clear()
        reader = serve.read(ask())
        await serve.settle()
        serve.says(begun(), chunk("Because."), choice_done(), request_done())
        await serve.settle()
        assert reader.kinds == ["Started", "Piece"]
        serve.disk.works.set()
        await reader.end()
        assert reader.kinds == ["Started", "Piece", "Ended", "Usage"]

    run(scenario)


def test_an_episode_holds_what_was_asked_and_what_was_sampled() -> None:
    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(ask())
        await serve.settle()
        serve.says(begun(), chunk("Because."), choice_done(), request_done())
        started = (await reader.end())[0]
        assert isinstance(started, Started)
        (episode,) = serve.disk.episodes
        assert episode == Episode(
            id=0,
            completion_id="c1",
            choice=0,
            created_at=started.created_at,
            kind="chat",
            model="small",
            base_sha256="0123456789abcdef" * 4,
            version=2,
            messages=[{"role": "user", "content": "Why?"}],
            prompt=None,
            prompt_ids=(1, 2, 3),
            completion_ids=(4, 5),
            logprobs=(-0.5, None),
            raw_logprobs=(-0.75, -1.5),
            text="Because.",
            finish_reason="stop",
            temperature=0.7,
            top_p=1.0,
            top_k=0,
            seed=77,
            max_tokens=None,
            user="ann",
            metadata={"page": "1"},
            caller="uid:1000",
        )
        assert serve.recorded == [(1, episode)]

    run(scenario)


def test_a_text_completion_makes_a_text_episode() -> None:
    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(ask(messages=None, prompt="Once"))
        await serve.settle()
        serve.says(begun(), choice_done(), request_done())
        await reader.end()
        assert (serve.disk.episodes[0].kind, serve.disk.episodes[0].prompt) == ("text", "Once")
        assert (serve.engine.asked[0].messages, serve.engine.asked[0].prompt) == (None, "Once")

    run(scenario)


def test_every_choice_is_an_episode_of_its_own() -> None:
    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(ask(n=2))
        await serve.settle()
        serve.says(begun(), chunk("A", 1), choice_done(1), chunk("B", 0), choice_done(0), request_done())
        await reader.end()
        assert reader.kinds == ["Started", "Piece", "Ended", "Piece", "Ended", "Usage"]
        assert [episode.choice for episode in serve.disk.episodes] == [1, 0]

    run(scenario)


def test_token_log_probabilities_are_shown_as_openai_shows_them() -> None:
    token = protocol.TokenLogprob(
        id=9,
        text="é",
        bytes=(195, 169),
        logprob=-0.5,
        top=(protocol.TopLogprob(id=8, text="e", bytes=(101,), logprob=-1.0),),
    )

    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(ask(logprobs=True, top_logprobs=1))
        await serve.settle()
        serve.says(begun(), chunk("", tokens=(token,)), choice_done(), request_done())
        piece = (await reader.end())[1]
        assert isinstance(piece, Piece)
        assert piece.tokens == (
            {
                "token": "é",
                "logprob": -0.5,
                "bytes": [195, 169],
                "top_logprobs": [{"token": "e", "logprob": -1.0, "bytes": [101]}],
            },
        )

    run(scenario)


@pytest.mark.parametrize(("max_tokens", "sent"), [(None, 64), (7, 7)])
def test_the_worker_is_asked_for_at_most_the_tokens_of_the_request_or_the_default(
    max_tokens: int | None, sent: int
) -> None:
    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(ask(max_tokens=max_tokens, stop=("\n",)))
        await serve.settle()
        assert serve.engine.asked[0].sampling == protocol.Sampling(
            temperature=0.7, seed=5, max_tokens=sent, stop=("\n",)
        )
        await reader.leave()

    run(scenario)


def test_what_shaped_an_answer_is_asked_of_the_worker_and_recorded() -> None:
    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(ask(min_p=0.1, logit_bias=((7, -100.0),)))
        await serve.settle()
        sampling = serve.engine.asked[0].sampling
        assert (sampling.min_p, sampling.logit_bias) == (0.1, ((7, -100.0),))
        serve.says(begun(), choice_done(), request_done())
        await reader.end()
        assert serve.disk.episodes[0].shaped_by == "min_p logit_bias"

    run(scenario)


def test_a_schema_that_an_answer_is_held_to_is_asked_of_the_worker_and_named_in_the_record() -> None:
    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(ask(schema='{"type":"object"}', min_p=0.1))
        await serve.settle()
        assert serve.engine.asked[0].schema == '{"type":"object"}'
        serve.says(begun(), choice_done(), request_done())
        await reader.end()
        assert serve.disk.episodes[0].shaped_by == "min_p response_format"

    run(scenario)


def test_a_schema_that_cannot_be_held_is_the_clients_mistake() -> None:
    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(ask(schema="{}"))
        await serve.settle()
        serve.says(protocol.RequestFailed(request_id="c1", code="bad_response_format", message="no"))
        refused = await reader.refusal()
        assert (refused.status, refused.code, refused.param) == (400, "bad_response_format", "response_format")

    run(scenario)


def test_a_call_of_a_tool_goes_out_as_it_comes_and_is_why_the_answer_ended() -> None:
    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(ask(tools="[]", must_call=("look",), one_call=True, store=True))
        await serve.settle()
        asked = serve.engine.asked[0]
        assert (asked.tools, asked.must_call, asked.one_call) == ("[]", ("look",), True)
        call = protocol.ToolCall(id="call_1", name="look", arguments="{}")
        serve.says(begun(), protocol.Called(request_id="c1", choice=0, call=call))
        serve.says(choice_done(text="<tool_call>", calls=1), request_done())
        events = await reader.end()
        entry = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        assert events[1:3] == [
            Piece(choice=0, text="", tokens=(), calls=(entry,)),
            Ended(choice=0, finish_reason="tool_calls"),
        ]
        (episode,) = serve.disk.episodes
        assert (episode.finish_reason, episode.text, episode.shaped_by) == ("stop", "<tool_call>", "tool_choice")
        assert serve.disk.stored == {"c1": ShownCalls(text="", calls=(entry,))}

    run(scenario)


@pytest.mark.parametrize("code", ["bad_tools", "tools_not_supported"])
def test_tools_that_cannot_be_offered_are_the_clients_mistake(code: str) -> None:
    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(ask(tools="[]"))
        await serve.settle()
        serve.says(protocol.RequestFailed(request_id="c1", code=code, message="no"))
        refused = await reader.refusal()
        assert (refused.status, refused.code, refused.param) == (400, code, "tools")

    run(scenario)


def test_messages_of_other_jobs_are_left_to_them() -> None:
    async def scenario() -> None:
        serve = Serve()
        assert not serve.answers.received(protocol.Routed(job_id="route-1", version=1, swap_ms=0.0))
        assert serve.answers.received(chunk("late", request_id="forgotten"))

    run(scenario)


# --------------------------------------------------------------------------------------------- a worker that dies


def test_an_answer_is_made_again_if_the_worker_dies_before_anything_was_shown() -> None:
    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(ask())
        await serve.settle()
        serve.says(begun(version=2), chunk(""))
        serve.worker_dies()
        await serve.settle()
        assert len(serve.engine.asked) == 1
        serve.worker_ready()
        await serve.settle()
        first, second = serve.engine.asked
        assert second == dataclasses.replace(first, queue_timeout_s=None), "it had begun, and waits for no slot"
        serve.says(begun(version=3), chunk("Because."), choice_done(), request_done())
        await reader.end()
        assert reader.kinds == ["Started", "Piece", "Ended", "Usage"]
        assert [episode.version for episode in serve.disk.episodes] == [3]
        assert serve.answers.counters()["rerun_total"] == 1

    run(scenario)


def test_an_answer_that_is_not_streamed_is_run_again_even_if_a_choice_of_it_was_done() -> None:
    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(ask(stream=False, n=2))
        await serve.settle()
        serve.says(begun(version=2), chunk("lost"), choice_done(text="lost"))
        await serve.settle()
        assert (reader.got, serve.disk.episodes) == ([], [])
        serve.worker_dies()
        serve.worker_ready()
        await serve.settle()
        serve.says(begun(version=3), chunk("whole"), choice_done(text="whole"))
        serve.says(choice_done(1, text=""), request_done())
        await reader.end()
        assert reader.kinds == ["Started", "Piece", "Ended", "Ended", "Usage"]
        assert [(e.choice, e.version, e.text) for e in serve.disk.episodes] == [(0, 3, "whole"), (1, 3, "")]
        assert (reader.got[0].version, reader.got[1].text) == (3, "whole")
        assert serve.answers.counters()["rerun_total"] == 1

    run(scenario)


@pytest.mark.parametrize("shown", [chunk("Be"), choice_done()])
def test_an_answer_that_was_shown_in_part_is_interrupted_if_the_worker_dies(shown: protocol.Message) -> None:
    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(ask(n=2))
        await serve.settle()
        serve.says(begun(), shown)
        await serve.settle()
        serve.worker_dies()
        refused = await reader.refusal()
        assert (refused.status, refused.code) == (503, "answer_interrupted")
        assert refused.retry_after_s is not None
        assert "c1" in refused.message
        assert not serve.answers.is_running("c1")

    run(scenario)


def test_what_the_worker_said_before_it_died_is_still_shown() -> None:
    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(ask())
        await serve.settle()
        serve.says(begun(), chunk("Because."), choice_done(), request_done())
        serve.worker_dies()
        await reader.end()
        assert reader.kinds == ["Started", "Piece", "Ended", "Usage"]

    run(scenario)


def test_a_request_that_kills_every_worker_is_given_up() -> None:
    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(ask())
        for _ in range(RUNS_MAX):
            serve.worker_ready()
            await serve.settle()
            serve.worker_dies()
            await serve.settle()
        assert (await reader.refusal()).code == "answer_interrupted"
        assert len(serve.engine.asked) == RUNS_MAX

    run(scenario)


def test_a_death_does_not_touch_answers_that_the_worker_did_not_have() -> None:
    async def scenario() -> None:
        serve = Serve(ready=False)
        serve.engine.is_ready = False
        reader = serve.read(ask())
        await serve.settle()
        serve.worker_dies()
        serve.worker_ready()
        await serve.settle()
        serve.says(begun(), choice_done(), request_done())
        await reader.end()
        assert serve.answers.counters()["rerun_total"] == 0

    run(scenario)


def test_a_request_waits_while_no_worker_is_ready() -> None:
    async def scenario() -> None:
        serve = Serve(ready=False)
        reader = serve.read(ask())
        await serve.settle()
        assert serve.engine.sent == []
        assert serve.answers.is_running("c1")
        serve.worker_ready()
        await serve.settle()
        assert [message.request_id for message in serve.engine.asked] == ["c1"]
        await reader.leave()

    run(scenario)


def test_a_request_does_not_wait_for_ever() -> None:
    async def scenario() -> None:
        refused = await Serve(ready=False, wait_s=0.01).read(ask()).refusal()
        assert (refused.status, refused.code) == (503, "engine_unavailable")
        assert refused.retry_after_s is not None

    run(scenario)


# ------------------------------------------------------------------------------------------- readers that go away


def test_a_reader_that_leaves_cancels_the_work_and_the_episode_is_still_recorded() -> None:
    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(ask())
        await serve.settle()
        serve.says(begun(), chunk("Be"))
        await serve.settle()
        await reader.leave()
        assert serve.engine.cancelled == ["c1"]
        assert serve.answers.is_running("c1")
        serve.says(choice_done(finish_reason="cancelled", text="Be"), request_done())
        await serve.answers.drained()
        assert [episode.finish_reason for episode in serve.disk.episodes] == ["cancelled"]
        assert not serve.answers.is_running("c1")

    run(scenario)


def test_closing_the_iterator_cancels_the_work() -> None:
    async def scenario() -> None:
        serve = Serve()
        events = serve.answers.ask(ask())
        first = asyncio.ensure_future(anext(events))
        await serve.settle()
        serve.says(begun(), chunk("Be"))
        await first
        await cast(Any, events).aclose()
        assert serve.engine.cancelled == ["c1"]
        serve.says(choice_done(finish_reason="cancelled"), request_done())
        await serve.answers.drained()

    run(scenario)


def test_an_answer_that_ended_is_not_cancelled() -> None:
    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(ask())
        await serve.settle()
        serve.says(begun(), choice_done(), request_done())
        await reader.end()
        assert serve.engine.cancelled == []

    run(scenario)


def test_a_request_whose_reader_left_before_a_worker_was_ready_is_never_run() -> None:
    async def scenario() -> None:
        serve = Serve(ready=False)
        serve.engine.is_ready = False
        reader = serve.read(ask())
        await serve.settle()
        await reader.leave()
        serve.worker_ready()
        await serve.answers.drained()
        assert serve.engine.sent == []

    run(scenario)


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("code", "status"),
    [("context_length_exceeded", 400), ("bad_template", 400), ("bad_prompt", 400), ("engine_error", 503)],
)
def test_what_the_engine_refuses_is_refused_with_its_code(code: str, status: int) -> None:
    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(ask())
        await serve.settle()
        serve.says(protocol.RequestFailed(request_id="c1", code=code, message="too long by 3 tokens"))
        refused = await reader.refusal()
        assert (refused.status, refused.code, refused.message) == (status, code, "too long by 3 tokens")
        assert (refused.retry_after_s is not None) == (status == 503)
        assert reader.got == []

    run(scenario)


@pytest.mark.parametrize(
    ("of", "param"),
    [({}, "messages"), ({"messages": None, "prompt": "Once"}, "prompt")],
)
def test_a_refusal_names_the_field_that_was_refused(of: dict[str, Any], param: str) -> None:
    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(ask(**of))
        await serve.settle()
        serve.says(protocol.RequestFailed(request_id="c1", code="context_length_exceeded", message="too long"))
        assert (await reader.refusal()).param == param

    run(scenario)


def test_a_request_that_never_fits_is_told_so_instead_of_when_to_come_back() -> None:
    async def scenario() -> None:
        serve = Serve(slots=2, max_queue=1)
        refused = await serve.read(ask("c1", n=4)).refusal()
        assert (refused.status, refused.code, refused.param) == (400, "too_many_choices", "n")
        assert refused.retry_after_s is None

    run(scenario)


def test_a_request_beyond_slots_and_queue_gets_429_and_takes_no_room() -> None:
    async def scenario() -> None:
        serve = Serve(slots=2, max_queue=1)
        readers = [serve.read(ask("c1", n=2)), serve.read(ask("c2"))]
        await serve.settle()
        refused = await serve.read(ask("c3")).refusal()
        assert (refused.status, refused.code) == (429, "too_many_requests")
        assert refused.retry_after_s is not None
        assert (serve.answers.active, serve.answers.queued) == (3, 1)
        assert serve.answers.counters()["refused_total"] == 1
        serve.says(begun("c2"), choice_done(request_id="c2"), request_done("c2"))
        await readers[1].end()
        readers.append(serve.read(ask("c3")))
        await serve.settle()
        assert serve.answers.is_running("c3")
        for reader in readers:
            await reader.leave()

    run(scenario)


def test_a_user_who_fills_the_queue_is_refused_while_another_still_gets_in() -> None:
    async def scenario() -> None:
        serve = Serve(slots=1, max_queue=20)
        readers = [serve.read(ask(f"a{number}", user="ann")) for number in range(19)]
        await serve.settle()
        refused = await serve.read(ask("one more", user="ann")).refusal()
        assert (refused.status, refused.code) == (429, "too_many_requests")
        assert refused.message.startswith("19 sequences of this user")
        readers += [serve.read(ask("b1", user="bob")), serve.read(ask("c1", user=None))]
        await serve.settle()
        assert serve.answers.is_running("b1")
        assert serve.answers.is_running("c1")
        assert [message.user for message in serve.engine.asked][-3:] == ["user:ann", "user:bob", "uid:1000"]
        for reader in readers:
            await reader.leave()

    run(scenario)


def test_the_worker_is_told_how_long_a_request_may_wait_the_shorter_of_its_own_and_everybodys() -> None:
    async def scenario() -> None:
        serve = Serve(queue_timeout_s=50.0)
        readers = [
            serve.read(ask("c1")),
            serve.read(ask("c2", queue_timeout_s=20.0)),
            serve.read(ask("c3", queue_timeout_s=90.0)),
        ]
        await serve.settle()
        told = [message.queue_timeout_s for message in serve.engine.asked]
        for left_s, most_s in zip(told, (50.0, 20.0, 50.0), strict=True):
            assert left_s is not None
            assert most_s - GUARD_S < left_s <= most_s
        for reader in readers:
            await reader.leave()

    run(scenario)


def test_a_request_that_waited_too_long_gets_429_and_when_to_come_back_and_is_no_broken_answer() -> None:
    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(ask())
        await serve.settle()
        serve.says(protocol.RequestFailed(request_id="c1", code="queue_timeout", message="no slot"))
        refused = await reader.refusal()
        assert (refused.status, refused.code, refused.param) == (429, "queue_timeout", None)
        assert refused.retry_after_s is not None
        assert refused.retry_after_s >= 1.0
        assert serve.answers.counters()["failed_total"] == 0

    run(scenario)


def test_a_request_does_not_wait_longer_for_a_worker_that_starts_than_for_a_slot() -> None:
    async def scenario() -> None:
        serve = Serve(ready=False)
        refused = await serve.read(ask(queue_timeout_s=0.01)).refusal()
        assert (refused.status, refused.code) == (429, "queue_timeout")

    run(scenario)


def test_a_request_that_had_begun_when_its_worker_died_is_run_again_however_long_that_takes() -> None:
    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(ask(queue_timeout_s=30.0))
        await serve.settle()
        serve.says(begun())
        await serve.settle()
        serve.worker_dies()
        serve.worker_ready()
        await serve.settle()
        assert [message.queue_timeout_s is None for message in serve.engine.asked] == [False, True]
        await reader.leave()

    run(scenario)


def test_who_waits_for_a_first_token_is_told_whether_it_is_streamed_or_not() -> None:
    async def scenario() -> None:
        serve = Serve()
        readers = [serve.read(ask("c1", stream=True)), serve.read(ask("c2", stream=False))]
        await serve.settle()
        assert serve.waiting[-1] == 2
        for number, left in (("c1", 1), ("c2", 0)):
            serve.says(begun(number), chunk("a", request_id=number))
            await serve.settle()
            assert serve.waiting[-1] == left
        serve.worker_dies()
        await serve.settle()
        assert serve.waiting[-1] == 1, "what has shown nothing begins again"
        for reader in readers:
            await reader.leave()

    run(scenario)


def test_a_stopping_daemon_takes_no_new_request_and_finishes_the_ones_it_has() -> None:
    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(ask())
        await serve.settle()
        serve.answers.close("the daemon is stopping")
        refused = await serve.read(ask("c2")).refusal()
        assert (refused.status, refused.code, refused.message) == (503, "shutting_down", "the daemon is stopping")
        serve.says(begun(), choice_done(), request_done())
        await reader.end()
        assert reader.kinds == ["Started", "Ended", "Usage"]

    run(scenario)


def test_cancelling_all_ends_every_answer_with_what_it_has() -> None:
    async def scenario() -> None:
        serve = Serve()
        readers = [serve.read(ask(name)) for name in ("c1", "c2")]
        await serve.settle()
        serve.answers.cancel_all()
        assert sorted(serve.engine.cancelled) == ["c1", "c2"]
        for name, reader in zip(("c1", "c2"), readers, strict=True):
            serve.says(begun(name), choice_done(request_id=name, finish_reason="cancelled"), request_done(name))
            await reader.end()
        await serve.answers.drained()
        assert len(serve.disk.episodes) == 2

    run(scenario)


def test_cancelling_all_without_a_worker_refuses_the_requests_that_wait() -> None:
    async def scenario() -> None:
        serve = Serve(ready=False)
        serve.engine.is_ready = False
        reader = serve.read(ask())
        await serve.settle()
        serve.answers.close("the daemon is stopping")
        serve.answers.cancel_all()
        refused = await reader.refusal()
        assert (refused.status, refused.code) == (503, "shutting_down")
        await serve.answers.drained()

    run(scenario)


def test_a_disk_that_fails_ends_the_answer_and_stops_the_worker_on_it() -> None:
    async def scenario() -> None:
        serve = Serve()
        serve.disk.failure = OSError("no space left on device")
        reader = serve.read(ask(n=2))
        await serve.settle()
        serve.says(begun(), chunk("Be"), choice_done())
        with pytest.raises(OSError, match="no space left"):
            await reader.end()
        assert "Ended" not in reader.kinds
        assert serve.engine.cancelled == ["c1"]
        assert serve.answers.active == 0

    run(scenario)


def test_counters_tell_what_has_happened() -> None:
    async def scenario() -> None:
        serve = Serve()
        good, bad, broken = serve.read(ask("c1")), serve.read(ask("c2")), serve.read(ask("c3"))
        await serve.settle()
        serve.says(begun("c1"), choice_done(request_id="c1"), request_done("c1"))
        serve.says(protocol.RequestFailed(request_id="c2", code="bad_prompt", message="the client's mistake"))
        serve.says(protocol.RequestFailed(request_id="c3", code="engine_error", message="no memory"))
        await good.end()
        await bad.refusal()
        await broken.refusal()
        assert serve.answers.counters() == {
            "finished_total": 1,
            "failed_total": 1,
            "refused_total": 0,
            "rerun_total": 0,
            "completion_tokens_total": 2,
        }

    run(scenario)


def test_a_step_of_the_wall_clock_does_not_change_when_clients_are_told_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        serve = Serve(slots=1, max_queue=0)
        monkeypatch.setattr("time.time", lambda: 0.0)
        reader = serve.read(ask())
        await serve.settle()
        monkeypatch.setattr("time.time", lambda: 1.8e9)
        serve.says(begun(), choice_done(), request_done())
        await reader.end()
        busy = serve.read(ask("c2"))
        await serve.settle()
        refused = await serve.read(ask("c3")).refusal()
        assert refused.retry_after_s is not None
        assert refused.retry_after_s < 60.0
        await busy.leave()

    run(scenario)


def test_the_seed_of_an_episode_is_the_one_that_was_used() -> None:
    async def scenario() -> None:
        serve = Serve()
        reader = serve.read(dataclasses.replace(ask(), seed=None))
        await serve.settle()
        assert serve.engine.asked[0].sampling.seed is None
        serve.says(begun(), choice_done(seed=123), request_done())
        await reader.end()
        assert serve.disk.episodes[0].seed == 123

    run(scenario)


def test_a_request_that_the_link_does_not_take_is_refused_and_the_next_one_is_answered() -> None:
    async def scenario() -> None:
        serve = Serve()
        keep = serve.engine.send

        def send(message: protocol.Message) -> None:
            protocol.encode(message, 1)
            keep(message)

        serve.engine.send = send  # type: ignore[method-assign]
        refused = await serve.read(ask(messages=None, prompt="a" * protocol.MAX_MESSAGE_BYTES)).refusal()
        assert (refused.status, refused.code) == (400, "not_sendable")
        assert "the limit is 16777216; send less at once" in refused.message
        assert (serve.engine.sent, serve.answers.active) == ([], 0)
        reader = serve.read(ask("c2"))
        await serve.settle()
        serve.says(begun("c2"), chunk("Because.", request_id="c2"), choice_done(request_id="c2"))
        await serve.settle()
        assert [message.request_id for message in serve.engine.asked] == ["c2"]
        await reader.leave()

    run(scenario)
