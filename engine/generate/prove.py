"""Work on the spare context that shows what an adapter does: canary log-probabilities and sampled answers.

Each function is a generator that yields between slices, so that the decode steps of running answers go on in between.
The caller owns the decoder and runs nothing else on it meanwhile.

Slices have the same shape whatever else runs, and prompts are evaluated and probes are scored one by one: the same
adapter gives the same canary, bit for bit, and two adapters differ by their weights only.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from engine.generate.answer import Choice, PieceOf
from engine.generate.decoder import Decoder
from engine.generate.sampling import raw_logprob
from engine.generate.scheduler import Piece
from engine.protocol import ProbeTokens, Sampling

# Tokens evaluated between two decode steps of running answers. What is scored or sampled goes in batches of up to 8
# tokens, which use the kernels of single-token decoding, so that the canary matches what requests see. Prompts, of
# which nothing is looked at, go in larger ones: one core takes 20 ms for 8 tokens and 27 ms for 16.
SLICE_TOKENS = 8
PROMPT_SLICE_TOKENS = 16

FLUENCY_TEMPERATURE = 0.7

Canary = tuple[tuple[float, ...], ...]


def score(decoder: Decoder, probes: Sequence[ProbeTokens]) -> Generator[None, None, Canary]:
    """Per probe, the raw log-probability of each completion token.

    Raises:
        NotFinite, DecodeFailed: the decoder is to be abandoned.
    """
    yield from _prefill(decoder, [probe.prompt_ids for probe in probes])
    canary: list[tuple[float, ...]] = []
    for number, probe in enumerate(probes):
        canary.append((yield from _score_one(decoder, probe, number)))
    return tuple(canary)


def _prefill(decoder: Decoder, prompts: Sequence[tuple[int, ...]]) -> Generator[None, None, None]:
    """Evaluate all of every prompt but its last token, whose row is wanted later; the scheduler keeps it for reuse."""
    for number, prompt in enumerate(prompts):
        if len(prompt) < 2:
            continue
        key = ("prompt", number)
        decoder.scheduler.submit(Piece(key, prompt[:-1], rows_from=len(prompt) - 2, room=0))
        while decoder.scheduler.has_work:
            _, evaluated = decoder.step(PROMPT_SLICE_TOKENS)
            if evaluated:
                decoder.scheduler.finish(key)
            yield


def _score_one(decoder: Decoder, probe: ProbeTokens, number: int) -> Generator[None, None, tuple[float, ...]]:
    if not probe.completion_ids:
        return ()
    tokens = probe.prompt_ids + probe.completion_ids
    last = len(tokens) - 2  # the row after the last token would score nothing
    decoder.scheduler.submit(Piece(number, tokens[: last + 1], rows_from=len(probe.prompt_ids) - 1, room=0))
    logprobs: list[float] = []
    while len(logprobs) < len(probe.completion_ids):
        _, evaluated = decoder.step(SLICE_TOKENS)
        logprobs += [raw_logprob(item.row, tokens[item.index + 1]) for item in evaluated]
        yield
    decoder.scheduler.finish(number)
    return tuple(logprobs)


def answer(
    decoder: Decoder,
    prompts: Sequence[tuple[int, ...]],
    *,
    max_tokens: int,
    seed: int,
    eos_ids: frozenset[int],
    piece_of: PieceOf,
) -> Generator[None, None, tuple[tuple[ProbeTokens, ...], tuple[str, ...], Canary]]:
    """One sampled answer to each prompt: its tokens, its text, and the tokens' log-probabilities as they were drawn.

    Raises:
        NotFinite, DecodeFailed: the decoder is to be abandoned.
    """
    yield from _prefill(decoder, prompts)
    sampling = Sampling(temperature=FLUENCY_TEMPERATURE, max_tokens=max_tokens)
    choices = [Choice(sampling, seed=seed, index=index, room=max_tokens) for index in range(len(prompts))]
    for start in range(0, len(prompts), SLICE_TOKENS):
        running = {index: choices[index] for index in range(start, min(start + SLICE_TOKENS, len(prompts)))}
        for index in running:
            tokens = prompts[index]
            decoder.scheduler.submit(Piece(index, tokens, rows_from=len(tokens) - 1, room=max_tokens))
        while running:
            _, evaluated = decoder.step(SLICE_TOKENS)
            for item in evaluated:
                assert isinstance(item.key, int)
                choice = running[item.key]
                sampled = choice.sampler.draw(item.row)
                choice.take(sampled, piece_of, is_eos=sampled.id in eos_ids)
                if choice.finish_reason is None:
                    decoder.scheduler.append(item.key, sampled.id)
                else:
                    decoder.scheduler.finish(item.key)
                    del running[item.key]
            yield
    answers = tuple(
        ProbeTokens(prompt_ids=prompt, completion_ids=tuple(choice.completion_ids))
        for prompt, choice in zip(prompts, choices, strict=True)
    )
    return answers, tuple(choice.text for choice in choices), tuple(_known(choice.logprobs) for choice in choices)


def _known(logprobs: Sequence[float | None]) -> tuple[float, ...]:
    """Of an answer without a constraint, which has all of them."""
    return tuple(value for value in logprobs if value is not None)
