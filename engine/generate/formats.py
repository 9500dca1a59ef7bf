"""What a JSON schema's `format` names, as items of a grammar: dates that exist, times, UUIDs. Pure."""

from __future__ import annotations

from engine.generate.gbnf import Grammar, Item, Rule, Text, chars

_DIGIT = chars("09")
_HEX = chars("09", "af", "AF")
_LONG_MONTHS = ("01", "03", "05", "07", "08", "10", "12")
_SHORT_MONTHS = ("04", "06", "09", "11")


def all_of(grammar: Grammar) -> dict[str, tuple[Item, ...]]:
    """The text of each format that is known, without quotation marks, by name (RFC 3339; February has 28 days)."""
    date, time = _date(grammar), _time(grammar)
    uuid: tuple[Item, ...] = (_HEX,) * 8
    for n_digits in (4, 4, 4, 12):
        uuid = (*uuid, Text("-"), *(_HEX,) * n_digits)
    return {"date": date, "time": time, "date-time": (*date, Text("T"), *time), "uuid": uuid}


def _date(grammar: Grammar) -> tuple[Item, ...]:
    month_and_day = grammar.any_of(
        [
            [grammar.one_of_texts(_LONG_MONTHS), Text("-"), _tens(grammar, "019", "109", "209", "301")],
            [grammar.one_of_texts(_SHORT_MONTHS), Text("-"), _tens(grammar, "019", "109", "209", "300")],
            [Text("02-"), _tens(grammar, "019", "109", "208")],
        ]
    )
    return (chars("19"), _DIGIT, _DIGIT, _DIGIT, Text("-"), month_and_day)


def _time(grammar: Grammar) -> tuple[Item, ...]:
    hour, sixty = _tens(grammar, "009", "109", "203"), grammar.sequence(chars("05"), _DIGIT)
    part = grammar.optional(Text("."), _DIGIT, grammar.repeat(_DIGIT, 0, 5))
    zone = grammar.any_of([[Text("Z")], [chars("+", "-"), hour, Text(":"), sixty]])
    return (hour, Text(":"), sixty, Text(":"), sixty, part, zone)


def _tens(grammar: Grammar, *ranges: str) -> Rule:
    """Two digits: in each range the first one, and the least and the most of the second."""
    return grammar.any_of([[Text(each[0]), chars(each[1:])] for each in ranges])
