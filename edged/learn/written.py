"""What people wrote, as the trainer sees it: pairs for DPO, and answers for the likelihood of corrections.

The answers get negative ids, two a row of the store: `-2 * id` the written answer or the preferred one, `-2 * id - 1`
the other. They are not those of episodes even where the rejected answer was sampled: here it stands at temperature 1,
whatever it was sampled at, and nothing that was measured of the one may be taken for the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from edged.learn.plan import Rules
from edged.records import WrittenTokens
from engine import protocol


def written_id(answer_id: int) -> int:
    """The row of the store that a negative answer id belongs to."""
    return -answer_id // 2


def pairs_and_corrections(
    written: Sequence[WrittenTokens], rules: Rules
) -> tuple[tuple[protocol.PreferredPair, ...], tuple[protocol.EpisodeTokens, ...]]:
    """What the objectives feed on: a correction is preferred over the answer that it corrects, and is an example."""
    pairs = [
        protocol.PreferredPair(
            chosen=_answer(-2 * one.id, one.prompt_ids, one.chosen_ids),
            rejected=_answer(-2 * one.id - 1, one.prompt_ids, one.rejected_ids),
        )
        for one in written
        if "pairs" in rules.feeds and one.rejected_ids and one.rejected_ids != one.chosen_ids
    ]
    corrections = [
        _answer(-2 * one.id, one.prompt_ids, one.chosen_ids)
        for one in written
        if "corrections" in rules.feeds and one.kind == "correction"
    ]
    return tuple(pairs), tuple(corrections)


def without_sampler(episode: protocol.EpisodeTokens) -> protocol.EpisodeTokens:
    """A sampled answer as KTO sees one that a policy gradient cannot use: nobody asks what its sampler thought of it,
    and its adapter may be gone."""
    return protocol.EpisodeTokens(
        episode_id=episode.episode_id,
        prompt_ids=episode.prompt_ids,
        completion_ids=episode.completion_ids,
        logprobs=(None,) * len(episode.completion_ids),
        temperature=episode.temperature,
        adapter=protocol.BASE,
    )


def _answer(answer_id: int, prompt_ids: tuple[int, ...], completion_ids: tuple[int, ...]) -> protocol.EpisodeTokens:
    return protocol.EpisodeTokens(
        episode_id=answer_id,
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        logprobs=(None,) * len(completion_ids),
        temperature=1.0,
        adapter=protocol.BASE,
    )
