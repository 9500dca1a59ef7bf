"""Slots as users see them: whose request is next, what a shared prompt costs, and sixty-four answers at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import pytest

from engine import protocol
from engine.generate import llamacpp, worker
from engine.generate.scheduler import Entry
from tests.engine.generate.chatter import Chatter, write_chatter
from tests.engine.generate.desk import Desk, chat, of, start_serve

SLOTS = 64


@pytest.fixture(scope="module")
def chatter(tmp_path_factory: pytest.TempPathFactory) -> Chatter:
    return write_chatter(tmp_path_factory.mktemp("chatter"))


@pytest.fixture(scope="module")
def desk(chatter: Chatter) -> Iterator[Desk]:
    """Four slots."""
    opened = Desk(worker.run, start_serve(str(chatter.file)))
    yield opened
    opened.stop()


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    """Every token that llama.cpp is given."""
    entries: list[Entry] = []
    decode = llamacpp.Context.decode

    def noted(self: llamacpp.Context, batch: Sequence[Entry]) -> list[llamacpp.Row]:
        entries.extend(batch)
        return decode(self, batch)

    monkeypatch.setattr(llamacpp.Context, "decode", noted)
    return entries


def endless(chatter: Chatter, text: str, max_tokens: int, *, user: str = "", n: int = 1) -> protocol.Generate:
    """A request whose answers have all of their tokens."""
    bias = ((chatter.end, -100.0), (chatter.end - 2, -100.0))
    return dataclasses.replace(chat(text, n=n, max_tokens=max_tokens, logit_bias=bias), user=user)


def test_one_request_passes_all_that_another_user_has_waiting(desk: Desk, chatter: Chatter) -> None:
    many = [endless(chatter, f"the cat {number}", 8, user="ann") for number in range(30)]
    for message in many:
        desk.send(message)
    single = endless(chatter, "the hat", 8, user="bob")
    desk.send(single)
    ids = [message.request_id for message in many]
    begun: list[str] = []
    ended: set[str] = set()
    while len(ended) < 31:
        match desk.receive():
            case protocol.Begun() as message:
                begun.append(message.request_id)
            case protocol.RequestDone() as done:
                ended.add(done.request_id)
    assert begun.index(single.request_id) <= 8, "behind what had a slot when it came, and one turn at most"
    assert [request_id for request_id in begun if request_id != single.request_id] == ids


def test_what_has_no_slot_by_its_deadline_is_not_begun_and_what_has_one_goes_on(desk: Desk, chatter: Chatter) -> None:
    running = [endless(chatter, f"the cat {number}", 80) for number in range(4)]
    for message in running:
        desk.send(message)
    for _ in running:
        desk.expect(protocol.Begun, protocol.Chunk)
    late = dataclasses.replace(endless(chatter, "the hat", 3, n=2), queue_timeout_s=1e-6)
    patient = dataclasses.replace(endless(chatter, "a", 3), queue_timeout_s=600.0)
    desk.send(late)
    desk.send(patient)
    failed = desk.expect(protocol.RequestFailed, protocol.Chunk)
    assert (failed.request_id, failed.code) == (late.request_id, "queue_timeout")
    for message in running[1:]:
        desk.send(protocol.Cancel(request_id=message.request_id))
    said = desk.collect(patient.request_id, *(message.request_id for message in running))
    assert isinstance(said[patient.request_id][0], protocol.Begun)
    assert [choice.finish_reason for choice in of(said[running[0].request_id], protocol.ChoiceDone)] == ["length"]
    assert desk.version() == 0


@pytest.mark.parametrize("others", [0, 6])
def test_eight_choices_evaluate_their_prompt_once(
    desk: Desk, chatter: Chatter, evaluated: list[Entry], others: int
) -> None:
    text = f"{others} " + "a prompt of its own, " * 8
    eight = endless(chatter, text, 5, user="ann", n=8)
    rest = [endless(chatter, f"{number} cats sat", 5, user="bob") for number in range(others)]
    for message in (eight, *rest):
        desk.send(message)
    said = desk.collect(*(message.request_id for message in (eight, *rest)))
    (begun,) = of(said[eight.request_id], protocol.Begun)
    assert len(of(said[eight.request_id], protocol.ChoiceDone)) == 8
    n_prompt = len(begun.prompt_ids)
    # Some of the prompt may be there from another request; its last token is evaluated again for each choice's row.
    of_others = sum(len(of(said[message.request_id], protocol.Begun)[0].prompt_ids) for message in rest)
    sampled = (8 + others) * (5 - 1)
    assert len(evaluated) - sampled <= n_prompt + 7 + of_others
    middle = [e for e in evaluated if e.position == n_prompt // 2 and e.token == begun.prompt_ids[n_prompt // 2]]
    assert len(middle) == 1


def test_sixty_four_answers_run_at_once_and_share_what_their_prompts_begin_with(chatter: Chatter) -> None:
    desk = Desk(worker.run, start_serve(str(chatter.file), slots=SLOTS, context_tokens=8192))
    try:
        first = endless(chatter, "the cat sat", 20)
        desk.ask(first)
        messages = [endless(chatter, f"the cat sat {number}", 20, user=f"user {number}") for number in range(SLOTS + 6)]
        for message in messages:
            desk.send(message)
        running = most = 0
        ended: set[str] = set()
        while len(ended) < len(messages):
            match desk.receive():
                case protocol.Begun():
                    running += 1
                    most = max(most, running)
                case protocol.RequestDone() as done:
                    running -= 1
                    ended.add(done.request_id)
                    assert done.cached_tokens >= 10, "the template, the role and the text that all begin with"
        assert most == SLOTS
    finally:
        desk.stop()
