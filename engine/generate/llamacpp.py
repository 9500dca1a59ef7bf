"""Thin wrapper over llama.cpp's C API (llama-cpp-python's low-level binding): model, contexts, adapters.

One thread owns everything made here. Nothing is decided here: which tokens run is the `scheduler`'s business, which
adapter stands where is `swap`'s. The rules of the C API that matter are kept by construction:

- setting an adapter always clears the context's memory, because K/V computed under another adapter would stay;
- an adapter is freed by `Adapter.free` only, and the caller frees it after it is set nowhere;
- logits rows are views into the context's buffer, valid until its next decode.

Log lines of llama.cpp go to the logger `llama.cpp`, never to stderr directly.
"""

from __future__ import annotations

import collections
import ctypes
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np
import numpy.typing as npt

from adapters.folder import GGUF_FILE
from engine.fault import EngineFault
from engine.generate import backend
from engine.generate.backend import BATCH_TOKENS, AdapterRefused, DecodeFailed, Row
from engine.generate.scheduler import Entry
from engine.protocol import ModelFacts

llama_log = logging.getLogger("llama.cpp")

GGUF_MAGIC = b"GGUF"
UBATCH_TOKENS = 256  # most tokens of one graph: bounds the compute buffer

SOUND_AMX_FLAG = b"-fno-tree-dse"

_ERROR_LEVEL = 4  # GGML_LOG_LEVEL_ERROR
_recent_errors: collections.deque[str] = collections.deque(maxlen=16)


@lib.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes, _user_data: Any) -> None:
    line = text.decode(errors="replace").rstrip()
    if level == _ERROR_LEVEL:
        _recent_errors.append(line)
    # Debug for all of it: errors become exceptions with the text in them, and the warnings are tuning hints and a line
    # for every repacked LoRA tensor, which no operator can act on.
    llama_log.debug("%s", line)


