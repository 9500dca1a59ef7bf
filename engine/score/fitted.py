"""A reward source that is fitted to the box's own ratings, on frozen features of the base model.

Features of an answer are what the base, without any adapter, thinks of it two thirds up its blocks: the mean over the
answer's tokens and the last token's state, with its length and whether it ended by itself. They depend on the tokens
only and are computed once; fitting again when ratings come is a matter of numpy (`engine.score.fit`). It judges only
while its held-out accuracy is good enough; until then every answer has the reason `judge_not_fitted`.

Dimension letters: T tokens of an episode, R of them in its completion, D width of the stream.
"""

from __future__ import annotations

import collections
import hashlib
import time
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from engine.fault import EngineFault
from engine.models import Base, load_base
from engine.protocol import Fit, FitReport, FittedSource, JudgeItem, JudgeReason, RatedTokens
from engine.score import verdict
from engine.score.fit import Floats, Head, HeldOut, deal_folds, decide, fit_head, held_out, predict
from engine.score.verdict import Verdict
from engine.train import decoder
from engine.train.device import open_device

MAX_KNOWN = 4096  # answers whose features are kept; the least recently used go
LENGTH_TOKENS = 32.0  # brings a usual length to about 1; standardising does the rest
NOT_YET = FitReport(
    n_ratings=0, n_pairs=0, head="", accuracy=None, chance_se=None, used=False, why="it was not fitted yet"
)

Answer = JudgeItem | RatedTokens


class FittedJudge:
    """Judges by a head on the features of `base`."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self._known: collections.OrderedDict[bytes, Floats] = collections.OrderedDict()
        self._ratings: dict[int, RatedTokens] = {}
        self._head: Head | None = None
        self._report = NOT_YET

    def fit(self, message: Fit) -> FitReport:
        """Take up ratings, and unless more follow fit the head to all of them."""
        if message.fresh:
            self._ratings = {}
        for rating in message.ratings:
            if rating.completion_ids:
                self._ratings[rating.episode_id] = rating
                self._features(rating)
        if not message.more:
            self._head, self._report = self._fit(message.accuracy_min, message.ratings_min)
        return self._report

    def judge(self, items: Sequence[JudgeItem], clip: float, deadline: float) -> Verdict:
        """Predicted ratings, while the head is used."""
        head = self._head
        if head is None or not self._report.used:
            return verdict.failed(len(items), "judge_not_fitted", self._report.why)
        return verdict.assemble([self._judge_one(head, item, clip, deadline) for item in items])

    def _judge_one(
        self, head: Head, item: JudgeItem, clip: float, deadline: float
    ) -> tuple[float | None, JudgeReason | None, str]:
        if not item.completion_ids:
            return None, "judge_empty", ""
        if time.monotonic() > deadline:
            return None, "judge_timeout", "the fitted model was too slow for the batch"
        return verdict.check_value(float(predict(head, self._features(item)[None])[0]), clip)

    def _fit(self, accuracy_min: float, ratings_min: int) -> tuple[Head | None, FitReport]:
        answers, ratings = merge_same(self._ratings.values())
        features = np.array([self._features(answer) for answer in answers])
        head, measured = None, HeldOut(0, None, None)
        if len(answers) >= ratings_min and len(np.unique(ratings)) > 1:
            measured = held_out(features, ratings, deal_folds(ratings, [key_of(each) for each in answers]))
            head = fit_head(features, ratings)
        used, why = decide(len(answers), measured, accuracy_min=accuracy_min, ratings_min=ratings_min)
        report = FitReport(
            n_ratings=len(answers),
            n_pairs=measured.n_pairs,
            head=head.kind if head is not None else "",
            accuracy=measured.accuracy,
            chance_se=measured.chance_se,
            used=used,
            why=why,
        )
        return head, report

    def _features(self, answer: Answer) -> Floats:
        key = key_of(answer)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = pooled_features(self._base, answer.prompt_ids, answer.completion_ids)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return known


def merge_same(ratings: Iterable[RatedTokens]) -> tuple[list[RatedTokens], Floats]:
    """Each different answer once, and the mean of its ratings, float64[N]: what is in one fold as training and in
    another as test would look like knowledge."""
    same: dict[bytes, list[RatedTokens]] = collections.defaultdict(list)
    for rating in ratings:
        same[key_of(rating)].append(rating)
    means = [sum(each.rating for each in group) / len(group) for group in same.values()]
    return [group[0] for group in same.values()], np.array(means, dtype=np.float64)


def key_of(answer: Answer) -> bytes:
    """What tells answers apart: the tokens of prompt and completion."""
    return hashlib.sha256(repr((answer.prompt_ids, answer.completion_ids)).encode()).digest()


@torch.no_grad()
def pooled_features(base: Base, prompt_ids: tuple[int, ...], completion_ids: tuple[int, ...]) -> Floats:
    """float64[2 D + 3]: features of one answer of at least one token.

    The stream after two thirds of the blocks, each state divided by its root mean square: its mean over the completion
    and its last state; then the length, plain and logarithmic, and 1 if an end-of-sequence token ended it. The episode
    goes through the base alone, so the features do not depend on what else is judged.
    """
    ids = (*prompt_ids, *completion_ids)
    stream = decoder.run_blocks(
        base, decoder.embed(base, ids), decoder.pack(base, [len(ids)]), None, 0, feature_layer(base)
    )
    states = stream[len(prompt_ids) :]  # [R, D]
    states = states * states.square().mean(dim=-1, keepdim=True).add(base.config.norm_eps).rsqrt()
    n_tokens = len(completion_ids)
    ended = float(completion_ids[-1] in base.eos_ids)
    about = torch.tensor([n_tokens / LENGTH_TOKENS, np.log1p(n_tokens), ended], dtype=torch.float64)
    pooled = torch.cat((states.mean(dim=0).double().cpu(), states[-1].double().cpu(), about))
    features: Floats = pooled.numpy()
    return features


def feature_layer(base: Base) -> int:
    """Blocks below the features: two thirds of all, where an adapter on the top third begins."""
    n_layers = base.config.shape.n_layers
    return n_layers - max(1, round(n_layers / 3))


def open_fitted(wanted: FittedSource, *, threads: int, device: str) -> FittedJudge:
    """Load the base. Raises EngineFault."""
    torch.set_num_threads(threads)
    opened = open_device(device)
    try:
        base = load_base(wanted.model_path, wanted.base_sha256, wanted.cache_folder, wanted.dtype, str(opened))
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise EngineFault("out_of_memory", f"{wanted.model_path}: {error}") from error
    return FittedJudge(base)
