"""A JSON schema's `pattern` as items of a grammar: regular expressions, as far as they are regular.

Characters come as they are in JSON text: quotation marks, backslashes and line breaks escaped. Of other control
characters none is written. A pattern that is not anchored may stand anywhere in the text. `\\d`, `\\w` and `\\s` are as
in JavaScript, `\\s` of ASCII only.

Where a repeated group may have several lengths and nothing shows where one ends, llama.cpp follows every place in it
that the text may have come to, and counts inside counts multiply them. They are counted here, before anything is
followed. Pure.
"""

from __future__ import annotations

import dataclasses
import re

from engine.generate.gbnf import Chars, Grammar, Item, Rule, Text

LENGTH_MAX = 1_000
DEPTH_MAX = 20
REPEAT_MAX = 1_000
PLACES_MAX = 128  # in repeated groups, of all patterns together, that a text may have come to at once

Ranges = list[tuple[int, int]]

_LAST = 0x10FFFF
_ESCAPED = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_PLAIN: Ranges = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, _LAST)]  # what JSON text has as it is
_DIGITS: Ranges = [(0x30, 0x39)]
_WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE: Ranges = [(0x9, 0xD), (0x20, 0x20)]
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_NO_DOT: Ranges = [(0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029)]
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_QUANTIFIER = re.compile(r"(?:([*+?])|\{(\d{1,6})(?:(,)(\d{1,6})?)?\})\??")
_HEX = re.compile(r"(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4}))")


class BadPattern(ValueError):
    """Raised for a regular expression that is none, or that no grammar holds."""


