"""What is known of an episode before it is trained on: trunk states, and log-probabilities under given adapters.

Computed when an episode ends, ahead of its rating, or when an update needs it: the same bytes either way, because every
episode goes through the network alone, whatever else is scored with it. The cache is bounded in bytes and forgets the
least recently used episode; forgetting costs time, never correctness. Adapters on disk are immutable, so a version
number names one for good.

Not here: gradients (`engine.train.update`), the episode's reward, anything on disk but the adapters that are read.

Dimension letters: T tokens of an episode, R of them in its completion, D width of the stream.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from adapters.errors import AdapterError
from adapters.manifest import verify
from adapters.peft import load_peft
from engine.fault import EngineFault
from engine.lora import Lora, lora_from_weights
from engine.models import Base
from engine.protocol import MICRO_BATCH_TOKENS, AdapterRef, EpisodeScore, EpisodeTokens, ProbeTokens, TrainRole
from engine.train import critic_head, decoder
from engine.train.batch import split_micro_batches
from engine.train.forward import packed_states
from engine.train.lanes import Lanes
from engine.train.logprobs import TokenMeasure, measure_tokens

CACHE_BYTES = 192 * 1024 * 1024  # about 900 episodes of 85 tokens of a 135M model
MAX_ADAPTERS = 12  # staleness cap of 8, parent, reference and some air


@dataclasses.dataclass(slots=True)
class _Known:
    """ids: of prompt and completion, which it is an entry for. trunk: float32[T, D] by first layer. features:
    float32[R, D + 2] of the critic. measures: by adapter version. ahead_s: its share of the seconds that scoring ahead
    took."""

    ids: tuple[tuple[int, ...], tuple[int, ...]]
    trunks: dict[int, torch.Tensor]
    features: torch.Tensor
    measures: dict[tuple[int, float], TokenMeasure]
    ahead_s: float = 0.0

    def n_bytes(self) -> int:
        tensors = [*self.trunks.values(), self.features]
        return sum(t.numel() * t.element_size() for t in tensors) + 12 * len(self.measures) * self.features.shape[0]


class Scorer:
    """The base with its cache. Used by one thread, which runs the work in lanes."""

    def __init__(self, base: Base, adapter_layers: int, lanes: Lanes) -> None:
        """adapter_layers: topmost blocks that adapters usually sit on (0: all); others work, with more computing.

        micro_batch_tokens, of the object, is what the job that runs says: most tokens that are computed together.
        """
        n_layers = base.config.shape.n_layers
        self.base = base
        self.lanes = lanes
        self.micro_batch_tokens = MICRO_BATCH_TOKENS
        self._usual_first = max(0, n_layers - adapter_layers) if adapter_layers else 0
        self._feature_layer = critic_head.feature_layer(base.config.shape)
        self._known: collections.OrderedDict[int, _Known] = collections.OrderedDict()
        self._known_bytes = 0
        self._adapters: collections.OrderedDict[int, Lora] = collections.OrderedDict()
        self._probe_trunks: dict[tuple[tuple[int, ...], int], torch.Tensor] = {}
        self._canary: tuple[tuple[int, tuple[ProbeTokens, ...], int], list[tuple[float, ...]]] | None = None

    def adapter(self, ref: AdapterRef) -> Lora | None:
        """The adapter of a version, read at most once while it is in use; None for the base.

        Raises:
            EngineFault: the folder cannot be read, is not what was published, or holds an adapter of another base.
        """
        if ref.version == 0 or ref.folder is None:
            return None
        if ref.version not in self._adapters:
            try:
                verify(Path(ref.folder))
                weights = load_peft(Path(ref.folder), self.base.config.shape)
            except AdapterError as error:
                raise EngineFault(error.code, f"adapter v{ref.version}: {error}") from error
            self._adapters[ref.version] = lora_from_weights(weights, self.base.device)
            if len(self._adapters) > MAX_ADAPTERS:
                self._adapters.popitem(last=False)
        self._adapters.move_to_end(ref.version)
        return self._adapters[ref.version]

    def score(
        self, episodes: Sequence[EpisodeTokens], reference: AdapterRef, tick: Callable[[], None]
    ) -> list[EpisodeScore]:
        """Fill the cache for `episodes` and say what the ledger of episodes wants to know. Raises EngineFault."""
        began = time.perf_counter()
        own = self.measure(episodes, [episode.adapter for episode in episodes], tick)
        referred = self.measure(episodes, [reference] * len(episodes), tick)
        for episode in episodes:
            self._known[episode.episode_id].ahead_s += (time.perf_counter() - began) / len(episodes)
        return [
            _score(episode, mine, theirs, self.base.eos_ids)
            for episode, mine, theirs in zip(episodes, own, referred, strict=True)
        ]

    def scored_ahead_s(self, episodes: Sequence[EpisodeTokens]) -> float:
        """Seconds that scoring these has taken so far, of those that are still known."""
        return sum(self._known[one.episode_id].ahead_s for one in episodes if one.episode_id in self._known)

    def measure(
        self, episodes: Sequence[EpisodeTokens], adapters: Sequence[AdapterRef], tick: Callable[[], None]
    ) -> list[TokenMeasure]:
        """Each episode's completion under the adapter at the same place in `adapters`. Raises EngineFault."""
        return self.measuring(episodes, adapters, tick, None)()

    def measuring(
        self,
        episodes: Sequence[EpisodeTokens],
        adapters: Sequence[AdapterRef],
        tick: Callable[[], None],
        role: TrainRole | None,
    ) -> Callable[[], list[TokenMeasure]]:
        """As `measure`, done where `role` is; the call that this returns gives the result, once. Nothing else may be
        asked of the scorer before but to measure on another role. Raises EngineFault."""
        keys = [(ref.version, episode.temperature) for episode, ref in zip(episodes, adapters, strict=True)]
        loras = [self.adapter(ref) for ref in adapters]
        self.remember(episodes, [self.first_layer(lora) for lora in loras], tick)
        missing = [i for i, e in enumerate(episodes) if keys[i] not in self._known[e.episode_id].measures]

        def work(i: int) -> TokenMeasure:
            return self._measure_one(episodes[i], loras[i])

        measured = self.lanes.on(role, lambda: self.lanes.map(work, missing, tick))

        def collect() -> list[TokenMeasure]:
            for i, one in zip(missing, measured(), strict=True):
                self._known[episodes[i].episode_id].measures[keys[i]] = one
            found = [self._known[e.episode_id].measures[key] for e, key in zip(episodes, keys, strict=True)]
            self._forget({episode.episode_id for episode in episodes})
            return found

        return collect

    def trunk(self, episode: EpisodeTokens, lora: Lora) -> torch.Tensor:
        """float32[T, D]: the input of the lowest block that `lora` adapts. The episode must be remembered."""
        return self._known[episode.episode_id].trunks[self.first_layer(lora)]

    def features(self, episode: EpisodeTokens) -> torch.Tensor:
        """float32[R, D + 2]: the critic's features of the state before each completion token. It must be remembered."""
        return self._known[episode.episode_id].features

    def remember(
        self, episodes: Sequence[EpisodeTokens], first_layers: Sequence[int], tick: Callable[[], None]
    ) -> None:
        """Have the trunk below `first_layers[i]` and the critic's features of every episode at hand."""
        missing = []
        for i, episode in enumerate(episodes):
            known = self._known.get(episode.episode_id)
            if known is not None and known.ids != (episode.prompt_ids, episode.completion_ids):
                del self._known[episode.episode_id]  # another daemon's numbering: never mix
                known = None
            if known is None or first_layers[i] not in known.trunks:
                missing.append(i)
            else:
                self._known.move_to_end(episode.episode_id)

        def work(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self._run_trunk(episodes[i], first_layers[i])

        for i, (trunk, features) in zip(missing, self.lanes.map(work, missing, tick), strict=True):
            episode = episodes[i]
            known = self._known.get(episode.episode_id)
            if known is None:
                ids = episode.prompt_ids, episode.completion_ids
                known = self._known[episode.episode_id] = _Known(ids, {}, features, {})
            known.trunks[first_layers[i]] = trunk

    def measure_probes(
        self, probes: Sequence[ProbeTokens], lora: Lora | None, tick: Callable[[], None]
    ) -> list[tuple[float, ...]]:
        """Per probe, the log-probability of each completion token at temperature 1.

        The probes are the same at every update, so what lies below the adapted blocks is kept.
        """
        first = self.first_layer(lora)
        keys = [(probe.prompt_ids + probe.completion_ids, first) for probe in probes]
        self._probe_trunks = {key: trunk for key, trunk in self._probe_trunks.items() if key in keys}

        @torch.no_grad()
        def run_trunk(key: tuple[tuple[int, ...], int]) -> torch.Tensor:
            packing = decoder.pack(self.base, [len(key[0])])
            return decoder.run_blocks(self.base, decoder.embed(self.base, key[0]), packing, None, 0, first)

        missing = [key for key in dict.fromkeys(keys) if key not in self._probe_trunks]
        self._probe_trunks.update(zip(missing, self.lanes.map(run_trunk, missing, tick), strict=True))

        @torch.no_grad()
        def work(members: list[int]) -> tuple[torch.Tensor, ...]:
            chosen = [probes[i] for i in members]
            trunks, prompts = [self._probe_trunks[keys[i]] for i in members], [one.prompt_ids for one in chosen]
            states = packed_states(self.base, first, trunks, prompts, lora)
            tokens = torch.tensor([token for one in chosen for token in one.completion_ids], device=states.device)
            measure = measure_tokens(states, self.base.head, tokens, torch.ones(tokens.shape[0], device=states.device))
            pieces: tuple[torch.Tensor, ...] = measure.raw.split([len(one.completion_ids) for one in chosen])
            return pieces

        packs = split_micro_batches([len(ids) for ids, _ in keys], self.micro_batch_tokens)
        found: dict[int, tuple[float, ...]] = {}
        for members, measures in zip(packs, self.lanes.map(work, packs, tick), strict=True):
            found.update(zip(members, (tuple(one.tolist()) for one in measures), strict=True))
        return [found[i] for i in range(len(probes))]

    def canary(
        self, ref: AdapterRef, probes: Sequence[ProbeTokens], tick: Callable[[], None]
    ) -> list[tuple[float, ...]]:
        """The probes under an adapter on disk, measured once for as long as it is the last that was asked for or kept.

        Raises:
            EngineFault: the adapter cannot be read.
        """
        if self._canary is None or self._canary[0] != (ref.version, tuple(probes), self.micro_batch_tokens):
            self.keep_canary(ref.version, probes, self.measure_probes(probes, self.adapter(ref), tick))
        assert self._canary is not None
        return self._canary[1]

    def keep_canary(self, version: int, probes: Sequence[ProbeTokens], canary: list[tuple[float, ...]]) -> None:
        """What `canary` is to say of a version that was just trained, whose probes have been measured.

        Only to a job that packs them alike: a replay in a fresh process, which measures, must get the same bytes.
        """
        self._canary = (version, tuple(probes), self.micro_batch_tokens), canary

    def first_layer(self, lora: Lora | None) -> int:
        """The block whose input is the cached trunk for this adapter."""
        return self._usual_first if lora is None else min(self._usual_first, lora.first_layer)

    @torch.no_grad()
    def _run_trunk(self, episode: EpisodeTokens, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        base, ids = self.base, episode.prompt_ids + episode.completion_ids
        packing, states = decoder.pack(base, [len(ids)]), slice(len(episode.prompt_ids) - 1, len(ids) - 1)
        low, high = sorted((first, self._feature_layer))
        lower = decoder.run_blocks(base, decoder.embed(base, ids), packing, None, 0, low)
        upper = decoder.run_blocks(base, lower, packing, None, low, high)
        trunk, at_feature = (lower, upper) if first <= self._feature_layer else (upper, lower)
        return trunk, critic_head.state_features(base, self._feature_layer, at_feature[states])

    @torch.no_grad()
    def _measure_one(self, episode: EpisodeTokens, lora: Lora | None) -> TokenMeasure:
        base, first = self.base, self.first_layer(lora)
        trunk = self._known[episode.episode_id].trunks[first]
        packing = decoder.pack(base, [trunk.shape[0]])
        stream = decoder.run_blocks(base, trunk, packing, lora, first, base.config.shape.n_layers)
        temperature = episode.temperature or 1.0  # a greedy answer has no distribution of its own to measure
        return self._measure_completion(stream, episode.prompt_ids, episode.completion_ids, temperature)

    @torch.no_grad()
    def _measure_completion(
        self, stream: torch.Tensor, prompt_ids: tuple[int, ...], completion_ids: tuple[int, ...], temperature: float
    ) -> TokenMeasure:
        states = stream[len(prompt_ids) - 1 : -1]
        tokens = torch.tensor(completion_ids, dtype=torch.int64, device=stream.device)
        temperatures = torch.full((len(completion_ids),), temperature, device=stream.device)
        return measure_tokens(decoder.final_norm(self.base, states), self.base.head, tokens, temperatures)

    def _forget(self, needed: set[int]) -> None:
        self._known_bytes = sum(known.n_bytes() for known in self._known.values())
        for episode_id in list(self._known):
            if self._known_bytes <= CACHE_BYTES:
                return
            if episode_id not in needed:
                self._known_bytes -= self._known.pop(episode_id).n_bytes()


def _score(episode: EpisodeTokens, own: TokenMeasure, reference: TokenMeasure, eos_ids: frozenset[int]) -> EpisodeScore:
    is_text = torch.tensor([token not in eos_ids for token in episode.completion_ids])
    engine = [logprob for logprob in episode.logprobs if logprob is not None]
    comparable = len(engine) == len(episode.completion_ids) > 0 and episode.temperature > 0
    gaps = own.scaled.cpu() - torch.tensor(engine) if comparable else None
    return EpisodeScore(
        episode_id=episode.episode_id,
        n_tokens=len(episode.completion_ids),
        reference_logprob=float(reference.raw.cpu()[is_text].mean()) if bool(is_text.any()) else None,
        kl=float((own.raw - reference.raw).mean()) if episode.completion_ids else 0.0,
        engine_gap=None if gaps is None else float(gaps.abs().mean()),
        engine_bias=None if gaps is None else float(gaps.mean()),
    )
