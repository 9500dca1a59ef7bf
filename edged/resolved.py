"""What the settings mean for this model and this machine: the file's words turned into what the parts take. Pure but
for `edged.machine`, which looks at the hardware.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from adapters.shape import BaseShape
from edged import machine
from edged.base_model import BaseModel, choose_backend
from edged.devices import find_devices
from edged.learn.deep_proving import DeepSettings
from edged.learn.gate import Limits as GateLimits
from edged.learn.job import LearnSettings
from edged.learn.judging import JudgingRules
from edged.learn.pace import Targets as PaceTargets
from edged.learn.plan import Rules
from edged.learn.practice import Rules as PracticeRules
from edged.learn.practising import PracticeSettings
from edged.learn.probes import PROBES
from edged.learn.proving import ProvingSettings
from edged.placing import ONE_PROCESS, Placing, planned_model
from edged.settings import Settings, learns_from_judged
from edged.system.supervise import Limits as WorkerLimits
from engine import placement, protocol

PROMPT_TOKENS = 128  # of a usual prompt, in what is planned for an answer
MAX_LANES = 4  # as the trainer has it
ENGINES: dict[protocol.Backend, Literal["llamacpp", "torch", "none"]] = {
    "llamacpp": "llamacpp",
    "transformers": "torch",
    "remote": "none",
}
SHELF = "served"  # in the cache folder: adapters laid out for a server elsewhere
SERVER_MARGIN_S = 10.0  # of the time to start, for what comes after a server has answered
WORKER_STOP_S = 1.5  # an asked worker leaves within a step; then it is killed


def lora(settings: Settings, shape: BaseShape, device: str | None = None) -> protocol.LoraSettings:
    """`[lora]` with the number of blocks filled in.

    Args:
        device: that trains, or its kind; None: the one of this machine.
    """
    section = settings.lora
    top_third = max(1, -(-shape.n_layers // 3))
    match section.layers:
        case "auto":
            # A CPU has to win by computing the frozen trunk once; a card has the time to adapt all of the blocks.
            layers = top_third if (device or _train_device(settings)).startswith("cpu") else 0
        case "all":
            layers = 0
        case "top_third":
            layers = top_third
        case int():
            layers = min(section.layers, shape.n_layers)
    return protocol.LoraSettings(rank=section.rank, alpha=section.alpha, layers=layers)


def learning(settings: Settings, shape: BaseShape) -> LearnSettings:
    """`[learn]`, `[lora]` and `[reward]` for the learner."""
    learn = settings.learn
    ppo = {field.name: getattr(learn, field.name) for field in dataclasses.fields(protocol.PpoSettings)}
    preference = {field.name: getattr(learn, field.name) for field in dataclasses.fields(protocol.PreferenceSettings)}
    elsewhere = ("feeds", "reward_clip")
    rules = {
        field.name: getattr(learn, field.name) for field in dataclasses.fields(Rules) if field.name not in elsewhere
    }
    feeds = frozenset(protocol.OBJECTIVES[name] for name in learn.objectives)
    return LearnSettings(
        enabled=learn.enabled,
        rules=Rules(**rules, feeds=feeds, reward_clip=settings.reward.clip),
        objectives=learn.objectives,
        ppo=protocol.PpoSettings(**ppo),
        preference=protocol.PreferenceSettings(**preference),
        lora=lora(settings, shape),
        reference=learn.reference,
        reward_clip=settings.reward.clip,
        seed=learn.seed,
        threads=machine.threads(learn.threads),
    )


def proving(settings: Settings) -> ProvingSettings:
    """`[gate]` for the prover."""
    gate = settings.gate
    limits = {field.name: getattr(gate, field.name) for field in dataclasses.fields(GateLimits)}
    return ProvingSettings(
        limits=GateLimits(**limits), fluency_prompts=gate.fluency_prompts, fluency_tokens=gate.fluency_tokens
    )


def pace_targets(settings: Settings) -> PaceTargets:
    """What training gives way to, and what it keeps."""
    return PaceTargets(min_share=settings.learn.min_share, ttft_inflation=settings.serve.ttft_inflation)


def deep_gate(settings: Settings) -> DeepSettings:
    """`[gate]` for the deep gate."""
    return DeepSettings(tokens=settings.gate.deep_tokens, fixed_prompts=settings.gate.fluency_prompts)


def start_serve(
    settings: Settings, model: BaseModel, live: protocol.AdapterRef, cache_folder: str = ""
) -> protocol.StartServe:
    """The message that starts a serve worker on `live`. Raises ModelError: the backend does not read this model."""
    serve, device = settings.serve, serve_device(settings, model.path)
    return protocol.StartServe(
        model_path=str(model.path),
        adapter=live,
        slots=serve.slots,
        context_tokens=serve.pool_tokens,
        threads=machine.threads(serve.threads),
        probes=PROBES,
        gpu_layers=gpu_layers(
            serve.gpu_layers, _device(settings, settings.placement.serve, settings.placement.serve_device)
        ),
        backend=choose_backend(serve.backend, serve.url, model.path),
        device=device,
        # As the trainer: what is left between the two is the kernels' rounding.
        dtype=machine.train_dtype(settings.learn.dtype, device),
        url=serve.url,
        api_key_file=_absolute(serve.api_key_file),
        server_wait_s=max(1.0, serve.start_timeout_s - SERVER_MARGIN_S),
        shelf=str(Path(cache_folder).absolute() / SHELF) if cache_folder else "",
        shelf_seen_at=serve.adapters_seen_at,
    )


def serve_device(settings: Settings, model: Path) -> str:
    """The device that serves, as torch names it. A folder goes where training would: the first card if there is one;
    a file stays on the CPU, but for the blocks that `serve.gpu_layers` names. Raises ModelError."""
    where = settings.placement
    configured = _device(settings, where.serve, where.serve_device)
    backend = choose_backend(settings.serve.backend, settings.serve.url, model)
    if backend == "transformers":
        return machine.train_device(configured)
    if backend == "remote":
        return "cpu"
    on_card = gpu_layers(settings.serve.gpu_layers, configured) != 0
    return "cpu" if not on_card else "cuda" if configured == "auto" else configured


def gpu_layers(configured: int, device: str) -> int:
    """Blocks of the served model on the GPU: none on "cpu"; on "cuda" all of them (-1), unless `configured` says how
    many."""
    if device == "cpu":
        return 0
    return -1 if device != "auto" and configured == 0 else configured


def serve_keeps_warm_s(settings: Settings, model: Path) -> float | None:
    """How long the serve worker stays without work; None: for ever, because it holds no card. Raises ModelError."""
    return None if serve_device(settings, model) == "cpu" else settings.placement.keep_warm_s


def train_keeps_warm_s(settings: Settings, plan: protocol.TrainPlan = ONE_PROCESS) -> float | None:
    """The same of the train worker."""
    device = plan.devices[0] if plan.devices else _train_device(settings)
    return None if device.startswith("cpu") else settings.placement.keep_warm_s


def start_train(
    settings: Settings, model: BaseModel, cache_folder: str, plan: protocol.TrainPlan = ONE_PROCESS
) -> protocol.StartTrain:
    """The message that starts a train worker, on the first device of its plan if that names some."""
    learn = settings.learn
    device = plan.devices[0] if plan.devices else _train_device(settings)
    return protocol.StartTrain(
        model_path=str(model.path),
        base_sha256=model.sha256,
        cache_folder=cache_folder,
        lora=lora(settings, model.shape),
        threads=machine.threads(learn.threads),
        dtype=machine.train_dtype(learn.dtype, device),
        device=device,
        idle_class=learn.idle_class and device == "cpu",
        base_weights=learn.base_weights,
        fuse=learn.fuse,
        plan=plan,
    )


def trainer_kind(settings: Settings) -> str:
    """What the rounding of the trainer depends on besides the model: the kind of its device, and its number format."""
    device = _train_device(settings)
    return f"{device.partition(':')[0]} {machine.train_dtype(settings.learn.dtype, device)}"


def judging(settings: Settings) -> JudgingRules:
    """`[reward]` for the client of the score worker."""
    return JudgingRules(
        **{field.name: getattr(settings.reward, field.name) for field in dataclasses.fields(JudgingRules)}
    )


def practising(settings: Settings) -> PracticeSettings:
    """`[practice]` for the shell of practice mode."""
    section, learn = settings.practice, settings.learn
    off = ""
    if settings.reward.source == "feedback":
        off = "no judge is configured (reward.source)"
    elif not learn.enabled:
        off = "learn.enabled is false"
    elif not learns_from_judged(learn.objectives):
        off = "no objective of learn.objectives learns from judged answers"
    return PracticeSettings(
        rules=PracticeRules(
            off=off, idle_s=section.idle_s, round_prompts=section.round_prompts, updates_max=section.max_updates
        ),
        group_size=section.group_size,
        max_tokens=section.max_tokens,
        prompts_file=section.prompts_file,
        at_once=max(1, settings.serve.slots // section.group_size),
        seed=learn.seed,
    )


def start_score(settings: Settings, model: BaseModel, cache_folder: str) -> protocol.StartScore | None:
    """The message that starts a score worker; None if people's ratings are the only rewards."""
    reward, learn, where = settings.reward, settings.learn, settings.placement
    device = machine.train_device(_device(settings, where.reward or where.actor, where.train_device))
    source: protocol.FunctionSource | protocol.HttpSource | protocol.ClassifierSource | protocol.FittedSource
    match reward.source:
        case "feedback":
            return None
        case "function":
            source = protocol.FunctionSource(entry_point=reward.function, folder=_absolute(reward.function_folder))
        case "http":
            source = protocol.HttpSource(url=reward.url)
        case "classifier":
            source = protocol.ClassifierSource(
                model_folder=_absolute(reward.classifier), label=reward.classifier_label, reads=reward.classifier_reads
            )
        case "fitted":
            source = protocol.FittedSource(
                model_path=str(model.path),
                base_sha256=model.sha256,
                cache_folder=cache_folder,
                dtype=machine.train_dtype(learn.dtype, device),
            )
    return protocol.StartScore(
        source=source,
        threads=machine.threads(learn.threads),
        device=device,
        idle_class=learn.idle_class and device == "cpu",
    )


