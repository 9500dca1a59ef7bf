"""A tiny random model that chats, in both forms: a Hugging Face folder and a GGUF file with the same weights, the same
byte-level vocabulary and the same chat template. So every engine can be held to the same tokens and the same numbers.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from adapters.folder import write_adapter_folder
from adapters.shape import BaseShape
from adapters.weights import AdapterWeights
from engine.protocol import AdapterRef
from tests.engine.families import write_family_gguf

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (("t", "h"), ("th", "e"), ("Ġ", "a"), ("Ġ", "the"), ("a", "t"), ("c", "at"))
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONTEXT_TOKENS = 512  # trained for
# As llama.cpp splits text for "gpt-2".
SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclasses.dataclass(frozen=True)
class Chatter:
    """folder: Hugging Face's files. file: the same as GGUF. end: the token that ends an answer."""

    folder: Path
    file: Path
    shape: BaseShape
    end: int

    def adapter(self, folder: Path, version: int, *, scale: float = 0.3) -> AdapterRef:
        """A random adapter folder on all of its blocks, written once."""
        if not folder.exists():
            rng = np.random.default_rng(version)
            matrices = {}
            for module in self.shape.top_modules(0):
                n_out, n_in = self.shape.module_shape(module)
                a, b = rng.standard_normal((4, n_in)), rng.standard_normal((n_out, 4))
                matrices[module] = (a.astype(np.float32) * np.float32(scale), b.astype(np.float32) * np.float32(scale))
            weights = AdapterWeights(base=self.shape, rank=4, alpha=8.0, matrices=matrices)
            lineage: dict[str, Any] = {
                "parent": None,
                "base_sha256": "0" * 64,
                "base_model_name": "test",
                "origin": "imported",
            }
            write_adapter_folder(folder, weights, version=version, created_at=0.0, **lineage)
        return AdapterRef(version=version, folder=str(folder))


def byte_symbols() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols, extra = {byte: chr(byte) for byte in plain}, 256
    for byte in range(256):
        if byte not in symbols:
            symbols[byte] = chr(extra)
            extra += 1
    return [symbols[byte] for byte in range(256)]


def vocabulary() -> list[str]:
    return [*byte_symbols(), *("".join(pair) for pair in MERGES), *SPECIAL]


def write_chatter(root: Path, template: str = TEMPLATE) -> Chatter:
    """The model in both forms, below `root`."""
    tokens = vocabulary()
    first_special = len(tokens) - len(SPECIAL)
    end = tokens.index("<|im_end|>")
    config = transformers.LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=first_special,
        eos_token_id=end,
        initializer_range=0.2,
    )
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = [end, first_special]  # llama.cpp knows the second one by its text
    folder = root / "model"
    model.save_pretrained(folder)
    write_tokenizer(folder, tokens, template)
    file = root / "model.gguf"
    write_family_gguf(file, model, add_tokenizer=lambda writer: _add_tokenizer(writer, tokens, end, template))
    shape = BaseShape(
        arch="llama", n_layers=3, n_embd=32, n_heads=4, n_kv_heads=2, head_dim=8, n_ff=48, n_vocab=len(tokens)
    )
    return Chatter(folder, file, shape, end)


def write_tokenizer(folder: Path, tokens: list[str], template: str = TEMPLATE) -> None:
    """`tokenizer.json` and `tokenizer_config.json` of a byte-level vocabulary."""
    plain = tokens[: -len(SPECIAL)]
    tokenizer = Tokenizer(BPE(vocab={token: number for number, token in enumerate(plain)}, merges=list(MERGES)))
    tokenizer.pre_tokenizer = Sequence(
        [Split(Regex(SPLIT), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _add_tokenizer(writer: gguf.GGUFWriter, tokens: list[str], end: int, template: str) -> None:
    n_plain = len(tokens) - len(SPECIAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * n_plain + [gguf.TokenType.CONTROL] * len(SPECIAL))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(n_plain)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)
