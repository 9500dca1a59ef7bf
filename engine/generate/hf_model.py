"""A Hugging Face folder as an engine: transformers computes, the scheduler of this package decides what.

The model's own forward pass runs over the tokens of all sequences at once; its attention is replaced by `hf_pool`, and
nothing else. Adapters are added to the outputs of the linear maps while they are applied, never merged: two contexts
with two adapters share one set of weights, and a swap changes a reference.

transformers has continuous batching of its own (its `generation.continuous_batching`). It is not used: it samples by
itself, from one random state for all requests, tells one log-probability a token, and knows one adapter at a time;
seeds, the two log-probabilities that learning needs and versions that live side by side would have to be built into it.

Only model types that the trainer computes are loaded (`adapters.hf_base`): what is served is what can be learned.
No code of the folder is run, nothing is downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from adapters.errors import AdapterError, MismatchedAdapter, UnsupportedAdapter
from adapters.fusion import stored_matrices
from adapters.peft import load_peft
from engine.fault import EngineFault
from engine.generate import backend
from engine.generate.backend import AdapterRefused, DecodeFailed, Row
from engine.generate.hf_pool import ATTENTION, Pool, PoolFull, attend
from engine.generate.hf_vocabulary import FolderVocabulary
from engine.generate.scheduler import Entry
from engine.protocol import ModelFacts

# A factor each of the low-rank product, B with the adapter's scale in it: A [r, I], B [O, r].
Pair = tuple[torch.Tensor, torch.Tensor]

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Model(FolderVocabulary):
    """A loaded folder and its vocabulary. Implements `engine.generate.backend.Model`."""

    def __init__(self, path: str, *, dtype: str, device: str) -> None:
        """Raises EngineFault: model_unreadable, model_unsupported, device_missing, out_of_memory.

        Args:
            dtype: "bfloat16" or "float32". device: as torch names it.
        """
        folder = Path(path)
        super().__init__(folder)
        self.device = _open_device(device)
        self.dtype = DTYPES[dtype]
        self._model = _load(folder, self.dtype, self.device)
        self._applied: dict[str, Pair] = {}
        self._modules = {name: module for name, module in self._model.named_modules() if ".layers." in name}
        for name, module in self._modules.items():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(self._hook(name))

    @property
    def n_ctx_train_tokens(self) -> int:
        return self.trained_tokens

    def facts(self) -> ModelFacts:
        return ModelFacts(
            architecture=self.shape.arch,
            n_layers=self.shape.n_layers,
            n_embd=self.shape.n_embd,
            n_vocab=self.n_vocab,
            n_ctx_train_tokens=self.n_ctx_train_tokens,
            eos_ids=tuple(sorted(self.eos_ids)),
            chat_template=self.chat_template is not None,
        )

    def open_adapter(self, folder: str) -> Adapter:
        """The adapter in a PEFT folder. Raises AdapterRefused."""
        try:
            weights = load_peft(Path(folder), self.shape)
            stored = stored_matrices(weights)
        except AdapterError as error:
            mismatch = isinstance(error, MismatchedAdapter | UnsupportedAdapter)
            raise AdapterRefused("adapter_mismatch" if mismatch else "adapter_unreadable", str(error)) from error
        pairs = {}
        for module, matrices in stored.items():
            if module not in self._modules:
                raise AdapterRefused("adapter_mismatch", f"{folder}: the model has no module {module}")
            b = torch.from_numpy(matrices.b) * weights.scale
            pairs[module] = tuple(
                one.to(device=self.device, dtype=self.dtype) for one in (torch.from_numpy(matrices.a), b)
            )
        return Adapter(pairs)

    def open_context(self, *, context_tokens: int, n_sequences: int, max_rows: int, threads: int) -> Context:
        """See `backend.Model.open_context`. Raises EngineFault out_of_memory."""
        if self.device.type == "cpu":
            torch.set_num_threads(threads)
        try:
            pool = Pool(
                n_layers=self.shape.n_layers,
                n_kv_heads=self.shape.n_kv_heads,
                head_dim=self.shape.head_dim,
                n_sequences=n_sequences,
                n_cells=context_tokens,
                dtype=self.dtype,
                device=self.device,
            )
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            raise EngineFault(
                "out_of_memory", f"no memory for a context of {context_tokens} tokens: lower serve.context_tokens"
            ) from error
        return Context(self, pool)

    def logits(self, tokens: torch.Tensor, rows: torch.Tensor, step: Any, adapter: Adapter | None) -> torch.Tensor:
        """float32[rows, V] of tokens int64[T], under `adapter`."""
        self._applied = {} if adapter is None else adapter.pairs
        out = self._model(
            input_ids=tokens.unsqueeze(0),
            position_ids=step.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=rows,
            step=step,
        )
        logits: torch.Tensor = out.logits[0].float()
        return logits

    def _hook(self, name: str) -> Callable[..., torch.Tensor | None]:
        def add(_module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
            pair = self._applied.get(name)
            if pair is None:
                return None
            a, b = pair
            return output + F.linear(F.linear(inputs[0], a), b)

        return add


class Adapter:
    """A LoRA adapter on the model's device: module as the model stores it -> its two factors."""

    def __init__(self, pairs: dict[str, Any]) -> None:
        self.pairs = pairs

    def free(self) -> None:
        self.pairs = {}


class Context:
    """A pool of cells on a model. Implements `backend.Context`."""

    def __init__(self, model: Model, pool: Pool) -> None:
        self._model = model
        self._pool = pool
        self._adapter: Adapter | None = None

    def set_adapter(self, adapter: backend.Adapter | None) -> None:
        assert adapter is None or isinstance(adapter, Adapter)
        self._adapter = adapter
        self.clear()

    def clear(self) -> None:
        self._pool.chains.release_all()

    def copy(self, source: int, target: int, n_tokens: int) -> None:
        self._pool.chains.share(source, target, n_tokens)

    def forget(self, sequence: int) -> None:
        self._pool.chains.release(sequence)

    def decode(self, entries: Sequence[Entry]) -> Sequence[Row]:
        """See `backend.Context.decode`. Raises DecodeFailed."""
        device = self._model.device
        tokens = torch.tensor([entry.token for entry in entries], device=device)
        wanted = [place for place, entry in enumerate(entries) if entry.wants_row]
        try:
            with torch.inference_mode():
                step = self._pool.step(entries)
                rows = torch.tensor(wanted, dtype=torch.int64, device=device)
                logits = self._model.logits(tokens, rows, step, self._adapter)
                return list(logits.cpu().numpy())
        except (torch.OutOfMemoryError, PoolFull) as error:
            raise DecodeFailed(f"a step of {len(entries)} tokens: {error}") from error


def _open_device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EngineFault("device_missing", f"no GPU for {name}: torch finds none; set [placement] serve_device to cpu")
    return device


def _load(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    # It asks the hub for files that a folder may lack, whatever it is told, unless this is set before its import.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.AttentionInterface.register(ATTENTION, attend)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=ATTENTION,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
        return model.eval().requires_grad_(False).to(device)
    except torch.OutOfMemoryError as error:
        raise EngineFault("out_of_memory", f"{folder}: the model does not fit on {device}: {error}") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise EngineFault("model_unreadable", f"{folder}: transformers cannot load this model: {error}") from error
