"""From the settings to what the parts take: no key gets lost on the way."""

from __future__ import annotations

import ast
import dataclasses
import typing
from pathlib import Path
from typing import Any, Literal

import pytest

from adapters.shape import BaseShape
from edged import machine, resolved
from edged.base_model import BaseModel
from edged.learn import gate, plan, watch
from edged.learn.judging import JudgingRules
from edged.learn.probes import PROBES
from edged.settings import (
    ApiSection,
    GateSection,
    LearnSection,
    LoraSection,
    PlacementSection,
    PracticeSection,
    RewardSection,
    Section,
    ServeSection,
    Settings,
)
from engine import placement, protocol

EDGED = Path(resolved.__file__).parent
SHAPE = BaseShape(arch="llama", n_layers=30, n_embd=576, n_heads=9, n_kv_heads=3, head_dim=64, n_ff=1536, n_vocab=49152)
MODEL = BaseModel(path=Path("/models/small.gguf"), name="small", sha256="c" * 64, shape=SHAPE)
BASE = protocol.AdapterRef(version=0, folder=None)


def other_than(section: Any, name: str) -> Any:
    """A valid value of a key that is not its default."""
    default = getattr(section, name)
    if isinstance(default, bool):
        return not default
    if isinstance(default, str):
        return next(one for one in typing.get_args(type(section).model_fields[name].annotation) if one != default)
    if isinstance(default, int):
        return default + 1
    return default / 2 if default else 0.5


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(protocol.PpoSettings)])
def test_every_hyper_parameter_of_an_update_comes_from_its_key(name: str) -> None:
    value = other_than(LearnSection(), name)
    learning = resolved.learning(Settings(learn=LearnSection(**{name: value})), SHAPE)
    assert getattr(learning.ppo, name) == value


def test_who_uses_the_engine_without_the_daemon_gets_the_same_defaults() -> None:
    learning = resolved.learning(Settings(), SHAPE)
    assert (learning.ppo, learning.preference) == (protocol.PpoSettings(), protocol.PreferenceSettings())


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(protocol.PreferenceSettings)])
def test_every_hyper_parameter_of_preferences_comes_from_its_key(name: str) -> None:
    value = other_than(LearnSection(), name)
    learning = resolved.learning(Settings(learn=LearnSection(**{name: value})), SHAPE)
    assert getattr(learning.preference, name) == value


@pytest.mark.parametrize(
    "name", [field.name for field in dataclasses.fields(plan.Rules) if field.name not in ("feeds", "reward_clip")]
)
def test_every_rule_of_planning_comes_from_its_key(name: str) -> None:
    value = other_than(LearnSection(), name)
    learning = resolved.learning(Settings(learn=LearnSection(**{name: value})), SHAPE)
    assert getattr(learning.rules, name) == value


def test_planning_knows_what_the_objectives_feed_on() -> None:
    learn = LearnSection(objectives={"ppo": 1.0, "dpo": 0.3, "kto": 0.1})
    assert resolved.learning(Settings(learn=learn), SHAPE).rules.feeds == {"rated", "pairs", "thumbs"}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(gate.Limits)])
def test_every_limit_of_the_gate_comes_from_its_key(name: str) -> None:
    value = other_than(GateSection(), name)
    proving = resolved.proving(Settings(gate=GateSection(**{name: value})))
    assert getattr(proving.limits, name) == value


def test_what_the_candidates_are_asked_comes_from_the_gates_keys() -> None:
    proving = resolved.proving(Settings(gate=GateSection(fluency_prompts=("Why?",), fluency_tokens=9)))
    assert (proving.fluency_prompts, proving.fluency_tokens) == (("Why?",), 9)


def test_the_rest_of_learning_comes_from_its_keys() -> None:
    learning = resolved.learning(
        Settings(
            learn=LearnSection(enabled=False, reference=3, seed=9, threads=2, objectives={"kto": 2.0}),
            lora=LoraSection(rank=4),
        ),
        SHAPE,
    )
    assert (learning.enabled, learning.reference, learning.seed, learning.threads) == (False, 3, 9, 2)
    assert learning.objectives == {"kto": 2.0}
    assert learning.lora.rank == 4
    assert learning.reward_clip == 1.0
    clipped = resolved.learning(Settings(reward=RewardSection(clip=0.4)), SHAPE)
    assert (clipped.reward_clip, clipped.rules.reward_clip) == (0.4, 0.4)