class Model:
    """A loaded GGUF model and its vocabulary."""

    def __init__(self, path: str, *, gpu_layers: int) -> None:
        """Raises EngineFault model_unreadable."""
        # A failed assertion would start a debugger on this process to print a backtrace, and hang until it is done.
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")
        lib.llama_log_set(_on_log, ctypes.c_void_p(0))
        lib.llama_backend_init()
        _check_magic(path)
        params = lib.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        params.use_extra_bufts = not _has_broken_amx()
        _recent_errors.clear()
        handle = lib.llama_model_load_from_file(os.fsencode(path), params)
        if not handle:
            raise EngineFault("model_unreadable", f"{path}: llama.cpp cannot load this model: {_last_error()}")
        self.handle = handle
        self.vocab = lib.llama_model_get_vocab(handle)
        self.n_vocab = int(lib.llama_vocab_n_tokens(self.vocab))
        self.n_ctx_train_tokens = int(lib.llama_model_n_ctx_train(handle))
        self.eos_ids = frozenset(i for i in range(self.n_vocab) if lib.llama_vocab_is_eog(self.vocab, i))
        template = lib.llama_model_chat_template(handle, None)
        self.chat_template: str | None = template.decode() if template else None
        self._pieces: dict[int, bytes] = {}

    def facts(self) -> ModelFacts:
        return ModelFacts(
            architecture=self._metadata("general.architecture"),
            n_layers=int(lib.llama_model_n_layer(self.handle)),
            n_embd=int(lib.llama_model_n_embd(self.handle)),
            n_vocab=self.n_vocab,
            n_ctx_train_tokens=self.n_ctx_train_tokens,
            eos_ids=tuple(sorted(self.eos_ids)),
            chat_template=self.chat_template is not None,
        )

    def tokenise(self, text: str, *, add_special: bool, parse_special: bool) -> tuple[int, ...]:
        """Token ids of `text`.

        Args:
            add_special: prepend BOS if the model wants one.
            parse_special: turn the text of control tokens into the tokens.
        """
        data = text.encode()
        room = len(data) + 2
        ids = (lib.llama_token * room)()
        n = lib.llama_tokenize(self.vocab, data, len(data), ids, room, add_special, parse_special)
        if n < 0:
            raise ValueError(f"a text of {len(data)} bytes gave {-n} tokens, more than its bytes")
        return tuple(ids[:n])

    def piece(self, token: int) -> bytes:
        """The bytes that `token` adds to a text; b"" for control tokens. Not always whole characters."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._read_piece(token)
        return piece

    def special_text(self, name: str) -> str:
        """The text of the "bos" or "eos" token, as chat templates want it; "" if the model has none."""
        token = {"bos": lib.llama_vocab_bos, "eos": lib.llama_vocab_eos}[name](self.vocab)
        return "" if token < 0 else lib.llama_vocab_get_text(self.vocab, token).decode(errors="replace")

    def end_token(self) -> int | None:
        """The token that ends a turn, or else a text; None if the model has neither."""
        for token in (lib.llama_vocab_eot(self.vocab), lib.llama_vocab_eos(self.vocab)):
            if token >= 0:
                return int(token)
        return None

    def load_adapter(self, path: str) -> Adapter:
        """A GGUF LoRA adapter for this model. Raises AdapterRefused."""
        if not os.path.isfile(path):
            raise AdapterRefused("adapter_unreadable", f"{path}: no such file")
        _recent_errors.clear()
        handle = lib.llama_adapter_lora_init(self.handle, os.fsencode(path))
        if not handle:
            reason = _last_error()
            raise AdapterRefused(_adapter_code(reason), f"{path}: llama.cpp cannot load this adapter: {reason}")
        return Adapter(handle)

    def open_adapter(self, folder: str) -> Adapter:
        """The adapter in an adapter folder. Raises AdapterRefused."""
        return self.load_adapter(os.path.join(folder, GGUF_FILE))

    def open_context(self, *, context_tokens: int, n_sequences: int, max_rows: int, threads: int) -> Context:
        """See `Context`. Raises EngineFault out_of_memory."""
        return Context(self, context_tokens=context_tokens, n_sequences=n_sequences, max_rows=max_rows, threads=threads)

    def _metadata(self, key: str) -> str:
        buffer = ctypes.create_string_buffer(256)
        n = lib.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return buffer.value.decode(errors="replace") if n >= 0 else ""

    def _read_piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        n = lib.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, False)
        if n < 0:
            buffer = ctypes.create_string_buffer(-n)
            n = lib.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, False)
        return buffer.raw[:n]


class Adapter:
    """A LoRA adapter in memory. It belongs to the model and may be set on several contexts."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def free(self) -> None:
        """Release it. It must not be set on any context."""
        lib.llama_adapter_lora_free(self.handle)
        self.handle = None


class Context:
    """One KV pool and compute graph on a model; decodes with at most one adapter at a time."""

    def __init__(self, model: Model, *, context_tokens: int, n_sequences: int, max_rows: int, threads: int) -> None:
        """Raises EngineFault out_of_memory.

        Args:
            context_tokens: cells of the KV pool, shared by all sequences.
            n_sequences: sequence ids, 0 to n_sequences - 1.
            max_rows: most logits rows of one decode, at least `n_sequences`.
        """
        params = lib.llama_context_default_params()
        params.n_ctx = context_tokens
        params.n_batch = BATCH_TOKENS
        params.n_ubatch = UBATCH_TOKENS
        params.n_seq_max = n_sequences
        params.n_outputs_max = max_rows
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        params.no_perf = True
        handle = lib.llama_init_from_model(model.handle, params)
        if not handle:
            raise EngineFault(
                "out_of_memory", f"no memory for a context of {context_tokens} tokens: lower serve.context_tokens"
            )
        self.handle = handle
        self._n_vocab = model.n_vocab
        self._memory = lib.llama_get_memory(handle)
        self._batch = _Batch(BATCH_TOKENS)

    def set_adapter(self, adapter: backend.Adapter | None) -> None:
        """Decode with `adapter` (None: the bare base) from now on; forgets every sequence."""
        if adapter is None:
            code = lib.llama_set_adapters_lora(self.handle, None, 0, None)
        else:
            assert isinstance(adapter, Adapter)
            adapters = (lib.llama_adapter_lora_p_ctypes * 1)(adapter.handle)
            code = lib.llama_set_adapters_lora(self.handle, adapters, 1, (ctypes.c_float * 1)(1.0))
        if code != 0:
            raise DecodeFailed(f"llama_set_adapters_lora returned {code}")
        self.clear()

    def clear(self) -> None:
        """Forget every sequence."""
        lib.llama_memory_clear(self._memory, False)

    def copy(self, source: int, target: int, n_tokens: int) -> None:
        """Let sequence `target`, which must be empty, share the first `n_tokens` cells of `source`."""
        lib.llama_memory_seq_cp(self._memory, source, target, 0, n_tokens)

    def forget(self, sequence: int) -> None:
        """Free the cells that only `sequence` holds."""
        lib.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def decode(self, entries: Sequence[Entry]) -> list[Row]:
        """Evaluate up to BATCH_TOKENS tokens; float32[V] logits views of the entries that want a row, in order.

        Raises:
            DecodeFailed: llama.cpp did not take the batch.
        """
        self._batch.fill(entries)
        code = lib.llama_decode(self.handle, self._batch.struct)
        if code != 0:
            raise DecodeFailed(f"llama_decode returned {code} for {len(entries)} tokens")
        return [self._row(i) for i, entry in enumerate(entries) if entry.wants_row]

    def _row(self, index: int) -> Row:
        pointer = lib.llama_get_logits_ith(self.handle, index)
        if not pointer:
            raise DecodeFailed(f"no logits for batch entry {index}")
        return np.ctypeslib.as_array(pointer, shape=(self._n_vocab,))


