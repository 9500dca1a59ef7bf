"""The plan's bytes against what real processes take on this machine: each role in a child, SmolLM2-135M, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adapters.llamacpp_format import read_base_shape
from engine.placement import Device, Model, Request, Reward, Role, Serving, Share, Training
from engine.placement.memory import reward_share, serve_share, train_shares

pytestmark = [pytest.mark.real_model, pytest.mark.full]

ROLE = Path(__file__).with_name("role.py")
ROOT = Path(__file__).parents[3]
TOLERANCE = 0.15
CPU = Device(name="cpu", kind="cpu", total_bytes=10**12, free_bytes=10**12)
SHORT = {"dtype": "bfloat16", "layers": 10, "rank": 8, "lanes": 2, "prompt_tokens": 42, "completion_tokens": 48}
LONG = SHORT | {"completion_tokens": 598}


@pytest.fixture(scope="module")
def cache(packaged_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the unpacked base, so that no measured process unpacks it."""
    folder = tmp_path_factory.mktemp("cache")
    play("critic", packaged_model, folder, folder, SHORT | {"episodes": 1})
    return folder


def play(role: Role, model: Path, cache: Path, folder: Path, work: dict[str, Any]) -> int:
    """Peak bytes of a process that plays the role."""
    command = [sys.executable, str(ROLE), role, str(model), str(cache), str(folder), json.dumps(work)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


def judge(share: Share, measured: int) -> None:
    """The plan is within the tolerance of what was measured. `pytest -rP` shows both."""
    print(f"{share.role}: {share.n_bytes:,} bytes planned, {measured:,} measured, {share.n_bytes / measured - 1:+.1%}")
    assert share.n_bytes == pytest.approx(measured, rel=TOLERANCE), share.parts


def request_for(model: Path, work: dict[str, Any]) -> Request:
    sequence_tokens = work["prompt_tokens"] + work["completion_tokens"]
    return Request(
        devices=(CPU,),
        model=Model(shape=read_base_shape(model), tied=True, file_bytes=model.stat().st_size),
        serving=Serving(slots=4, context_tokens=2048),
        training=Training(
            dtype=work["dtype"],
            rank=work["rank"],
            layers=work["layers"],
            critic="head",
            batch_tokens=work["episodes"] * sequence_tokens,
            sequence_tokens=sequence_tokens,
            minibatches=1,
            lanes=work["lanes"],
            trunk_cache_bytes=0,  # the cap is far above what these few answers fill
            cached_adapters=0,
        ),
    )


@pytest.mark.parametrize(
    ("role", "work"),
    [
        ("reference", SHORT | {"episodes": 8}),
        ("reference", LONG | {"episodes": 4}),
        ("critic", SHORT | {"episodes": 16}),
        ("actor", SHORT | {"episodes": 28}),
        ("actor", LONG | {"episodes": 4}),
        ("actor", SHORT | {"episodes": 14, "layers": 30, "lanes": 1}),
        ("actor", SHORT | {"episodes": 14, "dtype": "float32"}),
    ],
)
def test_a_training_role_takes_what_the_plan_says(
    role: Role, work: dict[str, Any], packaged_model: Path, cache: Path, tmp_path: Path
) -> None:
    if work["dtype"] == "float32":
        play("critic", packaged_model, cache, tmp_path, work | {"episodes": 1})  # unpacks it
    measured = play(role, packaged_model, cache, tmp_path, work)
    request = request_for(packaged_model, work)
    tokens = max(640, request.training.sequence_tokens)
    (share,) = train_shares(request, 0, [role], tokens=tokens, n_shards=1)
    if role == "actor":  # the reference's turn comes in the same process
        (reference,) = train_shares(request, 0, ["reference"], tokens=tokens, n_shards=1)
        assert sum(reference.working.values()) < sum(share.working.values())
    judge(share, measured)


@pytest.mark.parametrize(("slots", "context_tokens"), [(4, 2048), (16, 10240)])
def test_serving_takes_what_the_plan_says(
    slots: int, context_tokens: int, packaged_model: Path, cache: Path, tmp_path: Path
) -> None:
    work = SHORT | {"episodes": 0, "slots": slots, "context_tokens": context_tokens}
    measured = play("serve", packaged_model, cache, tmp_path, work)
    model = request_for(packaged_model, work | {"episodes": 1}).model
    share = serve_share(model, Serving(slots=slots, context_tokens=context_tokens), CPU, 0)
    judge(share, measured)


def test_a_reward_model_takes_what_the_plan_says(packaged_model: Path, cache: Path, tmp_path: Path) -> None:
    work = SHORT | {"episodes": 0}
    play("reward", packaged_model, cache, tmp_path, work)  # writes the model
    measured = play("reward", packaged_model, cache, tmp_path, work)
    reward = Reward(source="classifier", weights_bytes=(tmp_path / "model.safetensors").stat().st_size)
    judge(reward_share(request_for(packaged_model, work | {"episodes": 1}), reward, 0), measured)
