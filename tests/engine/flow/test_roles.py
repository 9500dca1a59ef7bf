"""Which processes a flow's devices come to, what is refused, and what a server is shown."""

from __future__ import annotations

from typing import Any

import pytest

from engine.flow import roles
from engine.flow.roles import check_there, default_lora, placed, server_environment, train_plan
from engine.protocol import TrainPlan
from engine.train.ranks.leader import check_plan


def test_a_role_that_is_not_named_is_on_the_cpu_or_by_the_actor() -> None:
    assert set(placed({}).values()) == {"cpu:0"}
    assert set(placed({"serve": "cpu"}).values()) == {"cpu:0"}
    everyone = {"serve": "cpu:0", "actor": "cuda:1", "critic": "cuda:1", "reference": "cuda:1"}
    assert placed({"actor": "cuda:1"}) == everyone
    assert placed({"actor": "cuda:1", "critic": "cuda"}) == everyone | {"critic": "cuda:0"}


@pytest.mark.parametrize(
    ("devices", "complaint"),
    [
        ({"critics": "cpu"}, "'critics' is no role; the roles are serve, actor, critic, reference"),
        ({"serve": "gpu"}, "got 'gpu' for the serve, expected"),
        ({"actor": "cuda:x"}, "got 'cuda:x' for the actor"),
        ({"actor": 0}, "got 0 for the actor"),
    ],
)
def test_what_is_no_role_or_no_device_is_refused_by_name(devices: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        placed(devices)


def test_roles_on_one_device_share_a_process_and_others_are_ranks_of_one_update() -> None:
    assert train_plan(placed({"actor": "cuda:1", "serve": "cuda:0"}), threads=8) == TrainPlan()
    critic_apart = train_plan(placed({"actor": "cuda:1", "critic": "cuda:2"}), threads=8)
    assert critic_apart == TrainPlan(mode="split", devices=("cuda:1", "cuda:2"), critic=(1,), reference=(0,), threads=4)
    all_apart = train_plan(placed({"critic": "cpu:1", "reference": "cpu:2"}), threads=2)
    assert all_apart == TrainPlan(mode="split", devices=("cpu",) * 3, critic=(1,), reference=(2,), threads=1)
    for plan in (critic_apart, all_apart):
        check_plan(plan, plan.devices[0])


def test_an_adapter_is_by_default_of_a_size_that_its_device_can_train() -> None:
    assert [default_lora(n, "cpu:0").layers for n in (30, 4, 1)] == [10, 2, 1]
    assert default_lora(30, "cuda:0").layers == 0


def test_a_server_sees_the_card_of_its_number_among_those_that_the_script_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert server_environment("cpu:0") == {}
    assert server_environment("cuda:1") == {"CUDA_VISIBLE_DEVICES": "1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6")
    assert server_environment("cuda:1") == {"CUDA_VISIBLE_DEVICES": "6"}
    assert server_environment("cuda:2") == {"CUDA_VISIBLE_DEVICES": ""}, "none, rather than another one"


def test_a_card_that_is_not_there_is_refused_with_the_role_that_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # also where there are cards, none is to be seen
    with pytest.raises(ValueError, match="torch reaches no cuda:1 for the critic, and 0 cards in all; give another"):
        check_there(placed({"critic": "cuda:1"}))
    with pytest.raises(ValueError, match="llama.cpp reaches no cuda:99 to serve on; give another"):
        check_there(placed({"serve": "cuda:99"}))


def test_nobody_is_asked_for_a_flow_without_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles.subprocess, "run", None)
    check_there(placed({"critic": "cpu:1"}))
