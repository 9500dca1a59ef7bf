"""Memory that ran out: how to tell, and what to try instead.

Where it runs out in the middle of an update, the update is run again from its start with half as many tokens in a
micro-batch, until every answer is alone in one. The job on disk says with how many, so that a replay after a kill
starts where this run got to, and an update stays a function of its job.
"""

from __future__ import annotations

import dataclasses

import torch

from engine.protocol import TrainPlan
from engine.train.batch import Selection


class OutOfMemory(Exception):
    """Raised when an allocation failed, in this process or in another one that works on the same update."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is an allocation that failed."""
    # torch's CPU allocator has no exception type of its own.
    return isinstance(error, MemoryError | torch.OutOfMemoryError | OutOfMemory) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def halved(plan: TrainPlan, selection: Selection) -> TrainPlan | None:
    """The plan with smaller micro-batches; None if each holds a single answer (or pair) already."""
    shortest = min(_lengths(selection))
    if plan.micro_batch_tokens <= shortest:
        return None
    tokens = max(plan.micro_batch_tokens // 2, shortest)
    return dataclasses.replace(plan, micro_batch_tokens=tokens, halvings=plan.halvings + 1)


def _lengths(selection: Selection) -> list[int]:
    """Tokens of everything that is trained on as one."""
    answers = [one.episode for one in (*selection.sampled, *selection.unsampled)]
    singles = [len(one.prompt_ids) + len(one.completion_ids) for one in (*answers, *selection.corrections)]
    return singles + [
        sum(len(one.prompt_ids) + len(one.completion_ids) for one in (pair.chosen, pair.rejected))
        for pair in selection.pairs
    ]
