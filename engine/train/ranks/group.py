"""The process group of an update: what ranks say to one another, and how a rank notices that another is gone.

Over gloo on TCP of the loopback address; over NCCL where every rank has a card of its own. Ranks find one another by a
file in a private folder. Everything here blocks until the other side has come; who waits meanwhile, and for how long,
is the business of `engine.train.ranks.team`. The groups are objects: torch's global one is not used, so that a broken
group is thrown away and the next job gets a fresh one.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LOOPBACK = "127.0.0.1"
# Ranks wait for one another as long as the longest piece of work; who is hung is found out by its missing signs.
TIMEOUT = datetime.timedelta(hours=6)


class RankLost(Exception):
    """Raised when another process of the update has died or says nothing: the job is lost, this process is not."""


class Group:
    """`devices` of all ranks; this process is `rank`. Not thread-safe: one call at a time. received_bytes: what has
    come from other ranks so far.

    Blocking. Every rank of the group makes the same calls in the same order, or all of them wait for ever. Each call
    raises RankLost if another rank is gone.
    """

    def __init__(self, rendezvous: Path, rank: int, devices: Sequence[str]) -> None:
        cards = {device for device in devices if device.startswith("cuda")}
        self.rank = rank
        self.n_ranks = len(devices)
        # Two ranks on one card are a stand-in for two cards, which NCCL refuses.
        self._uses_cards = len(cards) == len(devices)
        self.device = torch.device(devices[rank] if self._uses_cards else "cpu")
        self._store = dist.PrefixStore("ranks", dist.FileStore(str(rendezvous), len(devices)))
        self._groups: dict[tuple[int, ...], Any] = {}
        self.received_bytes = 0
        self._backend(tuple(range(self.n_ranks)))

    def numbers(self, number: int) -> list[int]:
        """What each rank of all says, by rank."""
        everyone = tuple(range(self.n_ranks))
        own = torch.tensor([number], device=self.device)
        found = [torch.empty_like(own) for _ in everyone]
        self._wait(lambda: self._backend(everyone).allgather([found], [own]))
        return [int(one) for one in found]

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """[ranks, ...] on the device of `part`: the parts of all ranks, which have one shape and dtype."""
        everyone = tuple(range(self.n_ranks))
        own = part.to(self.device)
        found = torch.empty((self.n_ranks, *own.shape), dtype=own.dtype, device=self.device)
        self._wait(lambda: self._backend(everyone).allgather([list(found.unbind())], [own]))
        self.received_bytes += found.nbytes - own.nbytes
        return found.to(part.device)

    def swap(self, data: torch.Tensor, among: tuple[int, ...]) -> list[torch.Tensor]:
        """What each rank of `among` gives, in that order; uint8, of any lengths, on the CPU."""
        backend, own = self._backend(among), data.to(self.device)
        length = torch.tensor([own.shape[0]], device=self.device)
        lengths = [torch.empty_like(length) for _ in among]
        self._wait(lambda: backend.allgather([lengths], [length]))
        return [
            self._broadcast(backend, own if rank == self.rank else None, int(n), at).cpu()
            for at, (rank, n) in enumerate(zip(among, lengths, strict=True))
        ]

    def broadcast(self, data: torch.Tensor | None, source: int) -> torch.Tensor:
        """What the rank `source` gives, to all; None in the others. uint8, on the CPU."""
        backend = self._backend(tuple(range(self.n_ranks)))
        own = None if data is None else data.to(self.device)
        length = torch.tensor([0 if own is None else own.shape[0]], device=self.device)
        self._wait(lambda: backend.broadcast([length], _from(source)))
        return self._broadcast(backend, own, int(length), source).cpu()

    def abandon(self) -> None:
        """Give the connections up; what still waits for another rank ends with an error."""
        for backend in self._groups.values():
            if self._uses_cards:
                backend.abort()
        self._groups.clear()

    def _backend(self, ranks: tuple[int, ...]) -> Any:
        """The group of `ranks`, which all of them ask for at the same place in their work."""
        if ranks not in self._groups:
            store = dist.PrefixStore("-".join(map(str, ranks)), self._store)
            own, n = ranks.index(self.rank), len(ranks)
            if self._uses_cards:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = TIMEOUT
                self._groups[ranks] = dist.ProcessGroupNCCL(store, own, n, options)
            else:
                options = dist.ProcessGroupGloo._Options()
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
                options._timeout = TIMEOUT
                try:
                    self._groups[ranks] = dist.ProcessGroupGloo(store, own, n, options)
                except RuntimeError as error:
                    raise RankLost(f"the ranks {ranks} did not find one another: {_first_line(error)}") from error
        return self._groups[ranks]

    def _broadcast(self, backend: Any, data: torch.Tensor | None, n_bytes: int, at: int) -> torch.Tensor:
        box = torch.empty(n_bytes, dtype=torch.uint8, device=self.device) if data is None else data
        if n_bytes:
            self._wait(lambda: backend.broadcast([box], _from(at)))
            self.received_bytes += n_bytes if data is None else 0
        return box

    def _wait(self, begin: Callable[[], Any]) -> None:
        try:
            begin().wait()
        except RuntimeError as error:  # the one type that both backends raise when a connection breaks
            raise RankLost(f"a connection between ranks broke: {_first_line(error)}") from error
        if self._uses_cards:
            torch.cuda.synchronize(self.device)


def _from(source: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = source, 0
    return options


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". ")[0]
