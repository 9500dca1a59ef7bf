"""The plan of who trains where, as the train worker is told it: made once for this box, and turned into ranks.

Plans are made from the memory that is free before the workers start, so that what the workers hold themselves is not
counted against them. Where nothing fits, or the machine does not tell, one process trains as it would without a plan,
and `why` says so in status and log. What cannot be carried out is never started: see `hindrance`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from adapters.gguf_header import load_header, packed_block_bytes
from adapters.llamacpp_format import read_base_shape
from edged.base_model import has_tied_head, model_bytes, read_shape
from edged.devices import DevicesUnknown
from engine import placement, protocol

log = logging.getLogger(__name__)

BFLOAT16_BYTES = 2  # what the trainer computes with where blocks are kept
ONE_PROCESS = protocol.TrainPlan()


def planned_model(file: Path) -> placement.Model:
    """What a plan has to know of a GGUF file or a folder. Raises AdapterError, ModelError, ValueError, OSError."""
    if file.is_dir():
        return placement.Model(
            shape=read_shape(file), tied=has_tied_head(file), file_bytes=model_bytes(file), packed_block_bytes=0
        )
    header = load_header(file)
    return placement.Model(
        shape=read_base_shape(file),
        tied="output.weight" not in header.tensors,
        file_bytes=file.stat().st_size,
        packed_block_bytes=packed_block_bytes(header, BFLOAT16_BYTES),
    )


def ranks_of(plan: placement.Plan, threads: int) -> protocol.TrainPlan:
    """The plan in ranks: one for each device that trains, the actor's first.

    Args:
        threads: of all ranks together, if they are on the CPU.
    """
    layout, devices = plan.layout, plan.request.devices
    numbers = list(dict.fromkeys((*layout.actor, *sorted({*layout.critic, *layout.reference}))))
    # An answer that is longer is a micro-batch of its own all the same.
    tokens = min(plan.micro_batch_tokens, protocol.MICRO_BATCH_TOKENS)
    if len(numbers) == 1:
        return protocol.TrainPlan(micro_batch_tokens=tokens)
    return protocol.TrainPlan(
        mode=plan.mode,
        devices=tuple(devices[number].name for number in numbers),
        actor=_ranks(layout.actor, numbers),
        critic=_ranks(layout.critic, numbers),
        reference=_ranks(layout.reference, numbers),
        threads=max(1, threads // len(numbers)),
        micro_batch_tokens=tokens,
    )


class Placing:
    """What `[placement]` and the machine come to. Before `decide`, one process trains."""

    def __init__(
        self,
        request: Callable[[Sequence[placement.Device]], placement.Request],
        find_devices: Callable[[], Sequence[placement.Device]],
        threads: int,
    ) -> None:
        self._request = request
        self._find_devices = find_devices
        self._threads = threads
        self.training = ONE_PROCESS
        self.why = "not planned yet"

    def decide(self) -> None:
        """Look at the machine and plan. Blocking: asking the cards takes up to seconds.

        Raises:
            BadPin: the settings name a device that is not there.
        """
        try:
            plan = placement.plan(self._request(self._find_devices()))
        except (DevicesUnknown, placement.DoesNotFit) as error:
            self.why = f"one process, because no plan could be made: {error}"
            log.warning("placement: %s", self.why)
            return
        hindrance = placement.hindrance(plan)
        if hindrance:
            self.why = f"one process, because {hindrance}: {placement.summary(plan)}"
            log.warning("placement: %s", self.why)
            return
        self.training = ranks_of(plan, self._threads)
        self.why = placement.summary(plan)
        log.info("placement: %s", self.why)


def _ranks(numbers: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(order.index(number) for number in numbers))
