"""From a plan in bytes to ranks: who trains where, and what stands in for a plan that cannot be made or carried out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.devices import DevicesUnknown, divide
from edged.placing import ONE_PROCESS, Placing, ranks_of
from engine import placement
from engine.placement import Device, Pins, Request
from engine.placement.search import search
from engine.protocol import MICRO_BATCH_TOKENS, TrainPlan
from engine.train.ranks.leader import check_plan
from tests.engine.placement.boxes import GB, card, cards, cpu, large, small


def pinned(request: Request, **pins: tuple[int, ...]) -> placement.Plan:
    return placement.plan(dataclasses.replace(request, pins=Pins(**pins)))


def test_one_device_is_the_train_worker_alone() -> None:
    assert ranks_of(placement.plan(small(cpu())), 8) == ONE_PROCESS


def test_pins_become_ranks_in_the_order_actor_critic_reference() -> None:
    made = ranks_of(pinned(large(*cards(4, 80 * GB)), actor=(3, 1), critic=(2,), reference=(0,)), 8)
    assert made == TrainPlan(
        mode="data_parallel",
        devices=("cuda:3", "cuda:1", "cuda:0", "cuda:2"),
        actor=(0, 1),
        critic=(3,),
        reference=(2,),
        threads=2,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
    )


def test_a_base_that_no_card_holds_is_cut_over_all_of_them() -> None:
    made = ranks_of(placement.plan(large(*cards(3, 16 * GB))), 6)
    assert (made.mode, len(made.devices)) == ("sharded", 3)
    assert made.actor == made.critic == made.reference == (0, 1, 2)


def test_the_cpu_as_two_devices_trains_actor_and_critic_side_by_side_with_half_of_the_threads_each() -> None:
    box = small(*divide(cpu(), 2))
    made = ranks_of(placement.plan(box), 4)
    assert (made.mode, made.devices, made.threads) == ("split", ("cpu", "cpu"), 2)
    assert (made.actor, made.critic, made.reference) == ((0,), (1,), (1,))


def test_the_plan_is_decided_once_and_told() -> None:
    placing = Placing(lambda devices: small(*devices), lambda: divide(cpu(), 2), 4)
    assert placing.training == ONE_PROCESS
    placing.decide()
    assert placing.training.mode == "split"
    assert placing.why.startswith("split (critic and reference beside the actor), actor on cpu; ")


def unknown() -> Sequence[Device]:
    raise DevicesUnknown("nvidia-smi failed; check the NVIDIA driver")


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        (unknown, "nvidia-smi failed"),
        (lambda: (cpu(GB // 2),), "too few"),
        (lambda: (card(0, 26 * GB),), "serving is not put to sleep"),
    ],
)
def test_without_a_plan_that_can_be_carried_out_one_process_trains_and_says_why(devices: object, why: str) -> None:
    placing = Placing(lambda found: large(*found), devices, 4)  # type: ignore[arg-type]
    placing.decide()
    assert placing.training == ONE_PROCESS
    assert placing.why.startswith("one process, because ")
    assert why in placing.why


@st.composite
def boxes(draw: st.DrawFn) -> Request:
    """A box with up to four cards and some room on each, what it is to train, and pins."""
    n_cards, n_cpus = draw(st.sampled_from((2, 3, 4, 1, 0))), draw(st.integers(1, 3))
    room = [draw(st.sampled_from((18, 26, 80))) * GB for _ in range(n_cards)]
    devices = [card(number, free_bytes) for number, free_bytes in enumerate(room)]
    devices += [cpu(draw(st.sampled_from((4, 16, 64))) * GB)] * n_cpus
    numbers = st.integers(0, len(devices) - 1)

    def pin(most: int) -> tuple[int, ...]:
        return tuple(draw(st.one_of(st.just([]), st.lists(numbers, min_size=1, max_size=most, unique=True))))

    critic = draw(st.sampled_from(("head", "lora")))
    request = draw(st.sampled_from((small, large)))(*devices, critic=critic, micro_batch_tokens=512)
    return dataclasses.replace(
        request, pins=Pins(serve=pin(1), actor=pin(3), critic=pin(3), reference=pin(3), reward=pin(1))
    )


@settings(deadline=None, max_examples=150)
@given(boxes())
def test_every_plan_without_a_hindrance_is_one_that_the_trainer_takes(request: Request) -> None:
    found = search(request, idle=False)
    if isinstance(found, placement.Shortfall) or placement.hindrance(found):
        return
    ranks = ranks_of(found, 4)
    check_plan(ranks, ranks.devices[0] if ranks.devices else "cpu")
    assert len({name.partition(":")[0] for name in ranks.devices}) <= 1
    for role in placement.ROLES:
        pinned_to = request.pins.of(role)
        assert not pinned_to or not found.layout.of(role) or {*found.layout.of(role)} == {*pinned_to}