@pytest.mark.parametrize(
    ("layers", "n_layers", "adapted"),
    [("top_third", 30, 10), ("top_third", 31, 11), ("top_third", 1, 1), ("all", 30, 0), (4, 30, 4), (99, 30, 30)],
)
def test_the_adapted_blocks_are_counted_from_the_top(
    layers: Literal["top_third", "all"] | int, n_layers: int, adapted: int
) -> None:
    shape = dataclasses.replace(SHAPE, n_layers=n_layers)
    lora = resolved.lora(Settings(lora=LoraSection(layers=layers, rank=2, alpha=6.0)), shape)
    assert lora == protocol.LoraSettings(rank=2, alpha=6.0, layers=adapted)


@pytest.mark.parametrize(
    ("train_device", "adapted"), [("cpu", 10), ("cuda", 0), ("cuda:1", 0), ("auto", 10), ("auto with a card", 0)]
)
def test_by_default_a_cpu_trains_the_top_third_and_a_card_all_blocks(
    train_device: str, adapted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = "cuda:0" if train_device.endswith("card") else "cpu"
    monkeypatch.setattr(machine, "train_device", lambda name: found if name == "auto" else name)
    settings = Settings(placement=PlacementSection(train_device=train_device.removesuffix(" with a card")))
    shape = dataclasses.replace(SHAPE, n_layers=30)
    assert settings.lora.layers == "auto"
    assert resolved.lora(settings, shape).layers == adapted
    assert resolved.learning(settings, shape).lora.layers == adapted


@pytest.mark.parametrize(("devices", "adapted"), [("cpu", 10), ("card", 0)])
def test_the_plan_counts_the_blocks_that_its_devices_would_adapt(devices: str, adapted: int) -> None:
    model = dataclasses.replace(PLACED, shape=dataclasses.replace(PLACED.shape, n_layers=30))
    request = resolved.placement_request(Settings(), model, [CPU] if devices == "cpu" else [CARD, CPU])
    assert request.training.layers == adapted


def test_the_plan_of_an_actor_that_is_pinned_to_the_cpu_counts_what_a_cpu_would_adapt() -> None:
    model = dataclasses.replace(PLACED, shape=dataclasses.replace(PLACED.shape, n_layers=30))
    settings = Settings(placement=PlacementSection(actor=(1,)))
    request = resolved.placement_request(settings, model, [CARD, CPU])
    assert (request.training.layers, request.pins.actor) == (10, (1,))


def test_a_serve_worker_is_started_with_its_section() -> None:
    settings = Settings(serve=ServeSection(slots=3, context_tokens=512, threads=2, gpu_layers=-1))
    live = protocol.AdapterRef(version=2, folder="/adapters/v2")
    assert resolved.start_serve(settings, MODEL, live) == protocol.StartServe(
        model_path="/models/small.gguf",
        adapter=live,
        slots=3,
        context_tokens=512,
        threads=2,
        probes=PROBES,
        gpu_layers=-1,
        backend="llamacpp",
        device="cuda",
        dtype="bfloat16",
        server_wait_s=110.0,
    )


def test_a_server_elsewhere_is_told_of_with_its_key_and_where_adapters_lie(tmp_path: Path) -> None:
    serve = ServeSection(url="http://box:8000", api_key_file="/etc/key", adapters_seen_at="/mnt/served", gpu_layers=-1)
    settings, model = Settings(serve=serve), dataclasses.replace(MODEL, path=tmp_path)
    start = resolved.start_serve(settings, model, BASE, "/state/cache")
    assert (start.backend, start.url, start.api_key_file) == ("remote", "http://box:8000", "/etc/key")
    assert (start.shelf, start.shelf_seen_at) == ("/state/cache/served", "/mnt/served")
    assert resolved.serve_keeps_warm_s(settings, tmp_path) is None
    request = resolved.placement_request(settings, PLACED, [CPU], "remote")
    assert request.serving.engine == "none"
    (share,) = [share for share in placement.plan(request).shares if share.role == "serve"]
    assert set(share.parts) == {"runtime"}


def test_a_folder_is_served_where_and_as_it_is_trained(tmp_path: Path) -> None:
    model = dataclasses.replace(MODEL, path=tmp_path)
    settings = Settings(learn=LearnSection(dtype="float32"), placement=PlacementSection(serve_device="cpu"))
    start = resolved.start_serve(settings, model, BASE)
    assert (start.backend, start.device, start.dtype, start.gpu_layers) == ("transformers", "cpu", "float32", 0)
    on_card = Settings(placement=PlacementSection(serve_device="cuda:1"))
    start = resolved.start_serve(on_card, model, BASE)
    assert (start.device, start.dtype) == ("cuda:1", "bfloat16")
    assert resolved.serve_keeps_warm_s(settings, tmp_path) is None
    assert resolved.serve_keeps_warm_s(on_card, tmp_path) == on_card.placement.keep_warm_s
    request = resolved.placement_request(settings, PLACED, [CPU], "transformers")
    assert request.serving.engine == "torch"


def test_a_train_worker_is_started_with_its_section() -> None:
    settings = Settings(learn=LearnSection(threads=2, dtype="float32"), placement=PlacementSection(train_device="cpu"))
    assert resolved.start_train(settings, MODEL, "/state/cache") == protocol.StartTrain(
        model_path="/models/small.gguf",
        base_sha256="c" * 64,
        cache_folder="/state/cache",
        lora=protocol.LoraSettings(rank=8, alpha=16.0, layers=10),
        threads=2,
        dtype="float32",
        device="cpu",
        idle_class=True,
    )


@pytest.mark.parametrize(
    ("section", "source"),
    [
        (
            RewardSection(source="function", function="judges:short", function_folder="/etc/judges"),
            protocol.FunctionSource(entry_point="judges:short", folder="/etc/judges"),
        ),
        (
            RewardSection(source="function", function="judges:short"),
            protocol.FunctionSource(entry_point="judges:short", folder=""),
        ),
        (RewardSection(source="http", url="http://judge/"), protocol.HttpSource(url="http://judge/")),
        (
            RewardSection(source="classifier", classifier="/m", classifier_label="good", classifier_reads="answer"),
            protocol.ClassifierSource(model_folder="/m", label="good", reads="answer"),
        ),
        (
            RewardSection(source="fitted"),
            protocol.FittedSource(
                model_path="/models/small.gguf", base_sha256="c" * 64, cache_folder="/state/cache", dtype="float32"
            ),
        ),
    ],
)
def test_a_score_worker_is_started_with_its_source(section: RewardSection, source: Any) -> None:
    settings = Settings(
        reward=section,
        learn=LearnSection(threads=2, dtype="float32"),
        placement=PlacementSection(train_device="cpu"),
    )
    assert resolved.start_score(settings, MODEL, "/state/cache") == protocol.StartScore(
        source=source, threads=2, device="cpu", idle_class=True
    )


def test_a_folder_of_the_operator_is_the_same_folder_for_the_worker() -> None:
    section = RewardSection(source="classifier", classifier="models/judge")
    start = resolved.start_score(Settings(reward=section), MODEL, "/state/cache")
    assert start is not None
    assert isinstance(start.source, protocol.ClassifierSource)
    assert start.source.model_folder == str(Path.cwd() / "models" / "judge")


@pytest.mark.parametrize(
    ("reward", "learn", "off"),
    [
        (RewardSection(), LearnSection(), "no judge is configured (reward.source)"),
        (RewardSection(source="fitted"), LearnSection(enabled=False), "learn.enabled is false"),
        (
            RewardSection(source="fitted"),
            LearnSection(objectives={"sft": 1.0}),
            "no objective of learn.objectives learns from judged answers",
        ),
        (RewardSection(source="fitted"), LearnSection(objectives={"sft": 1.0, "rloo": 0.5}), ""),
    ],
)
def test_practice_is_on_where_something_judges_and_something_learns_from_it(
    reward: RewardSection, learn: LearnSection, off: str
) -> None:
    assert resolved.practising(Settings(reward=reward, learn=learn)).rules.off == off


def test_every_key_of_practice_gets_where_it_is_used() -> None:
    section = PracticeSection(
        idle_s=1.0, round_prompts=2, group_size=3, max_tokens=4, max_updates=5, prompts_file="/etc/prompts"
    )
    found = resolved.practising(Settings(practice=section, serve=ServeSection(slots=8), learn=LearnSection(seed=6)))
    assert (found.rules.idle_s, found.rules.round_prompts, found.rules.updates_max) == (1.0, 2, 5)
    assert (found.group_size, found.max_tokens, found.prompts_file, found.seed) == (3, 4, "/etc/prompts", 6)
    assert found.at_once == 2


def test_peoples_ratings_need_no_score_worker() -> None:
    assert resolved.start_score(Settings(), MODEL, "/state/cache") is None


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(JudgingRules)])
def test_every_rule_of_judging_comes_from_its_key(name: str) -> None:
    value = other_than(RewardSection(), name)
    if name == "fitted_accuracy_min":
        value = 0.9
    assert getattr(resolved.judging(Settings(reward=RewardSection(**{name: value}))), name) == value