def _absolute(folder: str) -> str:
    """The folder whatever the worker's own folder is; "" stays what it is: none."""
    return str(Path(folder).absolute()) if folder else ""


def _train_device(settings: Settings) -> str:
    return machine.train_device(_device(settings, settings.placement.actor, settings.placement.train_device))


def _device(settings: Settings, pinned: Sequence[int], configured: str) -> str:
    """A worker's own device: the first that is pinned, or what the other key says."""
    return machine.device_name(pinned[0], settings.placement.cpu_devices) if pinned else configured


def placed(settings: Settings, model: BaseModel) -> Placing:
    """Who trains where on this box, decided. Blocking. Raises BadPin, ModelError."""
    backend = choose_backend(settings.serve.backend, settings.serve.url, model.path)
    n_cpus = settings.placement.cpu_devices
    placing = Placing(
        lambda devices: placement_request(settings, planned_model(model.path), devices, backend),
        lambda: find_devices(n_cpus),
        machine.threads(settings.learn.threads),
    )
    placing.decide()
    return placing


def placement_request(
    settings: Settings,
    model: placement.Model,
    devices: Sequence[placement.Device],
    backend: protocol.Backend = "llamacpp",
) -> placement.Request:
    """What the settings ask of these devices.

    Args:
        backend: that serves.
    Raises:
        BadPin: a device is named that is not among them.
    """
    learn, serve, section = settings.learn, settings.serve, settings.placement
    learned = learning(settings, model.shape)
    trains_on = () if section.train_device in ("auto", "cuda") else _numbers_of(section.train_device, devices)
    on_card = gpu_layers(serve.gpu_layers, _device(settings, section.serve, section.serve_device)) != 0
    on_card = on_card and backend != "remote"
    serves = section.serve_device if on_card or backend == "transformers" else "cpu"
    serves_on = () if serves in ("auto", "cuda") else _numbers_of(serves, devices)[:1]
    trains_there = [devices[number] for number in section.actor if number < len(devices)] or devices
    runs_on_cpu = section.train_device == "cpu" or all(device.kind == "cpu" for device in trains_there)
    kind = "cpu" if runs_on_cpu else "cuda"
    adapter, dtype = lora(settings, model.shape, kind), machine.train_dtype(learn.dtype, kind)
    sequence_tokens = min(serve.pool_tokens, serve.default_max_tokens + PROMPT_TOKENS)
    return placement.Request(
        devices=tuple(devices),
        model=model,
        serving=placement.Serving(
            slots=serve.slots,
            context_tokens=serve.pool_tokens,
            engine=ENGINES[backend],
        ),
        training=placement.Training(
            dtype=dtype,
            rank=adapter.rank,
            layers=adapter.layers,
            critic=learned.ppo.critic,
            batch_tokens=learned.rules.answers_max * sequence_tokens,
            sequence_tokens=sequence_tokens,
            minibatches=learn.minibatches,
            lanes=min(machine.threads(learn.threads), MAX_LANES),
            held=_held(learn.base_weights, model, dtype, () if runs_on_cpu else devices),
        ),
        reward=_planned_reward(settings),
        pins=placement.Pins(
            serve=section.serve or serves_on,
            actor=section.actor or trains_on,
            critic=section.critic or trains_on,
            reference=section.reference or trains_on,
            reward=section.reward,
        ),
    )


