"""Boxes and models to plan for."""

from __future__ import annotations

from typing import Any

from adapters.shape import BaseShape
from engine.placement import Device, Model, Request, Serving, Training

GB = 10**9
SMALL = Model(
    shape=BaseShape(
        arch="llama", n_layers=30, n_embd=576, n_heads=9, n_kv_heads=3, head_dim=64, n_ff=1536, n_vocab=49152
    ),
    tied=True,
    file_bytes=98_362_432,
)
LARGE = Model(
    shape=BaseShape(
        arch="llama", n_layers=32, n_embd=4096, n_heads=32, n_kv_heads=8, head_dim=128, n_ff=14336, n_vocab=128256
    ),
    tied=False,
    file_bytes=4_920_000_000,
    packed_block_bytes=128_000_000,  # of Q4_K_M
)
SERVING = Serving(slots=16, context_tokens=8192)


def cpu(free_bytes: int = 64 * GB) -> Device:
    return Device(name="cpu", kind="cpu", total_bytes=2**50, free_bytes=free_bytes)


def cards(n: int, free_bytes: int) -> tuple[Device, ...]:
    return tuple(card(number, free_bytes) for number in range(n))


def card(number: int, free_bytes: int, host: str = "") -> Device:
    return Device(name=f"cuda:{number}", kind="cuda", total_bytes=2**50, free_bytes=free_bytes, host=host)


def small(*devices: Device, serving: Serving = SERVING, **training: Any) -> Request:
    """SmolLM2-135M with the default adapter, as a CPU trains it."""
    settings = {"dtype": "bfloat16", "rank": 8, "layers": 10, "critic": "head", "batch_tokens": 64 * 640}
    training = settings | {"sequence_tokens": 640} | training
    return Request(devices=devices, model=SMALL, serving=serving, training=Training(**training))


def large(*devices: Device, **training: Any) -> Request:
    """A model of eight thousand million weights, adapted everywhere, with a critic of its own."""
    settings = {"dtype": "bfloat16", "rank": 8, "layers": 0, "critic": "lora", "batch_tokens": 16 * 512}
    training = settings | {"sequence_tokens": 512, "micro_batch_tokens": 2048} | training
    return Request(devices=devices, model=LARGE, serving=SERVING, training=Training(**training))