def test_the_idle_class_is_for_the_cpu_only() -> None:
    settings = Settings(placement=PlacementSection(train_device="cuda:0"))
    assert not resolved.start_train(settings, MODEL, "/state/cache").idle_class


@pytest.mark.parametrize(
    ("device", "configured", "gpu_layers"),
    [("auto", 0, 0), ("auto", 12, 12), ("cpu", 12, 0), ("cuda", 0, -1), ("cuda:0", 12, 12), ("cuda", -1, -1)],
)
def test_the_blocks_on_the_gpu_follow_the_device_that_serves(device: str, configured: int, gpu_layers: int) -> None:
    settings = Settings(serve=ServeSection(gpu_layers=configured), placement=PlacementSection(serve_device=device))
    assert resolved.start_serve(settings, MODEL, BASE).gpu_layers == gpu_layers


def test_a_pinned_worker_is_on_its_first_device() -> None:
    n_cards = len(list(Path("/dev").glob("nvidia[0-9]")))
    pinned = Settings(placement=PlacementSection(serve=(n_cards,), actor=(n_cards, 9)))
    assert resolved.start_train(pinned, MODEL, "/state/cache").device == "cpu"
    assert resolved.start_serve(pinned, MODEL, BASE).gpu_layers == 0
    on_card = Settings(placement=PlacementSection(serve=(n_cards + 1,), actor=(n_cards + 1,)))
    assert resolved.start_train(on_card, MODEL, "/state/cache").device == f"cuda:{n_cards + 1}"
    assert resolved.start_serve(on_card, MODEL, BASE).gpu_layers == -1


