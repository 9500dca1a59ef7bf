"""Which tokens may come next in an answer that is held to a grammar: llama.cpp's grammar sampler, asked with care.

llama.cpp ends the process when it is given a token that its grammar does not take, and has no bound on the time that a
grammar takes. So a token goes in only after it was seen to fit (`Constraint.take`), grammars come checked from
`engine.generate.gbnf`, and the processor time of every answer's grammar is counted: one that takes too much of it is
given up.

To find all tokens that fit, tokens of a single byte are tried first: a token can fit only where its first byte does.
Where JSON leaves few ways to go on, that leaves a hundred tokens to try in place of the whole vocabulary.

A token of which nothing is seen in the answer (a control token) never fits, whatever its name, nor one whose bytes make
no UTF-8, of which llama.cpp looks at half only. The tokens that end an answer fit where the grammar is complete.
"""

from __future__ import annotations

import collections
import ctypes
import time
import weakref
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np
import numpy.typing as npt

from engine.generate.llamacpp import Model
from engine.generate.sampling import ConstraintFailed

KEPT = 16  # compiled grammars that are kept for requests with the same schema
BEGIN_S = 0.5  # processor time in which the grammars of all choices of a request have to be there
ALLOWANCE_S = 1.0  # processor time that an answer's grammar may take,
ALLOWANCE_A_TOKEN_S = 0.1  # and for each of its tokens

_BYTES = 256

Ids = npt.NDArray[np.int32]

_TOKEN = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data


class FirstBytes:
    """The tokens of a model by their first byte."""

    def __init__(self, model: Model) -> None:
        self.pieces = pieces = [model.piece(token) for token in range(model.n_vocab)]
        self.end_ids: Ids = np.array(sorted(model.eos_ids), np.int32)
        plain = [token for token, piece in enumerate(pieces) if piece and token not in model.eos_ids]
        self.is_plain = np.zeros(model.n_vocab, bool)
        self.is_plain[plain] = True
        self.begins_character = np.array([unfinished(piece) is not None for piece in pieces])
        groups: list[list[int]] = [[] for _ in range(_BYTES)]
        for token in plain:
            groups[pieces[token][0]].append(token)
        self.by_first_byte: tuple[Ids, ...] = tuple(np.array(group, np.int32) for group in groups)
        singles = {pieces[token][0]: token for token in reversed(plain) if len(pieces[token]) == 1}
        self.single_bytes: Ids = np.array(list(singles), np.int32)
        self.single_ids: Ids = np.array(list(singles.values()), np.int32)
        self.without_single: tuple[int, ...] = tuple(byte for byte in range(_BYTES) if byte not in singles)


def unfinished(data: bytes) -> bytes | None:
    """The character that is only begun at the end of UTF-8 text; b"" if none is, None if it is no UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return data[error.start :] if error.reason == "unexpected end of data" else None
    return b""


class Constraints:
    """The grammars of one model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._first_bytes: FirstBytes | None = None
        self._kept: collections.OrderedDict[str, _Sampler] = collections.OrderedDict()

    def begin(self, grammar: str, n: int = 1) -> list[Constraint]:
        """`n` constraints at the beginning of `grammar`, which is GBNF with a rule `root`.

        Raises:
            ConstraintFailed: llama.cpp does not take it, or it takes too long.
        """
        if self._first_bytes is None:
            self._first_bytes = FirstBytes(self._model)
        began_s = time.thread_time()
        sampler = self._kept.pop(grammar, None)
        if sampler is None:
            handle = lib.llama_sampler_init_grammar(self._model.vocab, grammar.encode(), b"root")
            if not handle:
                raise ConstraintFailed("llama.cpp does not take the grammar")
            sampler = _Sampler(handle)
        self._kept[grammar] = sampler
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        begun: list[Constraint] = []
        for _ in range(n):
            begun.append(Constraint(sampler.copy(), self._first_bytes))
            if time.thread_time() - began_s > BEGIN_S:
                raise ConstraintFailed(
                    f"{len(begun)} of {n} choices took longer than {BEGIN_S} s to begin; make the schema simpler"
                )
        return begun


class Constraint:
    """Where one answer stands in its grammar."""

    def __init__(self, sampler: _Sampler, first_bytes: FirstBytes) -> None:
        self._sampler = sampler
        self._first_bytes = first_bytes
        self._spent_s = 0.0
        self._n_taken = 0
        self._unfinished = b""

    def allows(self, token: int) -> bool:
        """Whether `token` fits here."""
        began_s = time.thread_time()
        ids = np.array([token], np.int32)
        fits = self._is_known(token) and self._continues(token) and bool(self._sampler.fitting(ids).size)
        self._charge(began_s)
        return fits

    def allowed(self) -> Ids:
        """Every token that fits here, in no order. Raises ConstraintFailed if there is none."""
        began_s = time.thread_time()
        known = self._first_bytes
        singles = self._sampler.fitting(known.single_ids)
        possible = known.single_bytes[np.isin(known.single_ids, singles)]
        groups = [known.by_first_byte[byte] for byte in (*possible.tolist(), *known.without_single)]
        ids = np.concatenate([known.end_ids, *groups])
        if self._unfinished:
            ids = ids[[self._continues(token) for token in ids.tolist()]]
        else:
            ids = ids[known.begins_character[ids]]
        fitting = self._sampler.fitting(ids)
        self._charge(began_s)
        if not fitting.size:
            raise ConstraintFailed("no token of the model goes on with this answer")
        return fitting

    def take(self, token: int) -> None:
        """`token` comes next; it must fit. Raises ConstraintFailed if it does not, or if too much time was spent."""
        if not self.allows(token):
            raise ConstraintFailed(f"token {token} does not fit here")
        began_s = time.thread_time()
        self._sampler.take(token)
        self._unfinished = unfinished(self._unfinished + self._first_bytes.pieces[token]) or b""
        self._n_taken += 1
        self._charge(began_s)

    def _is_known(self, token: int) -> bool:
        return bool(self._first_bytes.is_plain[token]) or token in self._first_bytes.end_ids

    def _continues(self, token: int) -> bool:
        return unfinished(self._unfinished + self._first_bytes.pieces[token]) is not None

    def _charge(self, began_s: float) -> None:
        self._spent_s += time.thread_time() - began_s
        if self._spent_s > ALLOWANCE_S + ALLOWANCE_A_TOKEN_S * self._n_taken:
            raise ConstraintFailed(
                f"following the grammar took {self._spent_s:.1f} s for {self._n_taken} tokens; make the schema simpler"
            )


class _Sampler:
    """A llama_sampler of a grammar, freed with this object."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        weakref.finalize(self, lib.llama_sampler_free, handle).atexit = False

    def copy(self) -> _Sampler:
        return _Sampler(lib.llama_sampler_clone(self._handle))

    def fitting(self, ids: Ids) -> Ids:
        """Those of `ids` that fit."""
        if not ids.size:
            return ids
        tokens = np.zeros(len(ids), _TOKEN)
        tokens["id"] = ids
        array = lib.llama_token_data_array(
            data=ctypes.cast(tokens.ctypes.data, lib.llama_token_data_p), size=len(ids), selected=-1, sorted=False
        )
        lib.llama_sampler_apply(self._handle, ctypes.byref(array))
        fitting: Ids = ids[tokens["logit"] == 0]
        return fitting

    def take(self, token: int) -> None:
        lib.llama_sampler_accept(self._handle, token)
