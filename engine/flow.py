"""Reinforcement learning in a few lines: a `Flow` says what takes part, a `Trainer` runs it over prompts.

    flow = Flow(model="model.gguf", folder="run", reward=lambda answers: [-len(a.text.split()) / 40 for a in answers])
    with Trainer(flow) as trainer:
        for round_ in trainer.run(prompts, rounds=8):
            print(round_.version, round_.metrics["reward/mean"])
        print(trainer.ask("Why is the sky blue?").text)

A round samples answers to the prompts, has them judged, trains the adapter on them and serves the better one. It is
done by the daemon's own workers, through the same protocol: a serve worker samples and says token ids and
log-probabilities, a train worker runs a job folder. So what holds for an update of the daemon holds here: the folder of
a job is all there is to it, and the adapters in `folder` are PEFT folders that the daemon can import.

What the daemon adds is not here: no gate looks at an adapter before it is served, nobody's requests are answered, and
nothing is started again. A flow on a folder with adapters goes on from the newest.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

import msgpack

from adapters.base_file import base_sha256
from adapters.llamacpp_format import read_base_shape
from adapters.manifest import file_sha256
from adapters.peft import WEIGHTS_FILE
from adapters.store import folder_name, list_versions, publish_folder
from engine.children import Child
from engine.protocol import (
    JOB_FILE,
    OBJECTIVES,
    OUT_FOLDER,
    AdapterRef,
    Begun,
    ChatMessage,
    ChoiceDone,
    EpisodeTokens,
    Generate,
    LoraSettings,
    PpoSettings,
    PreferenceSettings,
    RatedEpisode,
    RequestDone,
    RequestFailed,
    Route,
    Routed,
    RouteFailed,
    Sampling,
    Stage,
    Staged,
    StageFailed,
    StartServe,
    StartTrain,
    Train,
    Trained,
    TrainFailed,
    TrainJob,
    to_map,
)

Role = Literal["serve", "actor", "critic", "reference"]
Prompt = str | Sequence[ChatMessage]

ONE_DEVICE: Mapping[Role, str] = {"serve": "cpu", "actor": "cpu", "critic": "cpu", "reference": "cpu"}
ACTOR = LoraSettings(rank=8, alpha=16.0, layers=10)
SAMPLING = Sampling(temperature=0.7, max_tokens=64)
CONTEXT_TOKENS = 8192
PROMPT_SHOWN_CHARS = 60
SLOTS = 16


class FlowError(Exception):
    """Raised when a worker refuses what it is asked, with the reason that it gives."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A sampled answer as a reward function sees it, with the tokens that it is trained on."""

    messages: tuple[ChatMessage, ...]
    text: str
    finish_reason: str
    episode: EpisodeTokens

    @property
    def version(self) -> int:
        """Of the adapter that gave it; 0 is the base."""
        return self.episode.adapter.version


