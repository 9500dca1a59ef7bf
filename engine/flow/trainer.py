"""The rounds of a flow: two workers as children of this process, asked in turn to answer, to learn and to serve."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import msgpack

from adapters.base_file import base_sha256
from adapters.llamacpp_format import read_base_shape
from adapters.manifest import file_sha256
from adapters.peft import WEIGHTS_FILE
from adapters.store import folder_name, list_versions, publish_folder
from engine.children import Child
from engine.flow.roles import (
    check_there,
    default_lora,
    is_cpu,
    placed,
    server_environment,
    torch_device,
    train_plan,
)
from engine.flow.terms import ADAPTERS, Answer, Flow, FlowError, Prompt, Round
from engine.flow.verdicts import Verdicts, verdicts
from engine.protocol import (
    BASE,
    JOB_FILE,
    OUT_FOLDER,
    AdapterRef,
    Begun,
    ChatMessage,
    ChoiceDone,
    EpisodeTokens,
    Generate,
    RatedEpisode,
    RequestDone,
    RequestFailed,
    Route,
    Routed,
    RouteFailed,
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

CONTEXT_TOKENS = 8192
PROMPT_SHOWN_CHARS = 60
SLOTS = 16


class Trainer:
    """Runs a flow. A context manager: its workers end with the block."""

    def __init__(self, flow: Flow) -> None:
        """Start the workers.

        Raises:
            ValueError: a card is out of reach. engine.children.ChildLost, adapters.errors.AdapterError.
        """
        self.flow = flow
        self._on = placed(flow.devices)
        check_there(self._on)
        self._folder = Path(flow.folder).absolute()
        self._adapters = self._folder / ADAPTERS
        self._cache = self._folder / "cache"
        for folder in (self._adapters, self._folder / "checkpoints", self._folder / "jobs", self._cache):
            folder.mkdir(parents=True, exist_ok=True)
        self._model = Path(flow.model).absolute()
        shape = read_base_shape(self._model)
        self._lora = flow.actor or default_lora(shape.n_layers, self._on["actor"])
        self._base_sha256 = base_sha256(self._model, self._cache / "base-hashes.json")
        self._numbers = itertools.count(1)
        self._live = self._newest()
        self._serve = Child("serve", server_environment(self._on["serve"]))
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

        A round that no objective can learn from says why in `no_update`, and the next one follows.

        Raises:
            ValueError: no prompts, or `answers` below 1.
            FlowError: an update failed, or its adapter cannot be served; the one before is live.
        """
        if not prompts or answers < 1:
            raise ValueError(f"got {len(prompts)} prompts and {answers} answers to each, expected at least one of each")
        return self._rounds(tuple(prompts), rounds, answers)

    def _rounds(self, prompts: Sequence[Prompt], rounds: int, answers: int) -> Iterator[Round]:
        for _ in range(rounds):
            sampled = self.sample(prompts, answers)
            yield self._learn(sampled, verdicts(self.flow.reward(sampled), len(sampled)), answers)

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

    def _learn(self, sampled: Sequence[Answer], judged: Verdicts, per_prompt: int) -> Round:
        version = self._live.version + 1
        job = self._job(version, sampled, judged.rewards, per_prompt)
        folder = self._folder / "jobs" / f"v{version}"
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut off, or a round without an update
        folder.mkdir()
        (folder / JOB_FILE).write_bytes(msgpack.packb(to_map(job)))
        self._train.send(Train(job_id=job.job_id, folder=str(folder)))
        metrics: Mapping[str, float] = {}
        seconds: Mapping[str, float] = {}
        no_update = ""
        match self._outcome():
            case TrainFailed(code="batch_empty") as failed:
                dropped, no_update = dict(failed.details), failed.message
            case TrainFailed() as failed:
                raise FlowError(f"version {version}: {failed.code}: {failed.message}")
            case Trained(result=result):
                self._publish(version, folder / OUT_FOLDER)
                metrics, seconds, dropped = result.metrics, result.seconds, result.dropped
        shutil.rmtree(folder)
        n_silent = judged.rewards.count(None)
        learned = {name.partition("/")[0] for name in metrics}  # figures are named <objective>/<figure>
        return Round(
            version=self.version,
            answers=tuple(sampled),
            rewards=judged.rewards,
            mean_reward=judged.mean,
            clipped=judged.clipped,
            metrics=metrics,
            seconds=seconds,
            skipped=dropped | ({"no_opinion": n_silent} if n_silent else {}),
            idle=tuple(name for name in self.flow.objectives if name not in learned),
            no_update=no_update,
        )

    def _outcome(self) -> Trained | TrainFailed:
        for message in self._train.messages():
            if isinstance(message, Trained | TrainFailed):
                return message
        raise AssertionError("messages() never ends")

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
            lora=self._lora,
            seed=flow.seed + version,
            threads=flow.threads,
            base_sha256=self._base_sha256,
            plan=train_plan(self._on, flow.threads),
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
            return BASE
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
                gpu_layers=0 if is_cpu(self._on["serve"]) else -1,
            )
        )
        self._train.start(
            StartTrain(
                model_path=str(self._model),
                base_sha256=self._base_sha256,
                cache_folder=str(self._cache),
                lora=self._lora,
                threads=flow.threads,
                dtype=flow.dtype,
                device=torch_device(self._on["actor"]),
                idle_class=False,
            )
        )
