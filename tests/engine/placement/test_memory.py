"""The byte model against hand arithmetic and against the constants of the code that it describes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from engine import blocks
from engine.generate import llamacpp
from engine.generate import worker as serve_worker
from engine.lora import new_lora
from engine.models import Base, load_folder
from engine.placement import PARTS, Device, Dtype, Model, Reward, Training, memory
from engine.placement.memory import Share
from engine.protocol import MICRO_BATCH_TOKENS, LoraSettings
from engine.train import adamw, attention, decoder, lanes, logprobs, scorer
from tests.engine.placement.boxes import LARGE, SERVING, SMALL, card, cpu, small
from tests.engine.train.tiny import write_tiny_model


def training(**changes: object) -> Training:
    return dataclasses.replace(small(cpu()).training, **changes)  # type: ignore[arg-type]


def share_of(role: str, **changes: object) -> Share:
    request = small(cpu(), **changes)
    (share,) = memory.train_shares(request, 0, [role], tokens=640, n_shards=1)  # type: ignore[list-item,dict-item]
    return share


def test_the_constants_are_those_of_the_trainer_and_the_server() -> None:
    defaults = training()
    assert defaults.micro_batch_tokens == MICRO_BATCH_TOKENS
    assert defaults.chunk_rows == logprobs.CHUNK_ROWS
    assert defaults.trunk_cache_bytes == scorer.CACHE_BYTES
    assert defaults.cached_adapters == scorer.MAX_ADAPTERS
    assert memory.SHORT_TOKENS == attention.SHORT_TOKENS
    assert memory.RECOMPUTE_ABOVE_TOKENS == decoder.RECOMPUTE_ABOVE_TOKENS
    assert memory.BLOCK_COLUMNS == {"cpu": logprobs.BLOCK_COLUMNS, "cuda": logprobs.CARD_BLOCK_COLUMNS}
    assert memory.FINISHED_SEQUENCES == serve_worker.FINISHED_SEQUENCES
    assert memory.UBATCH_TOKENS == llamacpp.UBATCH_TOKENS


def test_the_lanes_are_bounded_as_in_the_trainer() -> None:
    from edged.resolved import MAX_LANES

    assert MAX_LANES == lanes.MAX_LANES


def test_row_counts_come_in_few_sizes_and_waste_little() -> None:
    sizes = {memory.round_up_rows(n) for n in range(1, 8193)}
    assert len(sizes) <= 8 * 8
    assert all(n <= memory.round_up_rows(n) <= max(32, n + max(32, n // 8 + 1)) for n in range(1, 8193))


def test_the_weights_of_the_packaged_model_are_those_of_its_unpacked_file() -> None:
    # 134,515,008 parameters, two bytes each.
    n = 30 * memory.block_weight_bytes(SMALL, "bfloat16") + memory.outer_weight_bytes(SMALL, "bfloat16")
    assert n == 269_030_016


def test_an_untied_head_is_a_second_matrix() -> None:
    untied = Model(shape=SMALL.shape, tied=False, file_bytes=SMALL.file_bytes)
    more = memory.outer_weight_bytes(untied, "float32") - memory.outer_weight_bytes(SMALL, "float32")
    assert more == 49152 * 576 * 4


@pytest.mark.parametrize(("dtype", "bytes_a_weight"), [("float32", 4), ("bfloat16", 2)])
def test_a_block_shrinks_with_its_dtype(dtype: Dtype, bytes_a_weight: int) -> None:
    n_weights = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 4096 * 14336 * 3
    norms = 2 * 4096
    assert memory.block_weight_bytes(LARGE, dtype) == (n_weights + norms) * bytes_a_weight


def test_a_quantised_base_takes_its_files_blocks_and_one_map_unpacked_in_turns() -> None:
    held = memory.base_weight_bytes(LARGE, "bfloat16", "quantised")
    outer = 2 * (2 * 128256 + 1) * 4096
    assert held == 32 * (LARGE.packed_block_bytes + 2 * 2 * 4096) + outer
    request = dataclasses.replace(small(card(0, 10**12), held="quantised"), model=LARGE)
    shares = memory.train_shares(request, 0, ["actor", "reference"], tokens=640, n_shards=1)
    assert [share.working["unpacked"] for share in shares] == [2 * 4096 * 14336 + 12 * (1 << 24)] * 2
    assert shares[0].held["weights"] == held
    assert "unpacked" not in share_of("actor").working


def test_a_slice_is_what_the_trainer_unpacks_at_once() -> None:
    assert memory.SLICE_NUMBERS == blocks.SLICE_NUMBERS


def test_a_card_holds_the_base_quantised_if_plain_weights_would_take_more_than_half_of_it() -> None:
    assert not memory.prefers_quantised(16 * 10**9, 32 * 10**9)
    assert memory.prefers_quantised(16 * 10**9, 32 * 10**9 - 2)


def test_an_adapter_is_rank_times_both_sides_of_every_map() -> None:
    # Rank 8: q 1152, k and v 768 each, o 1152, three of 2112; ten blocks; float32.
    assert memory.lora_bytes(SMALL.shape, training(rank=8, layers=10)) == 4 * 8 * 10 * (
        1152 + 768 * 2 + 1152 + 2112 * 3
    )
    assert memory.lora_bytes(SMALL.shape, training(layers=0)) == 3 * memory.lora_bytes(SMALL.shape, training(layers=10))


def test_the_optimizer_holds_two_moments_and_a_gradient_of_each_micro_batch() -> None:
    one = memory.lora_bytes(SMALL.shape, training())
    share = share_of("actor", batch_tokens=4 * 640, minibatches=1)
    assert share.held["optimizer"] == (2 + 4) * one
    state = adamw.new_adam_state([torch.zeros(3, 5)])
    assert sum(t.numel() * t.element_size() for t in (*state.means, *state.squares)) == 2 * 60


def test_short_answers_keep_their_attention_weights_and_long_ones_do_not() -> None:
    def of(sequence_tokens: int, kind: str) -> int:
        return memory.block_activation_bytes(SMALL.shape, training(), kind, sequence_tokens)  # type: ignore[arg-type]

    assert of(200, "cpu") - of(100, "cpu") == 100 * 4 * 9
    assert of(384, "cpu") == of(10_000, "cpu")
    assert of(200, "cuda") == of(10_000, "cuda") < of(384, "cpu")


def test_a_block_keeps_what_its_functions_save(tmp_path: Path) -> None:
    """Counted by autograd's own hooks in a real block, against the formula."""
    write_tiny_model(tmp_path)
    base = load_folder(tmp_path, "float32", "cpu")
    lora = new_lora(base.config.shape, LoraSettings(rank=4, alpha=8.0, layers=2), 0, base.device)
    for parameter in lora.parameters():
        parameter.requires_grad_()
    frozen = {t.untyped_storage().data_ptr() for t in _frozen(base)} | {
        p.untyped_storage().data_ptr() for p in lora.parameters()
    }
    packing = decoder.pack(base, [32, 32])
    frozen |= {t.untyped_storage().data_ptr() for rotation in packing.rotations for t in rotation}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in frozen:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        stream = torch.randn(64, base.config.shape.n_embd, requires_grad=True)  # as it comes from an adapted block
        assert decoder.run_blocks(base, stream, packing, lora, 2, 4).requires_grad
    settings = training(rank=4, layers=2, dtype="float32")
    planned = 2 * 64 * memory.block_activation_bytes(base.config.shape, settings, "cpu", 32)
    assert sum(saved.values()) == planned