class _Batch:
    """A llama_batch over numpy arrays, filled again for every decode."""

    def __init__(self, n_tokens: int) -> None:
        self._token = np.zeros(n_tokens, np.int32)
        self._position = np.zeros(n_tokens, np.int32)
        self._sequence = np.zeros(n_tokens, np.int32)
        self._one = np.ones(n_tokens, np.int32)
        self._wants_row = np.zeros(n_tokens, np.int8)
        # llama_batch wants a list of sequences per token, ours has one: the address of its cell in _sequence.
        base, size = self._sequence.ctypes.data, self._sequence.itemsize
        self._sequence_at = np.arange(base, base + n_tokens * size, size, dtype=np.uintp)
        self.struct = lib.llama_batch()
        self.struct.token = _pointer(self._token, lib.llama_token)
        self.struct.pos = _pointer(self._position, lib.llama_pos)
        self.struct.n_seq_id = _pointer(self._one, ctypes.c_int32)
        self.struct.seq_id = _pointer(self._sequence_at, ctypes.POINTER(lib.llama_seq_id))
        self.struct.logits = _pointer(self._wants_row, ctypes.c_int8)

    def fill(self, entries: Sequence[Entry]) -> None:
        n = len(entries)
        self._token[:n] = [entry.token for entry in entries]
        self._position[:n] = [entry.position for entry in entries]
        self._sequence[:n] = [entry.sequence for entry in entries]
        self._wants_row[:n] = [entry.wants_row for entry in entries]
        self.struct.n_tokens = n


def _pointer(array: npt.NDArray[Any], item: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(item))


def _has_broken_amx() -> bool:
    """Whether the AMX kernels of this build may kill the process.

    GCC 12 compiles them wrongly: it takes the stores of the tile configuration for dead, and the first product dies of
    SIGILL. Built with SOUND_AMX_FLAG they are sound, and decode twice as fast as without; the flag is found in the
    library if it was also built with -frecord-gcc-switches. They are reached through the extra buffer types only.
    """
    if b"AMX_INT8 = 1" not in lib.llama_print_system_info():
        return False
    library = Path(lib._lib._name).with_name("libggml-cpu.so")
    return SOUND_AMX_FLAG not in library.read_bytes()


def _check_magic(path: str) -> None:
    try:
        with open(path, "rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise EngineFault("model_unreadable", f"{path}: {error.strerror}; check model.path") from error
    if magic != GGUF_MAGIC:
        raise EngineFault("model_unreadable", f"{path}: not a GGUF file; check model.path")


def _last_error() -> str:
    return " / ".join(line for line in _recent_errors if line) or "no reason given"


def _adapter_code(reason: str) -> str:
    mismatch = ("mismatch", "does not exist in base model", "incorrect shape", "unexpected suffix")
    return "adapter_mismatch" if any(words in reason for words in mismatch) else "adapter_unreadable"