PLACED = placement.Model(shape=SHAPE, tied=True, file_bytes=10**8)
CARD = placement.Device(name="cuda:0", kind="cuda", total_bytes=10**11, free_bytes=10**11)
CPU = placement.Device(name="cpu", kind="cpu", total_bytes=10**11, free_bytes=10**11)


@pytest.mark.parametrize(("slots", "tokens"), [(1, 10240), (16, 10240), (64, 40960)])
def test_the_context_grows_with_the_slots_unless_it_is_set(slots: int, tokens: int) -> None:
    settings = Settings(serve=ServeSection(slots=slots))
    assert resolved.start_serve(settings, MODEL, BASE).context_tokens == tokens
    assert resolved.placement_request(settings, PLACED, [CPU]).serving.context_tokens == tokens
    settings = Settings(serve=ServeSection(slots=slots, context_tokens=2048))
    assert resolved.start_serve(settings, MODEL, BASE).context_tokens == 2048


def test_a_plan_is_asked_for_with_the_settings() -> None:
    settings = Settings(
        serve=ServeSection(slots=3, context_tokens=1024, default_max_tokens=200),
        learn=LearnSection(max_batch=20, minibatches=5, threads=7, dtype="float32"),
        lora=LoraSection(rank=4, layers="all"),
    )
    request = resolved.placement_request(settings, PLACED, [CPU])
    assert request.serving == placement.Serving(slots=3, context_tokens=1024)
    assert request.training == placement.Training(
        dtype="float32",
        rank=4,
        layers=0,
        critic="head",
        batch_tokens=20 * 328,
        sequence_tokens=328,
        minibatches=5,
        lanes=4,
    )


