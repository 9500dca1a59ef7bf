"""What the deep gate judges is gathered here: both versions answer the same prompts in the served stack, the trainer
scores the answers under the base, the judge rewards them, and corrections are scored under both.

A thin shell around `edged.learn.deep_gate`. Before each small piece of work it waits until nobody needs the box;
answers that were given up for a user are asked for again. It stores nothing and decides nothing. Answers are no
episodes: negative ids keep them apart from the store's, from the gate's and from the calibration's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from edged.failure import JobRefused, WorkerBusy, WorkerFault, WorkerLost
from edged.learn import deep_gate, deep_rules
from edged.learn.deep_gate import Correction, Judgement, Pair, Sample
from edged.learn.judging import Judgement as Reward
from edged.learn.judging import item_of
from edged.learn.ports import Stage
from edged.records import Episode, PracticePrompt, Written, WrittenTokens
from engine import protocol

log = logging.getLogger(__name__)

FIRST_ID = -(1 << 42)
TEMPERATURE = 0.7  # as the fast gate samples; the lower, the sooner a model that tends to repeat itself does
SEED = 50_021
TOGETHER = 4  # prompts that are answered at once
GROUP = 4  # answers that are scored or judged between two looks at who needs the box
PROMPT_TOKENS = 512  # of a held-out prompt at most
CORRECTIONS = 16  # the newest
CORRECTION_TOKENS = 512  # of one at most, with its prompt
TROUBLES_MAX = 10  # of the serve worker, in one examination
PAUSE_S = 1.0


class Sampler(Protocol):
    """The serve worker as the deep gate sees it (`edged.serve.sampling`)."""

    async def sample(
        self,
        prompt: PracticePrompt,
        *,
        n: int,
        max_tokens: int,
        seed: int,
        temperature: float = 1.0,
        version: int | None = None,
    ) -> list[Episode]:
        """Raises JobRefused (`not_resident`: no context holds `version`), WorkerLost, and `interrupted` of the owner's
        choice."""
        ...


class Scorer(Protocol):
    """The train worker as the deep gate sees it (`edged.learn.trainer`)."""

    async def start(self) -> None: ...

    async def score(
        self, episodes: tuple[protocol.EpisodeTokens, ...], reference: protocol.AdapterRef
    ) -> tuple[protocol.EpisodeScore, ...]: ...


class Judge(Protocol):
    """The score worker as the deep gate sees it (`edged.learn.judging`)."""

    async def prepare(self) -> str | None: ...

    async def judge(self, items: Sequence[protocol.JudgeItem]) -> list[Reward]: ...


class Prompts(Protocol):
    """The store's prompts that were not learned from (`edged.store.held_out`)."""

    async def prompts(self, limit: int, base_sha256: str, *, tokens_max: int) -> list[PracticePrompt]: ...


class Corrections(Protocol):
    """The store's pairs and corrections (`edged.store.written`), as `edged.learn.ports.WrittenBook`."""

    async def unused_written(self, limit: int, base_sha256: str) -> list[Written]: ...

    async def used_written(self, limit: int, base_sha256: str) -> list[Written]: ...

    async def tokens(self, ids: Sequence[int]) -> list[WrittenTokens]: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeepSettings:
    """Of `[gate]`. fixed_prompts: asked where there are too few held-out ones. tokens: of all answers together."""

    tokens: int
    fixed_prompts: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Answered:
    prompt: PracticePrompt
    candidate: list[Episode]
    before: list[Episode]


@dataclasses.dataclass(frozen=True, slots=True)
class _Trouble:
    """Why a prompt has to be asked again, and the version whose answers were asked for."""

    error: Exception
    adapter: protocol.AdapterRef


