"""Numbers within bounds as rules of a grammar: without leading zeros, with at most 15 digits where a bound is missing.

Bounds are whole numbers: between two of those, a digit decides about the next ones only as long as the number so far
equals the beginning of a bound. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from engine.generate.gbnf import Grammar, Item, Rule, Text, chars

FREE_DIGITS = 15
DIGITS_MAX = 20  # of a bound: more than 64-bit integers have

_DIGIT = chars("09")


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """None: no bound. open: the bound itself is not allowed."""

    least: int | None = None
    least_open: bool = False
    most: int | None = None
    most_open: bool = False


def limits_of(keywords: Mapping[str, Any]) -> Limits:
    """Of `minimum`, `maximum`, `exclusiveMinimum` and `exclusiveMaximum`. Raises ValueError."""
    whole: dict[str, int] = {}
    for name, value in keywords.items():
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int:
            raise ValueError(f"{name} must be a whole number here")
        if abs(value) >= 10**DIGITS_MAX:
            raise ValueError(f"{name} has more than {DIGITS_MAX} digits; leave it out")
        whole[name] = value
    least, least_open = _tighter(whole.get("minimum"), whole.get("exclusiveMinimum"), 1)
    most, most_open = _tighter(whole.get("maximum"), whole.get("exclusiveMaximum"), -1)
    return Limits(least, least_open, most, most_open)


def _tighter(closed: int | None, open_: int | None, sign: int) -> tuple[int | None, bool]:
    if closed is None or open_ is None:
        return (closed, False) if open_ is None else (open_, True)
    return (open_, True) if sign * open_ >= sign * closed else (closed, False)


def integer(grammar: Grammar, limits: Limits) -> Rule:
    """An integer within `limits`."""
    least = None if limits.least is None else limits.least + limits.least_open
    most = None if limits.most is None else limits.most - limits.most_open
    choices: list[tuple[Item, ...]] = []
    if most is None or most >= 0:
        choices.append((_whole(grammar, max(0, least or 0), most),))
    if least is None or least < 0:
        smallest = 1 if most is None or most >= 0 else -most
        choices.append((Text("-"), _whole(grammar, smallest, None if least is None else -least)))
    return grammar.any_of(choices)


def number(grammar: Grammar, limits: Limits) -> Rule:
    """A number within `limits`; with an exponent only where there are none."""
    if limits == Limits():
        exponent = grammar.optional(
            chars("e", "E"), grammar.optional(chars("+", "-")), _DIGIT, grammar.optional(_DIGIT)
        )
        return grammar.sequence(grammar.optional(Text("-")), _whole(grammar, 0, None), _part(grammar), exponent)
    choices: list[tuple[Item, ...]] = []
    if limits.most is None or limits.most >= 0:
        below = limits.least is None or limits.least < 0
        least, is_open = (0, False) if below or limits.least is None else (limits.least, limits.least_open)
        choices.append((_magnitude(grammar, Limits(least, is_open, limits.most, limits.most_open)),))
    if limits.least is None or limits.least < 0:
        above = limits.most is None or limits.most >= 0
        # Minus nothing is nothing, which the choice above has.
        least, is_open = (0, True) if above or limits.most is None else (-limits.most, limits.most_open)
        most = None if limits.least is None else -limits.least
        choices.append((Text("-"), _magnitude(grammar, Limits(least, is_open, most, limits.least_open))))
    return grammar.any_of(choices)


def _magnitude(grammar: Grammar, limits: Limits) -> Rule:
    """A number of at least 0 within `limits`, which have a `least`."""
    assert limits.least is not None
    choices: list[tuple[Item, ...]] = []
    first = limits.least
    if limits.least_open:
        zeros = grammar.repeat(Text("0"), 0, FREE_DIGITS - 1)
        rest = grammar.repeat(_DIGIT, 0, FREE_DIGITS - 1)
        if limits.most is None or limits.most > limits.least:
            choices.append((Text(f"{limits.least}."), zeros, chars("19"), rest))
        first += 1
    if limits.most is None:
        choices.append((_whole(grammar, first, None), _part(grammar)))
        return grammar.any_of(choices)
    if first <= limits.most - 1:
        choices.append((_whole(grammar, first, limits.most - 1), _part(grammar)))
    if not limits.most_open and first <= limits.most:
        nothing = grammar.optional(Text(".0"), grammar.repeat(Text("0"), 0, FREE_DIGITS - 1))
        choices.append((Text(str(limits.most)), nothing))
    return grammar.any_of(choices)


def _part(grammar: Grammar) -> Rule:
    """What stands behind the integer, or nothing."""
    return grammar.optional(Text("."), _DIGIT, grammar.repeat(_DIGIT, 0, FREE_DIGITS - 1))


def _whole(grammar: Grammar, least: int, most: int | None) -> Rule:
    """An integer from `least`, which is at least 0, to `most`."""
    if most is None:
        most = max(10**FREE_DIGITS, 10 ** len(str(least))) - 1
    choices: list[tuple[Item, ...]] = []
    for n_digits in range(len(str(least)), len(str(most)) + 1):
        low = max(least, 10 ** (n_digits - 1) if n_digits > 1 else 0)
        high = min(most, 10**n_digits - 1)
        if low <= high:
            choices += _between(grammar, str(low), str(high))
    return grammar.any_of(choices)


def _between(grammar: Grammar, low: str, high: str) -> list[tuple[Item, ...]]:
    """Digits from `low` to `high`, which are of the same length."""
    if not low:
        return [()]
    n_rest = len(low) - 1
    if low == "0" * (n_rest + 1) and high == "9" * (n_rest + 1):
        return [(_DIGIT,) * (n_rest + 1)]
    if low[0] == high[0]:
        return [(Text(low[0]), grammar.any_of(_between(grammar, low[1:], high[1:])))]
    choices: list[tuple[Item, ...]] = []
    first, last = int(low[0]), int(high[0])
    if low[1:] != "0" * n_rest:
        choices.append((Text(low[0]), grammar.any_of(_between(grammar, low[1:], "9" * n_rest))))
        first += 1
    ends_early = high[1:] != "9" * n_rest
    if ends_early:
        last -= 1
    if first <= last:
        choices.append((chars(f"{first}{last}"), *(_DIGIT,) * n_rest))
    if ends_early:
        choices.append((Text(high[0]), grammar.any_of(_between(grammar, "0" * n_rest, high[1:]))))
    return choices