@pytest.mark.parametrize(
    ("section", "pins"),
    [
        (PlacementSection(), placement.Pins(serve=(1,))),
        (PlacementSection(serve_device="cuda"), placement.Pins()),
        (PlacementSection(serve_device="cuda:0"), placement.Pins(serve=(0,))),
        (PlacementSection(train_device="cpu"), placement.Pins(serve=(1,), actor=(1,), critic=(1,), reference=(1,))),
        (
            PlacementSection(actor=(0,), critic=(1,), reward=(1,)),
            placement.Pins(serve=(1,), actor=(0,), critic=(1,), reward=(1,)),
        ),
    ],
)
def test_the_devices_that_are_set_are_pins_of_the_plan(section: PlacementSection, pins: placement.Pins) -> None:
    assert resolved.placement_request(Settings(placement=section), PLACED, [CARD, CPU]).pins == pins


@pytest.mark.parametrize(
    ("wanted", "card_bytes", "held"),
    [
        ("auto", 10**11, "dequantised"),
        ("auto", 10**8, "quantised"),
        ("dequantised", 10**8, "dequantised"),
        ("quantised", 10**11, "quantised"),
    ],
)
def test_a_plan_holds_the_base_as_the_trainer_will(wanted: Any, card_bytes: int, held: str) -> None:
    model = dataclasses.replace(PLACED, packed_block_bytes=10**6)
    card = dataclasses.replace(CARD, total_bytes=card_bytes)
    settings = Settings(learn=LearnSection(base_weights=wanted))
    assert resolved.placement_request(settings, model, [card, CPU]).training.held == held
    assert resolved.start_train(settings, MODEL, "/state/cache").base_weights == wanted


def test_a_device_that_is_not_there_is_no_plan() -> None:
    settings = Settings(placement=PlacementSection(train_device="cuda:3"))
    with pytest.raises(placement.BadPin, match="names 'cuda:3', which is not there; there are cuda:0, cpu"):
        resolved.placement_request(settings, PLACED, [CARD, CPU])


def test_threads_are_chosen_from_the_machine_unless_they_are_set() -> None:
    assert resolved.start_serve(Settings(), MODEL, BASE).threads == machine.threads(0)


def test_an_asked_worker_gets_a_moment_before_it_is_killed() -> None:
    limits = resolved.worker_limits(120.0, 30.0)
    assert (limits.start_timeout_s, limits.hang_timeout_s) == (120.0, 30.0)
    assert 0 < limits.stop_timeout_s < 10


def test_the_api_sees_a_reload() -> None:
    current = Settings()
    live = resolved.LiveApiSettings(lambda: current)
    assert (live.max_body_bytes, live.allowed_hosts) == (2**20, ())
    current = Settings(api=ApiSection(max_body_bytes=2048, read_timeout_s=3.0, allowed_hosts=("box.local",)))
    assert (live.max_body_bytes, live.read_timeout_s, live.allowed_hosts) == (2048, 3.0, ("box.local",))


def test_every_key_of_the_settings_is_used_somewhere() -> None:
    """Names that are read as an attribute, also by a section of itself, or copied as fields of a dataclass."""
    records = (protocol.PpoSettings, protocol.PreferenceSettings, plan.Rules, gate.Limits, JudgingRules, watch.Rules)
    used = {field.name for record in records for field in dataclasses.fields(record)}
    for path in EDGED.rglob("*.py"):
        if path.name == "config.py":
            continue
        read = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        own = path.parent.name == "settings"
        used |= {
            node.attr for node in read if not own or (isinstance(node.value, ast.Name) and node.value.id == "self")
        }
    for name, field in Settings.model_fields.items():
        assert name in used
        assert issubclass(type(field.default), Section)
        assert set(type(field.default).model_fields) - used == set(), name


def test_memory_is_planned_for_written_answers_too() -> None:
    def batch_tokens(**objectives: float) -> int:
        settings = Settings(learn=LearnSection(objectives=objectives, max_batch=64))
        return resolved.placement_request(settings, PLACED, [CPU]).training.batch_tokens

    assert batch_tokens(ppo=1.0, dpo=0.5) == 2 * batch_tokens(ppo=1.0)
