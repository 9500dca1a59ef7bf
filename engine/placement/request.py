"""What a plan is made from: the devices, the model, and what serving and training are to do. Pure data.

Sizes are bytes, lengths are tokens with the prompt included. A device's number is its place in `Request.devices`; pins
name devices by it.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from adapters.shape import BaseShape

Role = Literal["serve", "actor", "critic", "reference", "reward"]
ROLES: tuple[Role, ...] = ("serve", "actor", "critic", "reference", "reward")

Dtype = Literal["float32", "bfloat16"]
Held = Literal["dequantised", "quantised"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One card, or the memory of one machine's CPUs.

    Attributes:
        name: for people and for torch: "cpu", "cuda:0".
        free_bytes: what the plan may use of total_bytes.
        host: "" on this machine, else the box that a worker reaches over the network.
    """

    name: str
    kind: Literal["cpu", "cuda"]
    total_bytes: int
    free_bytes: int
    host: str = ""

    @property
    def label(self) -> str:
        """The name, with its machine if that is another one."""
        return f"{self.name} on {self.host}" if self.host else self.name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """tied: the output head is the embedding matrix. file_bytes: of the served GGUF file. packed_block_bytes: what the
    maps of one block take where the file's quantised blocks are kept; 0 if it has none."""

    shape: BaseShape
    tied: bool
    file_bytes: int
    packed_block_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """contexts: KV pools on one model, two so that a candidate is proved beside the live adapter.

    engine: llama.cpp with keys and values of `kv_element_bytes`; torch, where they are of the dtype of training; none
    where a server elsewhere decodes.
    """

    slots: int
    context_tokens: int
    contexts: int = 2
    kv_element_bytes: int = 2
    engine: Literal["llamacpp", "torch", "none"] = "llamacpp"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What training holds and how much of it goes through the network at once.

    Attributes:
        dtype: of products and of the unpacked base. Adapters and their optimizer are float32 whatever it is.
        held: how the base's maps are held; the file's blocks are unpacked one map at a time.
        rank, layers: of the adapter; layers are the topmost blocks, 0 means all.
        batch_tokens: of all answers of one update. minibatches: optimizer steps that share them.
        sequence_tokens: the longest answer. It is never cut, so no micro-batch can be smaller.
        micro_batch_tokens: what a micro-batch may have at most; the plan chooses from here down.
        chunk_rows: rows of logits that exist at once in a lane.
        lanes: micro-batches under way at once on a CPU; on a GPU it is one.
        trunk_cache_bytes: bound of the scored-ahead cache. What one update needs is kept beyond it.
        cached_adapters: versions kept in memory to score under.
    """

    dtype: Dtype
    rank: int
    layers: int
    critic: Literal["head", "lora"]
    batch_tokens: int
    sequence_tokens: int
    minibatches: int = 2
    micro_batch_tokens: int = 640
    chunk_rows: int = 512
    lanes: int = 2
    trunk_cache_bytes: int = 192 * 1024 * 1024
    cached_adapters: int = 12
    held: Held = "dequantised"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """The score worker's source of rewards. weights_bytes: of a classifier's files; a fitted source has the base."""

    source: Literal["function", "http", "classifier", "fitted"]
    weights_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Devices that the operator gives to a role, by number; empty: chosen by the plan."""

    serve: tuple[int, ...] = ()
    actor: tuple[int, ...] = ()
    critic: tuple[int, ...] = ()
    reference: tuple[int, ...] = ()
    reward: tuple[int, ...] = ()

    def of(self, role: Role) -> tuple[int, ...]:
        """Devices pinned for `role`."""
        pinned: tuple[int, ...] = getattr(self, role)
        return pinned


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Everything a plan depends on.

    Attributes:
        reward: None if people's ratings are the only rewards, and so there is no score worker.
        dtypes: what this trainer can load; advice names no other.
    """

    devices: tuple[Device, ...]
    model: Model
    serving: Serving
    training: Training
    reward: Reward | None = None
    pins: Pins = Pins()
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
