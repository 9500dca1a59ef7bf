"""The vocabulary of a Hugging Face folder: texts to tokens and back, without transformers; no weight is read.

`tokenizer.json` is read by the library that reads it everywhere; the bytes of single tokens follow from how its decoder
is built, which is one of two ways: byte-level (GPT-2 and most since), where each character stands for a byte, or
SentencePiece, where a low line stands for a space and `<0x0A>` for a byte.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from adapters.errors import AdapterError
from adapters.hf_base import read_folder_shape
from engine.fault import EngineFault

DEFAULT_TRAINED_TOKENS = 2048

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"  # SentencePiece's


class FolderVocabulary:
    """Implements `engine.generate.backend.Vocabulary`. trained_tokens: the longest sequence it was trained for."""

    def __init__(self, folder: Path) -> None:
        """Raises EngineFault model_unreadable."""
        config = _read_json(folder / "config.json")
        try:
            self.shape = read_folder_shape(folder)
        except AdapterError as error:
            raise EngineFault("model_unreadable", str(error)) from error
        self.trained_tokens = int(config.get("max_position_embeddings") or DEFAULT_TRAINED_TOKENS)
        generation = _read_json(folder / "generation_config.json", optional=True)
        self._settings = _read_json(folder / "tokenizer_config.json", optional=True)
        path = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself
            raise EngineFault("model_unreadable", f"{path}: {error}; save the tokenizer again") from error
        self.n_vocab = self.shape.n_vocab
        ends = {*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))}
        end = self._id_of("eos")
        self._end = min(ends) if end is None and ends else end
        self.eos_ids = frozenset(ends if end is None else ends | {end})
        self.chat_template = _chat_template(folder, self._settings)
        self._added = self._tokenizer.get_added_tokens_decoder()
        self._is_byte_level = "ByteLevel" in _kinds(json.loads(self._tokenizer.to_str()).get("decoder"))
        self._pieces: dict[int, bytes] = {}

    def tokenise(self, text: str, *, add_special: bool, parse_special: bool) -> tuple[int, ...]:
        """See `Vocabulary.tokenise`."""
        self._tokenizer.encode_special_tokens = not parse_special
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special).ids)

    def piece(self, token: int) -> bytes:
        """See `Vocabulary.piece`; b"" too for ids that a padded embedding has and the tokenizer has not."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._read_piece(token)
        return piece

    def special_text(self, name: str) -> str:
        """See `Vocabulary.special_text`."""
        value = self._settings.get(f"{name}_token")
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) else ""

    def end_token(self) -> int | None:
        """See `Vocabulary.end_token`."""
        return self._end

    def _id_of(self, name: str) -> int | None:
        text = self.special_text(name)
        return self._tokenizer.token_to_id(text) if text else None

    def _read_piece(self, token: int) -> bytes:
        added = self._added.get(token)
        if added is not None:
            return b"" if added.special else added.content.encode()
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self._is_byte_level:
            return bytes(_BYTE_OF[character] for character in text if character in _BYTE_OF)
        match = _BYTE.fullmatch(text)
        return bytes.fromhex(match[1]) if match else text.replace(_SPACE, " ").encode()


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        if optional:
            return {}
        raise EngineFault("model_unreadable", f"{path}: no such file; give the folder of a whole model") from error
    except (OSError, ValueError) as error:
        raise EngineFault("model_unreadable", f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise EngineFault("model_unreadable", f"{path}: not a table of keys")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value or ())


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    value = settings.get("chat_template")
    if isinstance(value, list):  # several by name; the one for plain chats is called default
        value = {one.get("name"): one.get("template") for one in value}.get("default")
    return value if isinstance(value, str) else None


def _kinds(decoder: Any) -> set[str]:
    """The types of a decoder and of those that it is a sequence of."""
    if not isinstance(decoder, dict):
        return set()
    kinds = {str(decoder.get("type"))}
    for part in decoder.get("decoders", ()):
        kinds |= _kinds(part)
    return kinds


def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable characters stand for their own byte, the rest for those above 255, in order."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    table = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in plain]
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()
