"""Answers: what is recorded and what is sent for each sampled token."""

from __future__ import annotations

from engine.generate.answer import Answer, Choice
from engine.generate.sampling import Sampled
from engine.protocol import Sampling, TokenLogprob

PIECES = {0: b"", 1: b"Hel", 2: b"lo", 3: b" wor", 4: b"ld", 5: "é".encode()[:1], 6: "é".encode()[1:]}
EOS = 0


def take(choice: Choice, token: int) -> tuple[str, tuple[TokenLogprob, ...]]:
    return choice.take(Sampled(token, -0.5, -0.7, ((token, -0.7),)), PIECES.__getitem__, is_eos=token == EOS)


def choice(*, room: int = 10, stop: tuple[str, ...] = (), logprobs: bool = True) -> Choice:
    return Choice(Sampling(stop=stop, logprobs=logprobs, top_logprobs=1), seed=3, index=1, room=room)


def test_a_sampled_end_of_sequence_is_recorded_as_a_token_and_adds_no_text() -> None:
    c = choice()
    texts = [take(c, token)[0] for token in (1, 2, EOS)]
    done = c.done("r")
    assert (done.finish_reason, done.text, "".join(texts)) == ("stop", "Hello", "Hello")
    assert done.completion_ids == (1, 2, EOS)
    assert len(done.logprobs) == len(done.raw_logprobs) == 3
    assert done.seed == 3


def test_the_last_token_that_has_room_ends_the_answer() -> None:
    c = choice(room=2)
    take(c, 1)
    take(c, 2)
    assert c.done("r").finish_reason == "length"


def test_a_stop_string_ends_the_answer_and_its_tokens_are_recorded_but_not_shown() -> None:
    c = choice(stop=("lo wor",))
    sent = [take(c, token) for token in (1, 2, 3)]
    done = c.done("r")
    assert (done.finish_reason, done.text) == ("stop", "Hel")
    assert done.completion_ids == (1, 2, 3)
    assert [entry.id for _, entries in sent for entry in entries] == [1]


def test_token_entries_wait_for_their_text() -> None:
    c = choice(stop=("lo!",))
    assert [entry.id for entry in take(c, 1)[1]] == [1]
    assert take(c, 2) == ("l", ())
    text, entries = take(c, 3)
    assert text == "lo wor"
    assert [entry.id for entry in entries] == [2, 3]


def test_the_texts_sent_add_up_to_the_text_of_the_record_also_when_cancelled() -> None:
    c = choice(stop=("lo wox",))
    texts = [take(c, token)[0] for token in (1, 2, 3)]
    texts.append(c.cancel()[0])
    done = c.done("r")
    assert "".join(texts) == done.text == "Hello wor"
    assert done.finish_reason == "cancelled"


def test_a_character_over_two_tokens_is_shown_whole_and_both_tokens_have_entries() -> None:
    c = choice()
    first, second = take(c, 5), take(c, 6)
    assert (first[0], second[0]) == ("", "é")
    assert [entry.bytes for entry in (*first[1], *second[1])] == [(0xC3,), (0xA9,)]


def test_without_logprobs_no_entries_are_made_but_all_is_recorded() -> None:
    c = choice(logprobs=False)
    assert take(c, 1) == ("Hel", ())
    assert c.cancel() == ("", ())
    assert c.done("r").logprobs == (-0.5,)


def test_times_and_counts_are_of_the_whole_request() -> None:
    choices = (choice(), choice())
    answer = Answer("r", (9, 9, 9), choices, arrived_at=1.0)
    answer.begin(0, cached_tokens=2, now=2.0)
    answer.note_token(4.0)
    answer.note_token(5.0)
    take(choices[0], 1)
    for c in choices:
        c.cancel()
    done = answer.done(8.0)
    assert answer.is_done
    assert (done.queue_s, done.prefill_s, done.decode_s) == (1.0, 2.0, 4.0)
    assert (done.prompt_tokens, done.cached_tokens, done.completion_tokens) == (3, 2, 1)