def text_of(grammar: Grammar, pattern: str) -> Rule:
    """The inside of JSON texts that `pattern` is found in. Raises BadPattern, and BadGrammar if it is too large.

    The same pattern again is the same rule, and is not counted again.
    """
    if len(pattern) > LENGTH_MAX:
        raise BadPattern(f"{len(pattern)} characters, {LENGTH_MAX} at most are taken")
    parser = _Parser(grammar, pattern)
    choices = parser.alternatives(0)
    if parser.at < len(pattern):
        raise BadPattern("a ) without a (")
    if grammar.count_places(pattern, parser.places) > PLACES_MAX:
        raise BadPattern(
            f"counts inside counts: its repeated groups leave {parser.places} places open at once, {PLACES_MAX} at "
            "most are followed, in all patterns together; make the counts smaller, or let each group begin or end with "
            "a character that is nowhere else in it"
        )
    anything = grammar.repeat_character(_set(grammar, _PLAIN), 0, None)
    return grammar.any_of(
        [
            ([] if choice.at_start else [anything]) + choice.items + ([] if choice.at_end else [anything])
            for choice in choices
        ]
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """A character or a group, repeated or not.

    chars: all that are in its texts. places: where in it one may be, counted for each repetition. length: of its texts;
    None where they have several. is_parted: its first or its last character is nowhere else in it.
    """

    item: Item
    chars: Ranges
    places: int = 1
    length: int | None = 1
    is_character: bool = False
    is_parted: bool = False


@dataclasses.dataclass(slots=True)
class _Sequence:
    """at_start, at_end: it is anchored there."""

    parts: list[_Part] = dataclasses.field(default_factory=list)
    at_start: bool = False
    at_end: bool = False

    @property
    def items(self) -> list[Item]:
        return [part.item for part in self.parts]

    @property
    def length(self) -> int | None:
        lengths = [part.length for part in self.parts]
        return None if None in lengths else sum(length or 0 for length in lengths)

    @property
    def is_parted(self) -> bool:
        if len(self.parts) < 2:
            return any(part.is_parted for part in self.parts)
        return any(
            end.is_character and all(_are_apart(end.chars, part.chars) for part in self.parts if part is not end)
            for end in (self.parts[0], self.parts[-1])
        )


class _Parser:
    def __init__(self, grammar: Grammar, pattern: str) -> None:
        self._grammar = grammar
        self._pattern = pattern
        self.at = 0
        self.places = 0  # the most that a repetition in it leaves open at once

    def alternatives(self, depth: int) -> list[_Sequence]:
        """Up to the end of the group."""
        if depth > DEPTH_MAX:
            raise BadPattern("its groups are nested too deep")
        choices = [self._sequence(depth)]
        while self._next() == "|":
            self.at += 1
            choices.append(self._sequence(depth))
        return choices

    def _next(self) -> str:
        return self._pattern[self.at : self.at + 1]

    def _sequence(self, depth: int) -> _Sequence:
        sequence = _Sequence()
        while (char := self._next()) and char not in "|)":
            if sequence.at_end:
                raise BadPattern("$ is taken at the end only")
            if char in "^$":
                if depth or (char == "^" and (sequence.parts or sequence.at_start)):
                    raise BadPattern(
                        f"{char} is taken at the {'start' if char == '^' else 'end'} only, outside of groups"
                    )
                sequence.at_start |= char == "^"
                sequence.at_end |= char == "$"
                self.at += 1
                continue
            sequence.parts.append(self._repeated(self._atom(depth)))
        return sequence

    def _atom(self, depth: int) -> _Part:
        """One character of a set, or a group."""
        char = self._next()
        self.at += 1
        if char == "(":
            return self._group(depth)
        if char in "*+?{":
            raise BadPattern(f"{char} with nothing before it")
        match char:
            case "[":
                ranges = self._bracket()
            case ".":
                ranges = _without(_NO_DOT)
            case "\\":
                ranges = self._escape()
            case _:
                ranges = [(ord(char), ord(char))]
        return _Part(_set(self._grammar, ranges), ranges, is_character=True)

    def _group(self, depth: int) -> _Part:
        if self._next() == "?":
            if not self._pattern.startswith("?:", self.at):
                raise BadPattern("groups that begin with (? are not supported, (?: excepted")
            self.at += 2
        choices = self.alternatives(depth + 1)
        if self._next() != ")":
            raise BadPattern("a ( without a )")
        self.at += 1
        parts = [part for choice in choices for part in choice.parts]
        lengths = {choice.length for choice in choices}
        return _Part(
            self._grammar.any_of([choice.items for choice in choices]),
            sorted({each for part in parts for each in part.chars}),
            places=sum(part.places for part in parts),
            length=lengths.pop() if len(lengths) == 1 else None,
            is_parted=len(choices) == 1 and choices[0].is_parted,
        )

    def _escape(self) -> Ranges:
        char = self._next()
        if hexadecimal := _HEX.match(self._pattern, self.at):
            self.at = hexadecimal.end()
            code = int(hexadecimal[1] or hexadecimal[2], 16)
            return [(code, code)]
        self.at += 1
        if char.lower() in _CLASSES and char:
            ranges = _CLASSES[char.lower()]
            return ranges if char.islower() else _without(ranges)
        if char in _CONTROLS and char:
            return [(ord(_CONTROLS[char]), ord(_CONTROLS[char]))]
        if not char or char.isalnum():
            raise BadPattern(f"\\{char} is not supported")
        return [(ord(char), ord(char))]

    def _bracket(self) -> Ranges:
        is_negated = self._next() == "^"
        self.at += is_negated
        ranges: Ranges = []
        while (char := self._next()) != "]":
            if not char:
                raise BadPattern("a [ without a ]")
            low = self._member()
            if self._next() == "-" and self._pattern[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = self._member()
                if any(len(end) > 1 or end[0][0] != end[0][1] for end in (low, high)) or low > high:
                    raise BadPattern("a range in [ ] goes from one character to a later one")
                low = [(low[0][0], high[0][1])]
            ranges += low
        self.at += 1
        return _without(ranges) if is_negated else ranges

    def _member(self) -> Ranges:
        char = self._next()
        self.at += 1
        return self._escape() if char == "\\" else [(ord(char), ord(char))]

    def _repeated(self, part: _Part) -> _Part:
        found = _QUANTIFIER.match(self._pattern, self.at)
        if found is None:
            return part
        self.at = found.end()
        if found[1]:
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[found[1]]
        else:
            least = int(found[2])
            most = least if found[3] is None else None if found[4] is None else int(found[4])
        if least > REPEAT_MAX or (most or 0) > REPEAT_MAX or (most is not None and most < least):
            raise BadPattern(f"{found[0]}: counts are 0 to {REPEAT_MAX}, the smaller one first")
        n_told_apart = least + 1 if most is None else most
        places = n_told_apart * part.places
        if part.length is None and not part.is_parted and n_told_apart > 1:
            self.places = max(self.places, places)
        length = None if part.length is None or least != most else least * part.length
        repeat = self._grammar.repeat_character if part.is_character else self._grammar.repeat
        return _Part(repeat(part.item, least, most), part.chars, places, length)


def _are_apart(one: Ranges, other: Ranges) -> bool:
    return all(high < from_ or to < low for low, high in one for from_, to in other)


def _without(ranges: Ranges) -> Ranges:
    """All characters but those."""
    left, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            left.append((start, low - 1))
        start = max(start, high + 1)
    return [*left, (start, _LAST)] if start <= _LAST else left


def _set(grammar: Grammar, ranges: Ranges) -> Rule:
    """One character of `ranges`, as JSON text has it."""
    plain = [
        (chr(max(low, from_)), chr(min(high, to)))
        for low, high in ranges
        for from_, to in _PLAIN
        if max(low, from_) <= min(high, to)
    ]
    escaped = [text for char, text in _ESCAPED.items() if any(low <= ord(char) <= high for low, high in ranges)]
    choices: list[tuple[Item, ...]] = [(Chars(tuple(sorted(set(plain)))),)] if plain else []
    return grammar.any_of([*choices, *((Text(text),) for text in escaped)])
