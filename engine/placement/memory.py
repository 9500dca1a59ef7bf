"""Bytes of each role on one device, part by part. Pure arithmetic; measured against real processes by a test.

A role's bytes are of two sorts. `held` stays from load to unload. `working` comes and goes with each micro-batch; roles
that share a process take turns, so of theirs only the largest counts. The frozen base, the trunk cache and the
runtime exist once a process and are booked on the first training role of the device: with actor, critic and reference
on one device the reference costs nothing but its turn, because it is the base with adapters off.

What a block keeps for backward is what the Functions of `engine.train.decoder` save, to the byte (a test asks
autograd). What a process takes beyond its live bytes is calibrated; the constants below say how. The constants of CUDA
devices are estimates: no card has been measured.

Dimension letters: D width of the stream, F feed-forward width, V vocabulary, H heads, q and kv widths of all query and
key heads, r rank, b bytes of a number in the base's dtype.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from adapters.shape import BaseShape
from engine.placement.request import Device, Dtype, Held, Model, Request, Reward, Role, Serving, Training

PARTS = ("weights", "adapters", "optimizer", "activations", "logits", "kv", "cache", "unpacked", "gathered", "runtime")

ELEMENT_BYTES: Mapping[Dtype, int] = {"float32": 4, "bfloat16": 2}
FLOAT32_BYTES = 4

# Resident memory of SmolLM2-135M processes on a CPU (VmHWM, torch 2.13, llama-cpp-python 0.3.36, glibc 2.36), less what
# is counted below: 10 and 30 adapted blocks, one and two lanes, answers of 90 and of 640 tokens.
TRAIN_RUNTIME_BYTES = 326_000_000  # interpreter, torch, engine; a third of it is mapped code
LANE_BYTES = 35_000_000  # compiled kernels and the heap of one more thread
ACTIVATION_FACTOR = 1.4  # glibc keeps freed pieces below its mmap limit of 32 MiB: 1.24 to 1.7 seen
SERVE_RUNTIME_BYTES = 80_000_000  # interpreter, numpy, llama.cpp, vocabulary
TRANSFORMERS_RUNTIME_BYTES = 345_000_000  # torch and transformers
PLAIN_RUNTIME_BYTES = 60_000_000  # interpreter and link, before a function of the operator's imports anything

# Not measured: a context with the kernels of torch or llama.cpp takes some hundred megabytes of a card, and torch's
# caching allocator rounds up.
CUDA_RUNTIME_BYTES = 600_000_000
CUDA_ACTIVATION_FACTOR = 1.1

# As in engine/generate: logits rows are reserved for every sequence, finished ones included; tokens of one graph.
FINISHED_SEQUENCES = 8
UBATCH_TOKENS = 256
# As in engine/train: attention that keeps its [t, t] weights, blocks computed again in backward, rounding of rows.
SHORT_TOKENS = 384
RECOMPUTE_ABOVE_TOKENS = 4096
BLOCK_COLUMNS = {"cpu": 1024, "cuda": 32_768}  # of logits that are float32 at once
# As in engine/blocks: numbers that are unpacked at once, and what one of them takes meanwhile.
SLICE_NUMBERS: Mapping[Literal["cpu", "cuda"], int] = {"cpu": 1 << 20, "cuda": 1 << 24}
SLICE_NUMBER_BYTES = 12
# A card of whose memory the unpacked base would take more than this share gets the file's blocks instead: the rest is
# for what training needs, and often for serving.
UNPACKED_SHARE_MAX = 0.5

Parts = dict[str, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one role takes of one device. Both maps are keyed by PARTS, without zeros."""

    role: Role
    device: int
    held: Parts
    working: Parts

    @property
    def parts(self) -> Parts:
        """Both sorts, added by name."""
        names = (*self.held, *self.working)
        return {part: self.held.get(part, 0) + self.working.get(part, 0) for part in PARTS if part in names}

    @property
    def n_bytes(self) -> int:
        return sum(self.parts.values())


