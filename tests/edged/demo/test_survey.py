"""The simulated person against the real HTTP server."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from edged.cli.connect import Peer, open_async_http
from edged.cli.exits import CommandError
from edged.demo import survey
from edged.demo.outcome import Answer, Score
from edged.demo.people import PEOPLE

SHORT = PEOPLE["short"]


def quiet(text: str) -> None:
    pass


def against(light_daemon, steps: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with open_async_http(Peer(socket=light_daemon.socket)) as http:
            return await steps(http)

    return asyncio.run(run())


async def ask_two(http: httpx.AsyncClient) -> list[Answer]:
    return await survey.ask(http, SHORT, ["q1", "q2"], seed=5, tag="round 1", show=quiet)


def test_questions_are_asked_with_their_own_seeds_and_rated_in_private(light_daemon) -> None:
    light_daemon.answers.words = ["It", " is", " blue."]
    answers = against(light_daemon, ask_two)
    assert [answer.rating for answer in answers] == [1.0, 1.0]
    assert sorted(asked.seed for asked in light_daemon.answers.asked) == [5, 6]
    assert {asked.temperature for asked in light_daemon.answers.asked} == {survey.TEMPERATURE}
    assert light_daemon.book.rows == []


def test_every_rating_is_posted_once(light_daemon) -> None:
    light_daemon.answers.words = ["It", " is", " blue."]

    async def steps(http: httpx.AsyncClient) -> None:
        await survey.rate(http, await ask_two(http))

    against(light_daemon, steps)
    assert sorted(row.rating for row in light_daemon.book.rows) == [1.0, 1.0]
    assert {row.source for row in light_daemon.book.rows} == {"demo"}


def test_a_finished_update_is_what_the_person_waits_for(light_daemon) -> None:
    update = against(light_daemon, lambda http: survey.await_update(http, 0, show=quiet))
    assert update is not None
    assert update["id"] == max(row.id for row in light_daemon.control.update_rows)


def test_a_learner_that_wants_contrast_is_not_waited_for(light_daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "SETTLED_S", 0.0)
    light_daemon.control.learner = {"state": "waiting_for_contrast", "ratings_until_update": 0}
    finished = light_daemon.control.status()["learner"]["updates_total"]
    assert against(light_daemon, lambda http: survey.await_update(http, finished, show=quiet)) is None


def test_an_update_without_verdict_is_an_error(light_daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "UPDATE_TIMEOUT_S", 0.3)
    light_daemon.control.learner = {"state": "training", "ratings_until_update": 0}
    with pytest.raises(CommandError, match="no verdict"):
        against(light_daemon, lambda http: survey.await_update(http, 99, show=quiet))


def test_the_trainers_scores_are_found_by_completion_and_those_that_never_come_are_missing(
    light_daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "SCORES_TIMEOUT_S", 0.0)

    async def steps(http: httpx.AsyncClient) -> tuple[list[Answer], dict[str, Score]]:
        answers = await ask_two(http)
        unknown = dataclasses.replace(answers[0], completion_id="chatcmpl-unknown")
        return answers, await survey.await_scores(http, [*answers, unknown], show=quiet)

    answers, scores = against(light_daemon, steps)
    assert scores == {answer.completion_id: Score(logprob=-1.5, kl=0.01) for answer in answers}


def test_a_fingerprint_names_the_adapter_version() -> None:
    assert survey.version_of("edged-0badcafe-v12") == 12
    for wrong in ("", "edged", "fp_1234", "edged-0badcafe-v", "edged-0badcafe-vx"):
        with pytest.raises(CommandError, match="no adapter version"):
            survey.version_of(wrong)
