"""Whose work gets the next free slot: users take turns by the tokens that they were served. Pure.

Every user has a counter: a token of a prompt that is evaluated counts 1, a sampled one SAMPLED_WEIGHT. The next piece
is the oldest one of the user with the smallest counter. So a user with 200 waiting requests and one with a single
request are equals, and the latter waits for the next slot that comes free. This is the virtual token counter of Sheng
et al. (arXiv 2401.00588): fair queueing where what a piece will cost is not known beforehand, and many run at once.

A user who comes (back) starts no lower than the smallest counter of those who wait, as there, and no lower than
`level`, the counter of whoever was admitted last (as in self-clocked fair queueing, Golestani 1994). Among equal
counters whoever had a turn longest ago is first, and newcomers before all. Since the level rises with every admission,
no stream of newcomers, each with a single request, holds up a user who waits: whoever comes later starts behind.

Bounded: while two users wait, their counters differ by no more than what fits the context at once, twice. A user who is
away is forgotten once the level has passed the counter; when nobody is there, everything is.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Collection, Hashable
from typing import Generic, Protocol, TypeVar

SAMPLED_WEIGHT = 2  # as in the paper; a sampled token costs a step of its own, a prompt's are evaluated together
FORGET_EVERY = 64  # users that are away are looked at once this many more are known


class Waiting(Protocol):
    """What can wait: only its user matters here. None: the worker's own work, such as a proof, which takes no turn."""

    @property
    def key(self) -> Hashable: ...

    @property
    def user(self) -> str | None: ...


W = TypeVar("W", bound=Waiting)


@dataclasses.dataclass(slots=True)
class _User:
    served: int
    turn: int = 0  # number of the last admission; 0: none yet
    n_present: int = 0  # pieces that wait or run


class Service:
    """What every user was served. Shared by the queues of a worker, so that a change of context forgives nothing."""

    def __init__(self) -> None:
        self._users: dict[str, _User] = {}
        self._n_present = 0
        self._level = 0
        self._n_turns = 0
        self._forget_at = FORGET_EVERY

    @property
    def n_known(self) -> int:
        """Users that are remembered."""
        return len(self._users)

    def served(self, user: str) -> int:
        """The counter of `user`, in weighted tokens; of a user who is away and owes nothing, the level."""
        known = self._users.get(user)
        return self._level if known is None else known.served

    def rank(self, user: str | None) -> tuple[int, int]:
        """Whoever's is smallest is next. The user must be present."""
        if user is None:
            return -1, 0
        known = self._users[user]
        return known.served, known.turn

    def enter(self, user: str | None, waiting: Collection[str | None]) -> None:
        """A piece of `user` comes while pieces of the users `waiting` wait."""
        if user is None:
            return
        known = self._users.get(user)
        if known is None:
            self._forget_absent()
            known = self._users[user] = _User(self._level)
        if user not in waiting:
            least = min((self._users[other].served for other in waiting if other is not None), default=0)
            known.served = max(known.served, self._level, least)
        known.n_present += 1
        self._n_present += 1

    def leave(self, user: str | None) -> None:
        """A piece of `user` is over, or was taken back."""
        if user is None:
            return
        self._users[user].n_present -= 1
        self._n_present -= 1
        if self._n_present == 0:
            self._users.clear()
            self._level = 0

    def admit(self, user: str | None, prompt_tokens: int) -> None:
        """A waiting piece of `user` gets a slot, where it evaluates that many tokens of its prompt."""
        if user is None:
            return
        self._n_turns += 1
        known = self._users[user]
        known.turn = self._n_turns
        known.served += prompt_tokens
        self._level = max(self._level, known.served)

    def sample(self, user: str | None) -> None:
        """A token was sampled for `user`."""
        if user is not None:
            self._users[user].served += SAMPLED_WEIGHT

    def _forget_absent(self) -> None:
        if len(self._users) < self._forget_at:
            return
        self._users = {n: u for n, u in self._users.items() if u.n_present or u.served > self._level}
        self._forget_at = len(self._users) + FORGET_EVERY


class FairQueue(Generic[W]):
    """The pieces that wait for one context: in order within a user, and users by what they were served."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lines: dict[str | None, collections.deque[tuple[int, W]]] = {}  # with the number of the arrival
        self._arrivals = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._lines)

    def push(self, piece: W) -> None:
        """`piece` waits behind the other ones of its user."""
        self._service.enter(piece.user, self._lines.keys())
        self._lines.setdefault(piece.user, collections.deque()).append((next(self._arrivals), piece))

    def head(self, passed: Collection[str | None] = ()) -> W | None:
        """Whose turn it is among the users that are not `passed`; None if nobody else waits."""
        users = [user for user in self._lines if user not in passed]
        if not users:
            return None
        return self._lines[min(users, key=self._service.rank)][0][1]

    def admit(self, piece: W, prompt_tokens: int) -> None:
        """Take out the oldest piece of its user, which gets a slot and evaluates that many tokens of its prompt."""
        line = self._lines[piece.user]
        if line[0][1] is not piece:
            raise ValueError(f"piece {piece.key!r} is not the first of its user")
        line.popleft()
        if not line:
            del self._lines[piece.user]
        self._service.admit(piece.user, prompt_tokens)

    def withdraw(self, chosen: Callable[[W], bool]) -> list[W]:
        """Take the chosen pieces out, in the order in which they came."""
        taken: list[tuple[int, W]] = []
        for user, line in list(self._lines.items()):
            out = [item for item in line if chosen(item[1])]
            if not out:
                continue
            taken += out
            left = collections.deque(item for item in line if not chosen(item[1]))
            if left:
                self._lines[user] = left
            else:
                del self._lines[user]
        taken.sort(key=lambda item: item[0])
        for _, piece in taken:
            self._service.leave(piece.user)
        return [piece for _, piece in taken]