def test_one_micro_batch_beyond_the_bound_keeps_the_stream_only() -> None:
    bound = memory.RECOMPUTE_ABOVE_TOKENS
    kept = memory.backward_bytes(LARGE.shape, training(layers=0), "cuda", bound)
    recomputed = memory.backward_bytes(LARGE.shape, training(layers=0), "cuda", bound + 1)
    assert recomputed < kept / 4


def test_the_reference_holds_nothing_where_the_actor_is() -> None:
    request = small(cpu())
    roles = ["actor", "critic", "reference"]
    shares = memory.train_shares(request, 0, roles, tokens=640, n_shards=1)  # type: ignore[arg-type]
    assert [share.role for share in shares] == roles
    assert shares[2].held == {}
    assert set(shares[2].working) == {"activations", "logits"}
    alone = share_of("reference")
    assert alone.held["weights"] == shares[0].held["weights"]


def test_a_critic_of_its_own_costs_an_adapter_and_a_backward_pass() -> None:
    head, lora = share_of("critic", critic="head"), share_of("critic", critic="lora")
    assert lora.held["optimizer"] > 100 * head.held["optimizer"]
    assert lora.working["activations"] > head.working["activations"]
    assert "logits" not in lora.parts


def test_a_shard_holds_its_part_and_gathers_two_blocks_and_the_ends() -> None:
    request = dataclasses.replace(small(cpu()), model=LARGE)
    whole, part = (memory.train_shares(request, 0, ["actor"], tokens=640, n_shards=n)[0] for n in (1, 4))
    assert part.held["weights"] == -(-whole.held["weights"] // 4)
    ends, block = memory.outer_weight_bytes(LARGE, "bfloat16"), memory.block_weight_bytes(LARGE, "bfloat16")
    assert part.working["gathered"] == 2 * block + ends


def test_serving_holds_two_pools_of_keys_and_values() -> None:
    share = memory.serve_share(SMALL, SERVING, cpu(), 0)
    assert share.held["kv"] == 2 * 8192 * 30 * 2 * 192 * 2
    assert share.held["weights"] == 2 * SMALL.file_bytes
    assert memory.serve_share(SMALL, SERVING, card(0, 1), 0).held["weights"] == SMALL.file_bytes


def test_parts_go_by_their_names_only() -> None:
    for role in ("actor", "critic", "reference"):
        assert set(share_of(role).parts) <= set(PARTS)
    assert set(memory.serve_share(SMALL, SERVING, cpu(), 0).parts) <= set(PARTS)
    assert set(memory.reward_share(small(cpu()), Reward(source="http"), 0).parts) == {"runtime"}


def test_a_judge_takes_what_its_source_loads() -> None:
    def of(source: str, *devices: Device) -> dict[str, int]:
        reward = Reward(source=source, weights_bytes=7)  # type: ignore[arg-type]
        return memory.reward_share(small(*devices), reward, 0).parts

    assert of("classifier", cpu())["weights"] == 7
    assert of("fitted", cpu())["weights"] == 20 * memory.block_weight_bytes(SMALL, "bfloat16")
    assert of("fitted", card(0, 1))["weights"] == memory.base_weight_bytes(SMALL, "bfloat16")
    assert of("function", card(0, 1)) == {}


def _frozen(base: Base) -> list[torch.Tensor]:
    tensors = [base.embedding, base.head, base.final_norm]
    for block in base.blocks:
        tensors += [block.attention_norm, block.mlp_norm, *(linear.weight for linear in block.linears.values())]
    return tensors
