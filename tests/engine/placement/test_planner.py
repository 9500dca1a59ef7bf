"""Plans of many boxes: who goes where, what a byte too few changes, and what the error says."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.placement import (
    BadPin,
    Device,
    DoesNotFit,
    Pins,
    Plan,
    Request,
    Reward,
    Serving,
    Shortfall,
    device_line,
    hindrance,
    moves,
    plan,
    plan_both,
    share_line,
    summary,
)
from engine.placement.search import micro_batch_sizes, search
from tests.engine.placement.boxes import GB, card, cards, cpu, large, small


def where(made: Plan) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    layout = made.layout
    return made.mode, layout.serve, layout.actor, layout.critic, layout.reference


def pinned(request: Request, **pins: tuple[int, ...]) -> Request:
    return dataclasses.replace(request, pins=Pins(**pins))


def with_free(request: Request, *free_bytes: int) -> Request:
    devices = tuple(
        dataclasses.replace(device, free_bytes=free) for device, free in zip(request.devices, free_bytes, strict=True)
    )
    return dataclasses.replace(request, devices=devices)


# ------------------------------------------------------------------------------------------------------- who goes where


@pytest.mark.parametrize(
    ("n", "free_gb", "busy", "idle"),
    [
        (1, 80, ("timeslice", (0,), (0,), (0,), (0,)), ("timeslice", (), (0,), (0,), (0,))),
        (2, 80, ("split", (1,), (0,), (1,), (1,)), ("split", (), (0,), (1,), (1,))),
        (3, 80, ("data_parallel", (2,), (0, 1), (2,), (2,)), ("data_parallel", (), (0, 1), (2,), (2,))),
        (4, 80, ("data_parallel", (3,), (0, 1), (2,), (2,)), ("data_parallel", (), (0, 1, 2), (3,), (3,))),
        # No room for critic and serving beside each other: they part.
        (2, 26, ("timeslice", (1,), (0,), (0,), (0,)), ("split", (), (0,), (1,), (1,))),
        # The base takes 16 GB: no card holds it with what training needs.
        (2, 18, ("sharded", (1,), (0, 1), (0, 1), (0, 1)), ("sharded", (), (0, 1), (0, 1), (0, 1))),
        (4, 14, ("sharded", (3,), (0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3)), None),
    ],
)
def test_cards_are_used_by_their_number_and_their_room(
    n: int, free_gb: int, busy: tuple[object, ...], idle: tuple[object, ...] | None
) -> None:
    plans = plan_both(large(*cards(n, free_gb * GB)))
    assert where(plans.busy) == busy
    assert idle is None or where(plans.idle) == idle


def test_without_a_card_the_cpu_is_the_device_and_serving_stays_there() -> None:
    plans = plan_both(small(cpu()))
    assert where(plans.busy) == where(plans.idle) == ("timeslice", (0,), (0,), (0,), (0,))
    assert moves(plans.busy, plans.idle) == ()
    assert not plans.busy.serve_sleeps


def test_the_cpu_does_not_train_beside_a_card() -> None:
    made = plan(small(card(0, 80 * GB), cpu()))
    assert where(made) == ("timeslice", (0,), (0,), (0,), (0,))
    assert made.needs[1] == 0


def test_processes_on_cpus_can_stand_for_cards() -> None:
    assert where(plan(small(cpu(), cpu()))) == ("split", (1,), (0,), (1,), (1,))
    assert where(plan(small(cpu(), cpu(), cpu())))[0] == "data_parallel"


def test_a_second_box_takes_the_critic_and_never_serving() -> None:
    made = plan(large(card(0, 80 * GB, host="shed"), card(0, 80 * GB)))
    assert where(made) == ("split", (1,), (1,), (0,), (0,))
    assert "on shed" in made.request.devices[0].label


def test_rewards_are_judged_beside_the_critic() -> None:
    request = dataclasses.replace(
        large(*cards(2, 80 * GB), cpu()), reward=Reward(source="classifier", weights_bytes=GB)
    )
    made = plan(request)
    assert made.layout.reward == made.layout.critic == (1,)
    assert made.needs[1] > plan(dataclasses.replace(request, reward=None)).needs[1] + GB
    assert plan(pinned(request, reward=(2,))).needs[2] > GB
    assert plan(large(card(0, 80 * GB))).layout.reward == ()


# ----------------------------------------------------------------------------------------------------------------- pins


def test_pins_are_followed() -> None:
    request = large(*cards(4, 80 * GB))
    assert where(plan(pinned(request, actor=(0, 1), critic=(2,)))) == ("data_parallel", (3,), (0, 1), (2,), (2,))
    assert where(plan(pinned(request, actor=(3,), critic=(3,), serve=(0,)))) == ("timeslice", (0,), (3,), (3,), (3,))
    assert where(plan(pinned(request, critic=(0,)))) == ("data_parallel", (3,), (1, 2), (0,), (0,))
    assert plan(pinned(request, reference=(1,), critic=(0,))).layout.reference == (1,)
    assert where(plan(pinned(small(card(0, 80 * GB), cpu()), serve=(1,))))[1] == (1,)


def test_a_pin_is_not_left_for_room() -> None:
    request = large(card(0, 20 * GB), card(1, 80 * GB))
    assert plan(request).layout.actor == (1,)
    with pytest.raises(DoesNotFit) as caught:
        plan(pinned(request, actor=(0,), critic=(1,), serve=(1,)))
    assert caught.value.shortfall.role == "actor"
    assert caught.value.shortfall.device == 0


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"actor": (2,)}, "placement.actor: there is no device 2; there are 0 (cuda:0), 1 (cuda:1)"),
        ({"critic": (0, 0)}, "placement.critic: [0, 0] names a device twice; name each once"),
        ({"serve": (0, 1)}, "placement.serve: [0, 1] are 2 devices, it runs on one; name one"),
    ],
)
def test_a_pin_that_cannot_be_followed_is_refused(pins: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(BadPin) as caught:
        plan(pinned(large(*cards(2, 80 * GB)), **pins))
    assert str(caught.value) == message


# ---------------------------------------------------------------------------------------------------------- the memory


def test_serving_sleeps_only_if_memory_demands_it() -> None:
    roomy = plan(small(cpu()))
    least = roomy.needs[0]
    assert not plan(with_free(roomy.request, least)).serve_sleeps
    squeezed = plan(with_free(roomy.request, least - 1))
    assert squeezed.serve_sleeps or squeezed.micro_batch_tokens < roomy.micro_batch_tokens
    serve = sum(share.n_bytes for share in roomy.shares if share.role == "serve")
    asleep = plan(with_free(roomy.request, least - serve))
    assert asleep.serve_sleeps
    assert asleep.needs[0] == least - serve


def test_a_byte_decides_between_a_plan_and_an_error() -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan(small(cpu(GB)))
    ((number, missing),) = caught.value.shortfall.missing.items()
    assert number == 0
    assert plan(small(cpu(GB + missing))).needs == (GB + missing,)
    with pytest.raises(DoesNotFit):
        plan(small(cpu(GB + missing - 1)))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_byte_decides_on_cards_too(n: int) -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan(large(*cards(n, 9 * GB)))
    missing = caught.value.shortfall.missing
    enough = [9 * GB + missing.get(number, 0) for number in range(n)]
    assert plan(with_free(large(*cards(n, 9 * GB)), *enough))
    enough[max(missing)] -= 1
    with pytest.raises(DoesNotFit):
        plan(with_free(large(*cards(n, 9 * GB)), *enough))


def test_micro_batches_shrink_before_serving_goes_to_sleep() -> None:
    request = small(cpu(), sequence_tokens=96)
    full = plan(request)
    assert full.micro_batch_tokens == 640
    smaller = plan(with_free(request, full.needs[0] - 1))
    assert smaller.micro_batch_tokens < 640
    assert not smaller.serve_sleeps


def test_no_micro_batch_is_smaller_than_the_longest_answer() -> None:
    sizes = micro_batch_sizes(small(cpu(), sequence_tokens=300))
    assert sizes == (640, 576, 512, 480, 448, 416, 384, 352, 320, 300)
    assert micro_batch_sizes(small(cpu(), sequence_tokens=2000)) == (2000,)


def test_roles_of_one_process_take_turns() -> None:
    made = plan(small(cpu()))
    training = [share for share in made.shares if share.role != "serve"]
    held = sum(sum(share.held.values()) for share in training)
    turns = [sum(share.working.values()) for share in training]
    serve = sum(share.n_bytes for share in made.shares if share.role == "serve")
    assert made.needs == (serve + held + max(turns),)
    assert max(turns) < sum(turns)


# ------------------------------------------------------------------------------------------------------------ the error


def test_the_error_names_the_role_the_bytes_and_what_would_fit() -> None:
    request = large(card(0, 21 * GB))
    with pytest.raises(DoesNotFit) as caught:
        plan(request)
    missing = caught.value.shortfall.missing[0]
    assert str(caught.value).startswith(f"actor: cuda:0 has 21,000,000,000 bytes free, {missing:,} too few; ")
    assert 'base_weights = "quantised"' in caught.value.advice
    assert "lora.layers = " in caught.value.advice
    assert "micro-batches of " in caught.value.advice


def test_advice_is_tried_and_is_the_mildest() -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan(large(card(0, 22 * GB)))
    remedies = {remedy.change.split(" = ")[0].split(" of ")[0]: remedy for remedy in caught.value.remedies}
    for remedy in remedies.values():
        assert plan(remedy.request) == remedy.plan
    layers = remedies["lora.layers"].request.training.layers
    with pytest.raises(DoesNotFit):
        plan(large(card(0, 22 * GB), layers=layers + 1))


def test_less_context_is_advised_where_serving_is_what_does_not_fit() -> None:
    request = small(cpu(3 * GB), serving=Serving(slots=16, context_tokens=200_000))
    with pytest.raises(DoesNotFit) as caught:
        plan(request)
    assert caught.value.shortfall.role == "serve"
    (remedy,) = caught.value.remedies
    assert remedy.change == f"serve.context_tokens = {remedy.request.serving.context_tokens}"
    assert remedy.request.serving.context_tokens % 256 == 0


def test_a_critic_of_its_own_is_given_up_where_that_is_enough() -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan(small(cpu(GB), critic="lora"))
    needed = plan(small(cpu(), critic="head", sequence_tokens=640))
    asleep = needed.needs[0] - sum(share.n_bytes for share in needed.shares if share.role == "serve")
    with pytest.raises(DoesNotFit) as caught:
        plan(small(cpu(asleep), critic="lora"))
    assert 'critic = "head"' in [remedy.change for remedy in caught.value.remedies]


def test_changes_are_added_up_where_none_is_enough() -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan(large(card(0, 10 * GB)))
    (remedy,) = caught.value.remedies
    assert remedy.change.startswith('critic = "head", base_weights = "quantised"')
    assert plan(remedy.request) == remedy.plan


def test_only_what_the_trainer_can_load_is_advised() -> None:
    request = dataclasses.replace(large(card(0, 18 * GB)), dtypes=("float32", "bfloat16"))
    with pytest.raises(DoesNotFit) as caught:
        plan(request)
    assert "dtype" not in caught.value.advice


def advised(request: Request) -> list[str]:
    """The changes, each of which was tried and can be carried out."""
    with pytest.raises(DoesNotFit) as caught:
        plan(request)
    for remedy in caught.value.remedies:
        assert plan(remedy.request) == remedy.plan
    return [remedy.change for remedy in caught.value.remedies]


def test_a_pin_to_a_card_that_is_too_small_is_advised_to_be_given_up() -> None:
    request = large(card(0, 80 * GB), card(1, GB), cpu(4 * GB))
    assert plan(request).layout.actor == (0,)
    assert advised(pinned(request, actor=(1,))) == ["placement.actor = []"]
    assert advised(pinned(request, actor=(1,), critic=(1,))) == ["placement.actor = [], placement.critic = []"]
    assert advised(pinned(request, actor=(0,), critic=(1,), serve=(0,))) == ["placement.critic = []"]


def test_pins_are_given_up_before_anything_else_where_that_is_only_a_part_of_what_is_wanted() -> None:
    request = pinned(large(card(0, 20 * GB), card(1, GB)), actor=(1,), critic=(1,), serve=(1,))
    (change,) = advised(request)
    assert change.startswith("placement.serve = [], placement.actor = [], placement.critic = [], ")


def test_a_cpu_with_room_is_advised_where_the_card_has_none() -> None:
    serving = Serving(slots=4, context_tokens=4096)
    box = small(card(0, GB // 8), cpu(60 * GB), serving=serving)
    assert "placement.actor = [1], placement.serve = [1]" in advised(box)
    beside = small(card(0, GB), cpu(60 * GB), serving=serving)
    assert "placement.actor = [1]" in advised(beside), "serving has room on the card"
    assert "placement.actor = [1], placement.critic = []" in advised(pinned(beside, critic=(0,)))
    least = plan(pinned(box, actor=(1,), serve=(1,))).needs[1]
    tight = advised(small(card(0, GB // 8), cpu(least), serving=serving))
    assert 'placement.actor = [1], placement.serve = [1], dtype = "bfloat16"' in tight, "where float32 takes too much"
    assert not any("placement" in change for change in advised(small(card(0, GB // 8), cpu(GB), serving=serving)))
    assert not any("placement" in change for change in advised(small(cpu(GB), critic="lora")))


def test_where_nothing_helps_the_error_says_so() -> None:
    with pytest.raises(DoesNotFit, match="no setting makes it fit") as caught:
        plan(large(card(0, GB)))
    assert caught.value.remedies == ()


# --------------------------------------------------------------------------------------------------- busy, idle, words


def test_all_cards_train_while_nobody_asks_and_the_way_back_is_the_same_plan() -> None:
    plans = plan_both(large(*cards(4, 80 * GB)))
    there = [(move.action, move.role, move.device) for move in moves(plans.busy, plans.idle)]
    assert there == [
        ("stop", "serve", 3),
        ("stop", "critic", 2),
        ("stop", "reference", 2),
        ("start", "actor", 2),
        ("start", "critic", 3),
        ("start", "reference", 3),
    ]
    back = moves(plans.idle, plans.busy)
    assert {(move.role, move.device) for move in back if move.action == "start"} == {
        (role, device) for action, role, device in there if action == "stop"
    }
    assert {number for role in ("actor", "critic") for number in plans.idle.layout.of(role)} == {0, 1, 2, 3}
    assert plan_both(plans.idle.request) == plans


def test_all_that_is_not_carried_out_is_a_serve_worker_that_would_have_to_give_way() -> None:
    assert hindrance(plan(small(cpu()))) == ""
    assert hindrance(plan(large(*cards(2, 80 * GB)))) == ""
    assert "not put to sleep" in hindrance(plan(large(card(0, 26 * GB))))
    assert "does not leave its card" in hindrance(plan(large(*cards(4, 80 * GB)), idle=True))


def test_no_base_is_cut_where_a_pin_has_critic_or_reference_elsewhere() -> None:
    request = large(*cards(2, 18 * GB), cpu())
    for pins in ({}, {"critic": (1, 0)}):
        made = plan(pinned(request, serve=(2,), **pins))
        assert (made.mode, hindrance(made)) == ("sharded", "")
    for pins, change in (
        ({"critic": (0,)}, "placement.critic = []"),
        ({"reference": (1,)}, "placement.reference = []"),
        ({"critic": (0, 1), "reference": (0,)}, "placement.reference = []"),
    ):
        assert advised(pinned(request, serve=(2,), **pins))[0] == change


def test_cards_and_the_cpu_do_not_train_together() -> None:
    request = small(card(0, 80 * GB), cpu())
    assert where(plan(pinned(request, actor=(1,))))[2:] == ((1,), (1,), (1,)), "who is not pinned goes along"
    assert hindrance(plan(pinned(request, actor=(1,)))) == ""
    for pins in ({"actor": (0, 1)}, {"actor": (0,), "critic": (1,)}, {"reference": (1,)}):
        assert hindrance(plan(pinned(request, **pins))) == "the ranks of an update are all on cards or all on the CPU"


def test_a_plan_is_told_in_bytes() -> None:
    made = plan(small(cpu()))
    assert summary(made) == (
        "timeslice (the roles take turns on one base), actor on cpu; serving goes on during updates; "
        "micro-batches of 640 tokens"
    )
    assert device_line(made, 0) == f"{made.needs[0]:,} bytes at the busiest moment, of 64,000,000,000 free"
    line = share_line(made.shares[0])
    assert line.startswith(f"{made.shares[0].n_bytes:,} bytes: kv 377,487,360, ")
    assert "serving is idle" in summary(plan(large(card(0, 80 * GB)), idle=True))
    assert "serving sleeps during updates" in summary(plan(large(card(0, 26 * GB))))


# ---------------------------------------------------------------------------------------------------------- properties


_devices = st.lists(
    st.builds(card, st.integers(0, 7), st.integers(0, 60 * GB), st.sampled_from(["", "", "shed"])),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60)
@given(_devices, st.sampled_from(["head", "lora"]), st.sampled_from([0, 8]), st.booleans())
def test_a_plan_keeps_every_device_within_its_memory_and_every_role_on_one(
    devices: list[Device], critic: str, layers: int, idle: bool
) -> None:
    request = large(*devices, critic=critic, layers=layers)
    made = search(request, idle=idle)
    if isinstance(made, Shortfall):
        assert all(missing > 0 for missing in made.missing.values())
        return
    assert all(need <= device.free_bytes for need, device in zip(made.needs, devices, strict=True))
    for role in ("actor", "critic", "reference"):
        assert made.layout.of(role)
    assert all(devices[number].host == "" for number in made.layout.serve)
    assert made.micro_batch_tokens >= request.training.sequence_tokens
    placed = {(share.role, share.device) for share in made.shares}
    assert placed == {(role, n) for role in ("serve", "actor", "critic", "reference") for n in made.layout.of(role)}


@settings(max_examples=40)
@given(st.integers(1, 40 * GB), st.integers(0, 4 * GB))
def test_more_memory_never_turns_a_plan_into_an_error(free: int, more: int) -> None:
    before = search(small(cpu(free)), idle=False)
    if isinstance(before, Shortfall):
        return
    after = plan(small(cpu(free + more)))
    assert after.serve_sleeps <= before.serve_sleeps
    assert after.serve_sleeps < before.serve_sleeps or after.micro_batch_tokens >= before.micro_batch_tokens