class DeepProver:
    """Examines one version at a time."""

    def __init__(
        self,
        *,
        settings: Callable[[], DeepSettings],
        sampler: Sampler,
        interrupted: type[Exception],
        stage: Stage,
        candidates: asyncio.Lock,
        trainer: Scorer,
        judge: Judge | None,
        held_out: Prompts,
        written: Corrections,
        eos_ids: Callable[[], frozenset[int]],
        base_sha256: str,
        free: Callable[[], Awaitable[None]],
    ) -> None:
        """interrupted: what `sampler` raises. candidates: held while an adapter is staged. free: returns once nobody
        needs the box; what it raises ends an examination."""
        self._settings = settings
        self._sampler = sampler
        self._interrupted = interrupted
        self._stage = stage
        self._candidates = candidates
        self._trainer = trainer
        self._judge = judge
        self._held_out = held_out
        self._written = written
        self._eos_ids = eos_ids
        self._base_sha256 = base_sha256
        self._free = free

    async def examine(self, candidate: protocol.AdapterRef, before: protocol.AdapterRef) -> Judgement:
        """The judgement on `candidate` against `before`.

        Raises:
            WorkerLost, WorkerBusy: the serve worker did not answer after TROUBLES_MAX tries. JobRefused: it would not
            load a version.
        """
        answered = await self._sample(candidate, before)
        episodes = [one for pair in answered for one in (*pair.candidate, *pair.before)]
        logprobs = await self._logprobs(episodes)
        rewards = await self._rewards(episodes)
        sampled = iter(
            self._sample_of(*one) for one in zip(episodes, logprobs, rewards, strict=True)
        )  # in the order of `episodes`
        pairs = [
            Pair(
                prompt=_text_of(pair.prompt),
                candidate=tuple(next(sampled) for _ in pair.candidate),
                before=tuple(next(sampled) for _ in pair.before),
            )
            for pair in answered
        ]
        corrections = await self._corrections(candidate, before)
        return await asyncio.to_thread(deep_gate.judge, pairs, corrections)

    # ---------------------------------------------------------------------------------------------------- the answers

    async def _sample(self, candidate: protocol.AdapterRef, before: protocol.AdapterRef) -> list[_Answered]:
        settings = self._settings()
        prompts = await self._held_out.prompts(deep_rules.PROMPTS_MAX, self._base_sha256, tokens_max=PROMPT_TOKENS)
        prompts += [_fixed(text) for text in settings.fixed_prompts]
        n_prompts, n_samples = deep_rules.shape(len(prompts), settings.tokens)
        todo = list(enumerate(prompts[:n_prompts]))
        answered: list[_Answered] = []
        troubles = 0
        while todo:
            await self._free()
            together, todo = todo[:TOGETHER], todo[TOGETHER:]
            outcomes = await asyncio.gather(
                *[self._answer(prompt, number, n_samples, candidate, before) for number, prompt in together]
            )
            answered += [outcome for outcome in outcomes if isinstance(outcome, _Answered)]
            todo += [one for one, outcome in zip(together, outcomes, strict=True) if isinstance(outcome, _Trouble)]
            failed = [one for one in outcomes if isinstance(one, _Trouble) and not self._is_interruption(one)]
            if failed:
                troubles += 1
                if troubles > TROUBLES_MAX:
                    raise failed[0].error
                await self._recover({one.adapter for one in failed if isinstance(one.error, JobRefused)})
        return answered

    def _is_interruption(self, trouble: _Trouble) -> bool:
        return isinstance(trouble.error, self._interrupted)

    async def _answer(
        self,
        prompt: PracticePrompt,
        number: int,
        n: int,
        candidate: protocol.AdapterRef,
        before: protocol.AdapterRef,
    ) -> _Answered | _Trouble | None:
        """What both answer; None if the engine does not answer this prompt."""
        refs = (candidate, before)
        sides = await asyncio.gather(
            *[
                self._sampler.sample(
                    prompt,
                    n=n,
                    max_tokens=deep_rules.ANSWER_TOKENS,
                    seed=SEED + number,
                    temperature=TEMPERATURE,
                    version=ref.version,
                )
                for ref in refs
            ],
            return_exceptions=True,
        )
        for side, ref in zip(sides, refs, strict=True):
            match side:
                case JobRefused(code="not_resident" | "engine_error") | WorkerLost() | self._interrupted():
                    return _Trouble(side, ref)
                case JobRefused():
                    return None
                case BaseException():
                    raise side
        mine, theirs = (side for side in sides if isinstance(side, list))
        return _Answered(prompt, mine, theirs)

    async def _recover(self, missing: set[protocol.AdapterRef]) -> None:
        """Have the versions that were in no context staged beside what is live. Raises JobRefused: one cannot be."""
        await asyncio.sleep(PAUSE_S)
        await self._free()
        async with self._candidates:
            for adapter in missing:
                try:
                    await self._stage.stage(adapter, fluency_prompts=(), fluency_tokens=0, seed=0)
                except (WorkerBusy, WorkerLost) as error:
                    log.info("the deep gate waits for v%d: %s", adapter.version, error)

    # ------------------------------------------------------------------------------------------------------- figures

    async def _logprobs(self, episodes: Sequence[Episode]) -> list[float | None]:
        """Nats a token under the base, without the ending ones; None of an empty answer, or where the trainer fails."""
        tokens = [
            _tokens(FIRST_ID - number, episode.prompt_ids, episode.completion_ids)
            for number, episode in enumerate(episodes)
        ]
        scores = await self._score([one for one in tokens if one.completion_ids], protocol.BASE)
        return [scores.get(one.episode_id) for one in tokens]

    async def _score(
        self, episodes: Sequence[protocol.EpisodeTokens], reference: protocol.AdapterRef
    ) -> dict[int, float]:
        """Id -> mean log-probability under `reference`."""
        found: dict[int, float] = {}
        for start in range(0, len(episodes), GROUP):
            await self._free()
            try:
                await self._trainer.start()
                scores = await self._trainer.score(tuple(episodes[start : start + GROUP]), reference)
            except (JobRefused, WorkerFault, WorkerLost) as error:
                log.warning("the deep gate does without some scores: %s", error)
                continue
            found |= {one.episode_id: one.reference_logprob for one in scores if one.reference_logprob is not None}
        return found

    async def _rewards(self, episodes: Sequence[Episode]) -> list[float | None]:
        judge = self._judge
        if judge is None:
            return [None] * len(episodes)
        await self._free()
        why = await judge.prepare()
        if why:
            log.info("the deep gate does without rewards: %s", why)
            return [None] * len(episodes)
        rewards: list[float | None] = []
        for start in range(0, len(episodes), GROUP):
            await self._free()
            judged = await judge.judge([item_of(episode) for episode in episodes[start : start + GROUP]])
            rewards += [one.reward for one in judged]
        return rewards

    def _sample_of(self, episode: Episode, logprob: float | None, reward: float | None) -> Sample:
        eos_ids = self._eos_ids()
        return Sample(
            text=episode.text,
            tokens=tuple(token for token in episode.completion_ids if token not in eos_ids),
            is_cut=episode.finish_reason == "length",
            base_logprob=logprob,
            reward=reward,
        )

    async def _corrections(self, candidate: protocol.AdapterRef, before: protocol.AdapterRef) -> list[Correction]:
        """The newest corrections under both versions."""
        known = await self._written.used_written(CORRECTIONS * 4, self._base_sha256)
        known += await self._written.unused_written(CORRECTIONS * 4, self._base_sha256)
        newest = sorted((one.id for one in known if one.kind == "correction" and one.differs), reverse=True)
        cases = [
            case for case in await self._written.tokens(newest[:CORRECTIONS]) if _n_tokens(case) <= CORRECTION_TOKENS
        ]
        sides = [
            (
                _tokens(FIRST_ID - (1 << 20) - 2 * case.id, case.prompt_ids, case.chosen_ids),
                _tokens(FIRST_ID - (1 << 20) - 2 * case.id - 1, case.prompt_ids, case.rejected_ids),
            )
            for case in cases
        ]
        episodes = [one for both in sides for one in both if one.completion_ids]
        now, then = [await self._score(episodes, ref) for ref in (candidate, before)]
        return [
            Correction(
                margin=now[chosen.episode_id] - now[rejected.episode_id],
                margin_before=then[chosen.episode_id] - then[rejected.episode_id],
            )
            for chosen, rejected in sides
            if all(one.episode_id in side for one in (chosen, rejected) for side in (now, then))
        ]


def _tokens(episode_id: int, prompt_ids: tuple[int, ...], completion_ids: tuple[int, ...]) -> protocol.EpisodeTokens:
    return protocol.EpisodeTokens(
        episode_id=episode_id,
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        logprobs=(None,) * len(completion_ids),
        temperature=1.0,
        adapter=protocol.BASE,
    )


def _n_tokens(case: WrittenTokens) -> int:
    return len(case.prompt_ids) + max(len(case.chosen_ids), len(case.rejected_ids))


def _fixed(text: str) -> PracticePrompt:
    return PracticePrompt(prompt_of=None, messages=[{"role": "user", "content": text}], prompt=None)


def _text_of(prompt: PracticePrompt) -> str:
    return prompt.prompt or "\n".join(str(message["content"]) for message in prompt.messages or [])