def _held(
    wanted: protocol.BaseWeights,
    model: placement.Model,
    dtype: placement.Dtype,
    devices: Sequence[placement.Device],
) -> placement.Held:
    """How the base is held on `devices`, as the trainer decides it on each; the smallest card decides here."""
    if wanted != "auto":
        return wanted
    totals = [device.total_bytes for device in devices if device.kind == "cuda"]
    if not (totals and model.packed_block_bytes):
        return "dequantised"
    unpacked = placement.base_weight_bytes(model, dtype)
    return "quantised" if placement.prefers_quantised(unpacked, min(totals)) else "dequantised"


def _planned_reward(settings: Settings) -> placement.Reward | None:
    source = settings.reward.source
    if source == "feedback":
        return None
    n_bytes = machine.weights_bytes(Path(settings.reward.classifier)) if source == "classifier" else 0
    return placement.Reward(source=source, weights_bytes=n_bytes)


def _numbers_of(name: str, devices: Sequence[placement.Device]) -> tuple[int, ...]:
    found = tuple(number for number, device in enumerate(devices) if device.name == name and not device.host)
    if not found:
        there = ", ".join(device.label for device in devices)
        raise placement.BadPin(f"[placement] names {name!r}, which is not there; there are {there}")
    return found


def worker_limits(start_timeout_s: float, hang_timeout_s: float) -> WorkerLimits:
    """When a worker counts as hung, in seconds."""
    return WorkerLimits(start_timeout_s=start_timeout_s, hang_timeout_s=hang_timeout_s, stop_timeout_s=WORKER_STOP_S)


class LiveApiSettings:
    """`[api]` as it is now, for an application that was built once."""

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self._settings = settings

    @property
    def max_body_bytes(self) -> int:
        return self._settings().api.max_body_bytes

    @property
    def read_timeout_s(self) -> float:
        return self._settings().api.read_timeout_s

    @property
    def allowed_hosts(self) -> Sequence[str]:
        return self._settings().api.allowed_hosts