def round_up_rows(n: int) -> int:
    """Rows that the trainer computes `n` tokens with: eight steps an octave, none below 32."""
    step = max(32, 1 << max(0, n.bit_length() - 4))
    return -(-n // step) * step


@functools.lru_cache
def lora_bytes(shape: BaseShape, training: Training) -> int:
    """One copy of the adapter."""
    modules = (shape.module_shape(module) for module in shape.top_modules(training.layers))
    return FLOAT32_BYTES * training.rank * sum(n_out + n_in for n_out, n_in in modules)


def prefers_quantised(dequantised_bytes: int, total_bytes: int) -> bool:
    """Whether a card of `total_bytes` holds the base in the file's blocks, if nobody has said how."""
    return dequantised_bytes > UNPACKED_SHARE_MAX * total_bytes


@functools.lru_cache
def block_weight_bytes(model: Model, dtype: Dtype, held: Held = "dequantised") -> int:
    """One block of the frozen base, its two norms included."""
    shape = model.shape
    n = sum(math.prod(shape.module_shape(module)) for module in shape.top_modules(1))
    maps = model.packed_block_bytes if held == "quantised" else n * ELEMENT_BYTES[dtype]
    return maps + 2 * shape.n_embd * ELEMENT_BYTES[dtype]


def unpacked_bytes(model: Model, training: Training, kind: Literal["cpu", "cuda"]) -> int:
    """What one lane holds of an unpacked map while it is used; 0 if the base is unpacked as it is."""
    if training.held == "dequantised":
        return 0
    largest = max(math.prod(model.shape.module_shape(module)) for module in model.shape.top_modules(1))
    slice_bytes = SLICE_NUMBER_BYTES * min(SLICE_NUMBERS[kind], largest)
    return largest * ELEMENT_BYTES[training.dtype] + slice_bytes


def outer_weight_bytes(model: Model, dtype: Dtype) -> int:
    """Embedding, output head and last norm."""
    matrices = 1 if model.tied else 2
    return (matrices * model.shape.n_vocab + 1) * model.shape.n_embd * ELEMENT_BYTES[dtype]


def base_weight_bytes(model: Model, dtype: Dtype, held: Held = "dequantised") -> int:
    """The whole frozen base."""
    return model.shape.n_layers * block_weight_bytes(model, dtype, held) + outer_weight_bytes(model, dtype)


def _feature_weight_bytes(model: Model, dtype: Dtype, held: Held = "dequantised") -> int:
    """Of the base, what features two thirds up need. A mapped file is resident only where it is read."""
    n_layers = model.shape.n_layers
    return (n_layers - max(1, round(n_layers / 3))) * block_weight_bytes(model, dtype, held)


def block_activation_bytes(
    shape: BaseShape, training: Training, kind: Literal["cpu", "cuda"], sequence_tokens: int
) -> int:
    """What one block keeps of one token for backward: inputs of norms, maps and gate, and attention's own.

    Args:
        sequence_tokens: the longest sequence that the token may be part of.
    """
    b, rank = ELEMENT_BYTES[training.dtype], training.rank
    q, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    plain = b * (4 * shape.n_embd + q + 3 * shape.n_ff + 7 * rank) + 2 * FLOAT32_BYTES
    fused = b * (2 * q + 2 * kv) + FLOAT32_BYTES * shape.n_heads
    if kind == "cuda":
        return plain + fused
    short = FLOAT32_BYTES * (q + 2 * kv + shape.n_heads * min(sequence_tokens, SHORT_TOKENS))
    return plain + (max(short, fused) if sequence_tokens > SHORT_TOKENS else short)


def backward_bytes(shape: BaseShape, training: Training, kind: Literal["cpu", "cuda"], tokens: int) -> int:
    """Kept for the backward pass through the adapted blocks of one micro-batch, and one block at work."""
    a_block = round_up_rows(tokens) * block_activation_bytes(
        shape, training, kind, min(tokens, training.sequence_tokens)
    )
    n_blocks = training.layers or shape.n_layers
    if tokens > RECOMPUTE_ABOVE_TOKENS:
        return n_blocks * round_up_rows(tokens) * shape.n_embd * FLOAT32_BYTES + 2 * a_block
    return (n_blocks + 1) * a_block


def serve_share(model: Model, serving: Serving, device: Device, number: int) -> Share:
    """The serve worker: everything is held, because llama.cpp reserves at the start what it will ever use."""
    shape = model.shape
    rows = serving.slots + FINISHED_SEQUENCES
    kv = 2 * shape.n_layers * shape.n_kv_heads * shape.head_dim * serving.kv_element_bytes
    graph = UBATCH_TOKENS * (2 * serving.context_tokens + 2 * FLOAT32_BYTES * (shape.n_ff + shape.n_embd))
    held = {
        # On a CPU the kernels want the blocks in another order: the file stays mapped beside the copy.
        "weights": model.file_bytes * (2 if device.kind == "cpu" else 1),
        "activations": serving.contexts * graph,
        "logits": serving.contexts * 2 * rows * shape.n_vocab * FLOAT32_BYTES,  # in the graph, and handed out
        "kv": serving.contexts * serving.context_tokens * kv,
        "runtime": SERVE_RUNTIME_BYTES if device.kind == "cpu" else CUDA_RUNTIME_BYTES,
    }
    return Share(role="serve", device=number, held=held, working={})


def torch_serve_share(model: Model, serving: Serving, device: Device, number: int, dtype: Dtype) -> Share:
    """The serve worker where transformers decodes. Estimated: of its parts only weights, pools and rows are exact."""
    shape, b = model.shape, ELEMENT_BYTES[dtype]
    cell = 2 * shape.n_kv_heads * shape.head_dim * b  # of one block
    step = UBATCH_TOKENS * (2 * b * (shape.n_ff + 2 * shape.n_embd))
    held = {
        "weights": base_weight_bytes(model, dtype),
        "kv": serving.contexts * serving.context_tokens * shape.n_layers * cell,
        "runtime": TRANSFORMERS_RUNTIME_BYTES if device.kind == "cpu" else CUDA_RUNTIME_BYTES,
    }
    working = {
        "activations": step + serving.context_tokens * cell,  # a step gathers its cells block by block
        "logits": 2 * (serving.slots + FINISHED_SEQUENCES) * shape.n_vocab * FLOAT32_BYTES,
    }
    return Share(role="serve", device=number, held=held, working=working)


def remote_serve_share(device: Device, number: int) -> Share:
    """The serve worker where a server elsewhere decodes: what that takes of this machine's cards is not counted."""
    held = {"runtime": PLAIN_RUNTIME_BYTES} if device.kind == "cpu" else {}
    return Share(role="serve", device=number, held=held, working={})


def reward_share(request: Request, reward: Reward, number: int) -> Share:
    """The score worker. Functions and services are judged on the CPU, so on a card they take nothing."""
    device, model, dtype = request.devices[number], request.model, request.training.dtype
    is_cpu, weights = device.kind == "cpu", 0
    match reward.source:
        case "function" | "http":
            runtime = PLAIN_RUNTIME_BYTES if is_cpu else 0
        case "classifier":
            weights, runtime = reward.weights_bytes, TRANSFORMERS_RUNTIME_BYTES if is_cpu else CUDA_RUNTIME_BYTES
        case "fitted":
            weights = _feature_weight_bytes(model, dtype) if is_cpu else base_weight_bytes(model, dtype)
            runtime = TRAIN_RUNTIME_BYTES + LANE_BYTES if is_cpu else CUDA_RUNTIME_BYTES
    held = _without_zeros({"weights": weights, "runtime": runtime})
    return Share(role="reward", device=number, held=held, working={})


def train_shares(request: Request, number: int, roles: Sequence[Role], *, tokens: int, n_shards: int) -> list[Share]:
    """The training roles of one device, which is one process.

    Args:
        roles: of actor, critic, reference, those that are here, in this order.
        tokens: of a micro-batch.
        n_shards: devices that the base is cut over; 1: it is whole here.
    """
    device = request.devices[number]
    shares: list[Share] = []
    for role in roles:
        held, working = _ROLE_PARTS[role](request, device, tokens)
        if n_shards > 1:
            working["gathered"] = _gathered_bytes(request)
        lanes = _lanes(request.training, device)
        working["unpacked"] = lanes * unpacked_bytes(request.model, request.training, device.kind)
        if not shares:
            for part, n_bytes in _process_parts(request, device, roles, n_shards).items():
                held[part] = held.get(part, 0) + n_bytes
        shares.append(Share(role=role, device=number, held=_without_zeros(held), working=_without_zeros(working)))
    return shares


def _process_parts(request: Request, device: Device, roles: Sequence[Role], n_shards: int) -> Parts:
    model, training = request.model, request.training
    weights = base_weight_bytes(model, training.dtype, training.held)
    if device.kind == "cpu" and training.critic == "head" and set(roles) == {"critic"}:
        weights = _feature_weight_bytes(model, training.dtype, training.held)
    a_token = FLOAT32_BYTES * (2 * model.shape.n_embd + 2)  # trunk and the critic's features
    return {
        "weights": -(-weights // n_shards),
        "adapters": training.cached_adapters * lora_bytes(model.shape, training),
        "cache": max(training.trunk_cache_bytes, training.batch_tokens * a_token),
        "runtime": CUDA_RUNTIME_BYTES
        if device.kind == "cuda"
        else TRAIN_RUNTIME_BYTES + _lanes(training, device) * LANE_BYTES,
    }


def _gathered_bytes(request: Request) -> int:
    """Whole again while they are used: the block at work, the one that is fetched meanwhile, and both ends."""
    model, training = request.model, request.training
    return 2 * block_weight_bytes(model, training.dtype, training.held) + outer_weight_bytes(model, training.dtype)


def _actor_parts(request: Request, device: Device, tokens: int) -> tuple[Parts, Parts]:
    shape, training = request.model.shape, request.training
    lanes = _lanes(training, device)
    learner = lora_bytes(shape, training)
    held = {
        "adapters": 2 * learner,  # what moves, and where it started, to shorten a move that went too far
        "optimizer": (2 + _gradients(training, tokens)) * learner,
    }
    working = {
        "activations": lanes * _enlarged(backward_bytes(shape, training, device.kind, tokens), device),
        "logits": lanes * _logit_bytes(request, device.kind, tokens),
    }
    return held, working


def _critic_parts(request: Request, device: Device, tokens: int) -> tuple[Parts, Parts]:
    shape, training = request.model.shape, request.training
    head = FLOAT32_BYTES * (shape.n_embd + 3)
    if training.critic == "head":
        features = training.batch_tokens * FLOAT32_BYTES * (shape.n_embd + 2)
        working = {"activations": features + _forward_bytes(request, device, training.sequence_tokens)}
        return {"adapters": head, "optimizer": 3 * head}, working
    learner = lora_bytes(shape, training) + head
    held = {"adapters": learner, "optimizer": (2 + _gradients(training, tokens)) * learner}
    lanes = _lanes(training, device)
    return held, {"activations": lanes * _enlarged(backward_bytes(shape, training, device.kind, tokens), device)}


def _reference_parts(request: Request, device: Device, _tokens: int) -> tuple[Parts, Parts]:
    training = request.training
    working = {
        "activations": _forward_bytes(request, device, training.sequence_tokens),
        "logits": _lanes(training, device) * _logit_bytes(request, device.kind, training.sequence_tokens),
    }
    return {}, working


_ROLE_PARTS = {"actor": _actor_parts, "critic": _critic_parts, "reference": _reference_parts}


def _lanes(training: Training, device: Device) -> int:
    return training.lanes if device.kind == "cpu" else 1


def _gradients(training: Training, tokens: int) -> int:
    """Copies of the gradient that exist at the end of a step: one a micro-batch, whichever device computed it, because
    they are summed in their order."""
    step_tokens = -(-training.batch_tokens // training.minibatches)
    n = -(-step_tokens // tokens)
    return n + n % 2


def _forward_bytes(request: Request, device: Device, tokens: int) -> int:
    """Of the lanes, each with one block at work on one answer and nothing kept."""
    shape, training = request.model.shape, request.training
    a_block = round_up_rows(tokens) * block_activation_bytes(shape, training, device.kind, tokens)
    return _lanes(training, device) * _enlarged(a_block, device)


def _logit_bytes(request: Request, kind: Literal["cpu", "cuda"], tokens: int) -> int:
    """One chunk of logits in one lane, which becomes its probabilities in place; float32 exists in blocks only."""
    training = request.training
    rows = min(training.chunk_rows, round_up_rows(tokens))
    in_float32 = 2 * min(BLOCK_COLUMNS[kind], request.model.shape.n_vocab) * FLOAT32_BYTES
    return rows * (request.model.shape.n_vocab * ELEMENT_BYTES[training.dtype] + in_float32)


def _enlarged(n_bytes: int, device: Device) -> int:
    """Live bytes, and what the allocator takes for them."""
    return math.ceil(n_bytes * (ACTIVATION_FACTOR if device.kind == "cpu" else CUDA_ACTIVATION_FACTOR))


def _without_zeros(parts: Parts) -> Parts:
    return {part: n_bytes for part, n_bytes in parts.items() if n_bytes}