Reward = Callable[[Sequence[Answer]], Sequence[float | None]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one round did. rewards: None where the reward function had no opinion. metrics and seconds are the
    update's; skipped: reason -> answers that could not be trained on."""

    version: int
    answers: tuple[Answer, ...]
    rewards: tuple[float | None, ...]
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    skipped: Mapping[str, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What takes part in learning.

    Attributes:
        model: a .gguf file, served as it is and trained on dequantised.
        folder: of the run; holds `adapters/`, `checkpoints/`, `jobs/` and `cache/`.
        reward: judges a batch of answers, each with a number in [-1, 1] or None.
        objectives: name -> weight, of `engine.protocol.OBJECTIVES` that feed on rated answers.
        actor: the adapter's size. critic: as PpoSettings says.
        ppo, preference: hyper-parameters. reference: the version that the KL penalty pulls towards.
        sampling: of the answers.
        devices: by role, as torch names them. Actor, critic and reference share one process.
        threads: of each worker. dtype: of the base in the trainer; bfloat16 where the processor has it.
    """

    model: str | Path
    folder: str | Path
    reward: Reward
    objectives: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"ppo": 1.0})
    actor: LoraSettings = ACTOR
    ppo: PpoSettings = dataclasses.field(default_factory=PpoSettings)
    preference: PreferenceSettings = dataclasses.field(default_factory=PreferenceSettings)
    reference: int = 0
    sampling: Sampling = SAMPLING
    devices: Mapping[Role, str] = dataclasses.field(default_factory=lambda: dict(ONE_DEVICE))
    threads: int = dataclasses.field(default_factory=lambda: os.cpu_count() or 1)
    dtype: Literal["bfloat16", "float32"] = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.objectives:
            if OBJECTIVES.get(name) not in ("rated", "groups", "thumbs"):
                raise ValueError(f"objective {name!r}: a flow has rated answers only; use one of {_rated_objectives()}")
        apart = {role: device for role, device in self.devices.items() if device != self.devices["actor"]}
        apart.pop("serve", None)
        if apart:
            raise ValueError(
                f"devices: actor, critic and reference run in one process on one device, {self.devices['actor']!r}; "
                f"give {', '.join(sorted(apart))} the same"
            )


def _rated_objectives() -> str:
    return ", ".join(name for name, feed in OBJECTIVES.items() if feed in ("rated", "groups", "thumbs"))


class Trainer:
    """Runs a flow. A context manager: its workers end with the block."""

    def __init__(self, flow: Flow) -> None:
        """Start the workers. Raises engine.children.ChildLost, adapters.errors.AdapterError."""
        self.flow = flow
        self._folder = Path(flow.folder).absolute()
        self._adapters = self._folder / "adapters"
        self._cache = self._folder / "cache"
        for folder in (self._adapters, self._folder / "checkpoints", self._folder / "jobs", self._cache):
            folder.mkdir(parents=True, exist_ok=True)
        self._model = Path(flow.model).absolute()
        read_base_shape(self._model)
        self._base_sha256 = base_sha256(self._model, self._cache / "base-hashes.json")
        self._numbers = itertools.count(1)
        self._live = self._newest()
        self._serve = Child("serve")
        self._train = Child("train")
        try:
            self._start_workers()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def version(self) -> int:
        """Of the adapter that answers; 0 is the base."""
        return self._live.version

    def close(self) -> None:
        """End the workers."""
        self._serve.close()
        self._train.close()

    def ask(self, prompt: Prompt) -> Answer:
        """One answer by the adapter that is live."""
        return self.sample([prompt])[0]

    def run(self, prompts: Sequence[Prompt], rounds: int, *, answers: int = 1) -> Iterator[Round]:
        """`rounds` rounds over all `prompts`, with `answers` to each (GRPO and RLOO compare them).

        Raises:
            FlowError: an update failed, or its adapter cannot be served; the one before is live.
        """
        for _ in range(rounds):
            sampled = self.sample(prompts, answers)
            rewards = tuple(self.flow.reward(sampled))
            if len(rewards) != len(sampled):
                raise ValueError(f"the reward function gave {len(rewards)} rewards for {len(sampled)} answers")
            yield self._learn(sampled, rewards, answers)

    def sample(self, prompts: Sequence[Prompt], answers: int = 1) -> list[Answer]:
        """`answers` to each prompt, in the order of the prompts. Raises FlowError."""
        asked: dict[str, tuple[ChatMessage, ...]] = {}
        for prompt in prompts:
            request_id = f"request-{next(self._numbers)}"
            asked[request_id] = (
                (ChatMessage(role="user", content=prompt),) if isinstance(prompt, str) else tuple(prompt)
            )
            sampling = self.flow.sampling
            if sampling.seed is not None:
                sampling = dataclasses.replace(sampling, seed=sampling.seed + next(self._numbers))
            self._serve.send(
                Generate(request_id=request_id, messages=asked[request_id], prompt=None, n=answers, sampling=sampling)
            )
        found: dict[str, list[Answer]] = {request_id: [] for request_id in asked}
        begun: dict[str, Begun] = {}
        # All of them are heard to their end, also where one fails: what is said of it later belongs to nobody else.
        open_requests, listening = set(asked), self._serve.messages()
        failures: list[str] = []
        while open_requests:
            match next(listening):
                case Begun() as message:
                    begun[message.request_id] = message
                case ChoiceDone() as message:
                    answer = self._answer(asked[message.request_id], begun[message.request_id], message)
                    found[message.request_id].append(answer)
                case RequestFailed() as message:
                    prompt = asked[message.request_id][-1].content[:PROMPT_SHOWN_CHARS]
                    failures.append(f"{prompt!r}: {message.code}: {message.message}")
                    open_requests.discard(message.request_id)
                case RequestDone() as message:
                    open_requests.discard(message.request_id)
        if failures:
            raise FlowError("; ".join(failures))
        return [answer for request_id in asked for answer in found[request_id]]

    def _answer(self, messages: tuple[ChatMessage, ...], begun: Begun, done: ChoiceDone) -> Answer:
        episode = EpisodeTokens(
            episode_id=next(self._numbers),
            prompt_ids=begun.prompt_ids,
            completion_ids=done.completion_ids,
            logprobs=done.logprobs,
            temperature=self.flow.sampling.temperature,
            adapter=self._live,
        )
        return Answer(messages=messages, text=done.text, finish_reason=done.finish_reason, episode=episode)

    def _learn(self, sampled: Sequence[Answer], rewards: tuple[float | None, ...], per_prompt: int) -> Round:
        version = self._live.version + 1
        job = self._job(version, sampled, rewards, per_prompt)
        folder = self._folder / "jobs" / f"v{version}"
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut off
        folder.mkdir()
        (folder / JOB_FILE).write_bytes(msgpack.packb(to_map(job)))
        self._train.send(Train(job_id=job.job_id, folder=str(folder)))
        for message in self._train.messages():
            if isinstance(message, TrainFailed):
                raise FlowError(f"version {version}: {message.code}: {message.message}")
            if isinstance(message, Trained):
                break
        assert isinstance(message, Trained)
        self._publish(version, folder / OUT_FOLDER)
        shutil.rmtree(folder)
        result = message.result
        return Round(
            version=version,
            answers=tuple(sampled),
            rewards=rewards,
            metrics=result.metrics,
            seconds=result.seconds,
            skipped=result.dropped | {"no_opinion": rewards.count(None)},
        )

    def _job(
        self, version: int, sampled: Sequence[Answer], rewards: tuple[float | None, ...], per_prompt: int
    ) -> TrainJob:
        checkpoint = self._folder / "checkpoints" / f"v{self._live.version}"
        flow = self.flow
        return TrainJob(
            job_id=f"v{version}",
            version=version,
            parent=self._live,
            reference=self._ref(flow.reference),
            checkpoint=str(checkpoint) if checkpoint.exists() else None,
            episodes=tuple(
                RatedEpisode(
                    episode=answer.episode,
                    reward=reward,
                    replay=False,
                    group=f"{number // per_prompt}" if per_prompt > 1 else "",
                )
                for number, (answer, reward) in enumerate(zip(sampled, rewards, strict=True))
                if reward is not None
            ),
            probes=(),
            objectives=dict(flow.objectives),
            ppo=flow.ppo,
            preference=flow.preference,
            lora=flow.actor,
            seed=flow.seed + version,
            threads=flow.threads,
            base_sha256=self._base_sha256,
        )

    def _publish(self, version: int, out: Path) -> None:
        """Keep the adapter and its training state, and serve it."""
        sha256 = file_sha256(out / "adapter" / WEIGHTS_FILE)
        folder = self._adapters / folder_name(version, sha256)
        # The adapter last: its folder is what says that the version exists.
        checkpoint = self._folder / "checkpoints" / f"v{version}"
        shutil.rmtree(checkpoint, ignore_errors=True)  # of a run that was cut off here
        publish_folder(out / "checkpoint", checkpoint)
        publish_folder(out / "adapter", folder)
        adapter = AdapterRef(version=version, folder=str(folder))
        self._serve.send(
            Stage(job_id=f"v{version}", adapter=adapter, fluency_prompts=(), fluency_tokens=1, seed=self.flow.seed)
        )
        self._wait_for(Staged, StageFailed)
        self._serve.send(Route(job_id=f"v{version}", version=version))
        self._wait_for(Routed, RouteFailed)
        self._live = adapter

    def _wait_for(self, done: type[Staged | Routed], failed: type[StageFailed | RouteFailed]) -> None:
        for message in self._serve.messages():
            if isinstance(message, done):
                return
            if isinstance(message, failed):
                raise FlowError(f"version {message.version} cannot be served: {message.message}")

    def _ref(self, version: int) -> AdapterRef:
        if version == 0:
            return AdapterRef(version=0, folder=None)
        for found in list_versions(self._adapters):
            if found.version == version:
                return AdapterRef(version=version, folder=str(found.path))
        raise FlowError(f"{self._adapters}: holds no version {version}")

    def _newest(self) -> AdapterRef:
        versions = list_versions(self._adapters)
        return self._ref(versions[-1].version if versions else 0)

    def _start_workers(self) -> None:
        flow = self.flow
        self._serve.start(
            StartServe(
                model_path=str(self._model),
                adapter=self._live,
                slots=SLOTS,
                context_tokens=CONTEXT_TOKENS,
                threads=flow.threads,
                probes=(),
                gpu_layers=0 if flow.devices["serve"] == "cpu" else -1,
            )
        )
        self._train.start(
            StartTrain(
                model_path=str(self._model),
                base_sha256=self._base_sha256,
                cache_folder=str(self._cache),
                lora=flow.actor,
                threads=flow.threads,
                dtype=flow.dtype,
                device=flow.devices["actor"],
                idle_class=False,
            )
        )
