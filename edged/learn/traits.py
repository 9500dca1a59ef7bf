"""Traits of one answer that tell a degenerate one from a sound one, whatever it says. Pure.

Each is a number of the answer's text or tokens alone. None means that the trait cannot be told: an empty answer repeats
nothing. What a difference of them means is decided in `edged.learn.deep_gate`.
"""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
import zlib
from collections.abc import Collection, Sequence

REPEAT_TOKENS = 3  # a sequence of so many tokens that was there before counts as a repetition
_WORD = re.compile(r"[^\W\d_]+")


def repeated_share(tokens: Sequence[int]) -> float | None:
    """Share of the token triples that stood in the answer before (1 - distinct-3); None below two triples."""
    triples = list(zip(*(tokens[start:] for start in range(REPEAT_TOKENS)), strict=False))
    return 1.0 - len(set(triples)) / len(triples) if len(triples) > 1 else None


def longest_run_share(tokens: Sequence[int]) -> float | None:
    """Length of the longest token sequence that occurs twice, of that of the answer; the two may overlap. None below
    two tokens."""
    if len(tokens) < 2:
        return None
    longest, before = 0, [0] * (len(tokens) + 1)
    for row in range(1, len(tokens)):
        # common[column]: how far the sequences that end at row and column agree, going back
        common = [0] * (len(tokens) + 1)
        for column in range(row):
            if tokens[row] == tokens[column]:
                common[column + 1] = before[column] + 1
                longest = max(longest, common[column + 1])
        before = common
    return longest / len(tokens)


def compressed_share(text: str) -> float | None:
    """Bytes after compression, of the characters before; the less, the more regular the text. None for an empty one.

    A character counts as one byte in any script: in UTF-8 half of them would be the same in most.
    """
    numbers = {char: number for number, char in enumerate(dict.fromkeys(text))}
    data = bytes(numbers[char] % 256 for char in text)
    return len(zlib.compress(data, 9)) / len(data) if data else None


def word_chars(text: str) -> float | None:
    """Mean characters between two spaces; None for an empty text. High where spaces were lost, and in scripts that use
    none, so that it tells something in comparison only."""
    words = text.split()
    return sum(map(len, words)) / len(words) if words else None


def words_of(text: str) -> list[str]:
    """The words in lower case, without digits and punctuation."""
    return [word.lower() for word in _WORD.findall(text)]


def known_share(text: str, known: Collection[str]) -> float | None:
    """Share of the words that are among `known`; None without words."""
    words = words_of(text)
    return sum(word in known for word in words) / len(words) if words else None


def scripts_of(text: str) -> dict[str, int]:
    """Letters by script, as "LATIN", "CYRILLIC", "CJK"."""
    letters = sorted(script for script in map(_script, text) if script)
    return {script: len(list(group)) for script, group in itertools.groupby(letters)}


@functools.lru_cache(maxsize=4096)
def _script(char: str) -> str:
    """The first word of a letter's name, which is its script; "" for anything but a letter."""
    return unicodedata.name(char, "").partition(" ")[0] if char.isalpha() else ""
