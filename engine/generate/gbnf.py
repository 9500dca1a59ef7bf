"""Context-free grammars over characters, checked for what llama.cpp's grammar sampler cannot bear, and their text.

llama.cpp matches a grammar with a set of stacks and no bound of its own: a rule that begins with itself never ends,
alternatives that begin with alternatives multiply before the first character, and those that stay possible while what
is inside them goes on (`forks`) multiply at every level. `Grammar.text` refuses all three from the rules alone, by
counting, so that a hostile grammar costs its asker a refusal and nobody else a pause. Alternatives that no finite text
fits are left out. Pure; knows neither JSON nor a vocabulary.

Invariants: a text that was given is one that llama.cpp's parser takes; equal alternatives are one rule, so choosing
between equal things is no choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

ITEMS_MAX = 50_000  # of all rules together: about a megabyte in each answer's copy
STARTS_MAX = 1_000  # ways from a rule to its first characters: each is a stack of its own
FORKS_MAX = 64  # alternatives, inside each other too, that the same text keeps possible
IN_TURN_MAX = 1_000  # optional items that are counted one by one
DEPTH_MAX = 250  # rules entered before the first character: llama.cpp recurses into each


class BadGrammar(ValueError):
    """Raised for a grammar that nothing fits, or that would take too long to follow."""


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """These characters."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set, as first and last characters of its ranges."""

    ranges: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """What another rule describes."""

    number: int


Item = Text | Chars | Rule
Items = tuple[Item, ...]


def chars(*ranges: str) -> Chars:
    """A set of characters: each range is its first and last character, or one character."""
    return Chars(tuple((text[0], text[-1]) for text in ranges))


class Grammar:
    """Rules, each a choice between sequences."""

    def __init__(self) -> None:
        self._rules: list[tuple[Items, ...]] = []
        self._known: dict[tuple[Items, ...], Rule] = {}
        self._repeated: dict[tuple[Item, int, bool], Rule] = {}
        self._forks: dict[int, int] = {}
        self._places: dict[str, int] = {}
        self._n_items = 0

    def any_of(self, choices: Iterable[Sequence[Item]]) -> Rule:
        """One of `choices`; none at all is a rule that nothing fits. Raises BadGrammar if it gets too large."""
        alternatives = tuple(dict.fromkeys(tuple(choice) for choice in choices))
        known = self._known.get(alternatives)
        if known is None:
            known = self._known[alternatives] = self.promise()
            self.keep(known, alternatives)
        return known

    def fork(self, rule: Rule, ways: int) -> Rule:
        """Say that as many as `ways` choices of `rule` stay possible when one has got to a rule inside it."""
        self._forks[rule.number] = max(ways, self._forks.get(rule.number, 1))
        return rule

    def count_places(self, part: str, places: int) -> int:
        """Say that so many places in `part` may be open at once; how many it is in all parts, each counted once."""
        self._places[part] = places
        return sum(self._places.values())

    def sequence(self, *items: Item) -> Rule:
        return self.any_of([items])

    def promise(self) -> Rule:
        """A rule that is told later (`keep`): what refers to itself needs it."""
        self._rules.append(())
        return Rule(len(self._rules) - 1)

    def keep(self, promised: Rule, choices: Iterable[Sequence[Item]]) -> None:
        """Tell what a promised rule is. Raises BadGrammar."""
        alternatives = tuple(tuple(choice) for choice in choices)
        self._n_items += sum(1 + sum(_size(item) for item in choice) for choice in alternatives)
        if self._n_items > ITEMS_MAX:
            raise BadGrammar("it is too large: make it smaller, or bounds and lists shorter")
        self._rules[promised.number] = alternatives

    def optional(self, *items: Item) -> Rule:
        return self.any_of([items, ()])

    def repeat(self, item: Item, least: int, most: int | None) -> Rule:
        """`item`, `least` to `most` times (None: without end), counted one by one: to `least` + IN_TURN_MAX at most."""
        if most is None:
            rest = self.promise()
            self.keep(rest, [(item, rest), ()])
        else:
            rest = self.sequence()
            for _ in range(min(most - least, IN_TURN_MAX)):
                rest = self.optional(item, rest)
        return self.sequence(self._exactly(item, least), rest)

    def repeat_character(self, item: Item, least: int, most: int | None) -> Rule:
        """The same for what has nothing inside that forks: in as many rules as the bounds have binary digits, and no
        shorter than `most`."""
        rest = self.repeat(item, 0, None) if most is None else self._up_to(item, most - least)
        return self.sequence(self._exactly(item, least), rest)

    def _exactly(self, item: Item, times: int) -> Rule:
        key = (item, times, True)
        if key not in self._repeated:
            if times < 4:
                rule = self.sequence(*[item] * times)
            else:
                rule = self.sequence(self._exactly(item, times // 2), self._exactly(item, times - times // 2))
            self._repeated[key] = rule
        return self._repeated[key]

    def _up_to(self, item: Item, times: int) -> Rule:
        """Each length in one way only: at least half and the rest, or less than half."""
        key = (item, times, False)
        if key not in self._repeated:
            half = (times + 1) // 2
            if times <= 0:
                rule = self.sequence()
            elif times == 1:
                rule = self.optional(item)
            else:
                enough = (self._exactly(item, half), self._up_to(item, times - half))
                rule = self.any_of([enough, (self._up_to(item, half - 1),)])
            self._repeated[key] = rule
        return self._repeated[key]

    def one_of_texts(self, texts: Iterable[str]) -> Rule:
        """One of `texts`, as a tree of their common beginnings: as many ways to go on as there are next characters."""
        unique = sorted(set(texts))
        return self._branch(unique, 0)

    def _branch(self, texts: Sequence[str], start: int) -> Rule:
        """texts: sorted, equal before `start`."""
        choices: list[tuple[Item, ...]] = []
        first = 0
        while first < len(texts):
            if len(texts[first]) == start:
                choices.append(())
                first += 1
                continue
            end = first + 1
            while end < len(texts) and texts[end][start : start + 1] == texts[first][start]:
                end += 1
            group = texts[first:end]
            common = len(_common_beginning(group[0], group[-1]))
            head = Text(group[0][start:common])
            choices.append((head,) if len(group) == 1 else (head, self._branch(group, common)))
            first = end
        return self.any_of(choices)

    def text(self, root: Rule) -> str:
        """The grammar as llama.cpp reads it, beginning with the rule `root`.

        Raises:
            BadGrammar: nothing fits it, a rule begins with itself, or there are too many ways to go on.
        """
        productive = _grounded(self._rules, on_characters=True)
        if root.number not in productive:
            raise BadGrammar("no answer fits it: what it asks for has no end, or contradicts itself")
        rules = [
            tuple(choice for choice in choices if all(_ends(item, productive) for item in choice))
            for choices in self._rules
        ]
        reachable = _reachable(rules, root.number)
        _check_starts(rules, reachable)
        _check_forks(rules, reachable, self._forks)
        names = {number: f"r{number}" for number in reachable} | {root.number: "root"}
        return "\n".join(f"{names[number]} ::= {_choices_text(rules[number], names)}" for number in reachable) + "\n"


def _grounded(rules: Sequence[tuple[Items, ...]], *, on_characters: bool) -> set[int]:
    """Rules with a choice of which every rule is in the set again.

    on_characters: whether a choice may hold characters. So those with a finite text, or those with an empty one.
    """
    waiting: dict[int, list[tuple[int, int]]] = {}
    missing: dict[tuple[int, int], int] = {}
    found: list[int] = []
    for number, choices in enumerate(rules):
        for place, choice in enumerate(choices):
            needs = {item.number for item in choice if isinstance(item, Rule)}
            if not on_characters and any(not isinstance(item, Rule) and item != Text("") for item in choice):
                continue
            missing[number, place] = len(needs)
            if not needs:
                found.append(number)
            for need in needs:
                waiting.setdefault(need, []).append((number, place))
    grounded: set[int] = set()
    while found:
        number = found.pop()
        if number in grounded:
            continue
        grounded.add(number)
        for waiter in waiting.get(number, ()):
            missing[waiter] -= 1
            if missing[waiter] == 0:
                found.append(waiter[0])
    return grounded


def _size(item: Item) -> int:
    match item:
        case Text(text):
            return len(text)
        case Chars(ranges):
            return len(ranges)
        case Rule():
            return 1


def _common_beginning(one: str, other: str) -> str:
    n = 0
    while n < min(len(one), len(other)) and one[n] == other[n]:
        n += 1
    return one[:n]


def _ends(item: Item, productive: set[int]) -> bool:
    return not isinstance(item, Rule) or item.number in productive


def _reachable(rules: Sequence[tuple[Items, ...]], root: int) -> list[int]:
    seen = {root: None}
    todo = [root]
    while todo:
        for choice in rules[todo.pop()]:
            for item in choice:
                if isinstance(item, Rule) and item.number not in seen:
                    seen[item.number] = None
                    todo.append(item.number)
    return list(seen)


def _first_rules(choices: tuple[Items, ...], empty: set[int]) -> list[int]:
    """The rules that a text of these choices may begin with, once for each way."""
    found = []
    for choice in choices:
        for item in choice:
            if not isinstance(item, Rule):
                break
            found.append(item.number)
            if item.number not in empty:
                break
    return found


def _check_starts(rules: Sequence[tuple[Items, ...]], reachable: Sequence[int]) -> None:
    """Raise BadGrammar if a rule begins with itself, or has too many ways to its first characters."""
    empty = _grounded(rules, on_characters=False)
    starts: dict[int, tuple[int, int]] = {}  # rule -> (ways to begin, rules entered on the longest)
    for number in reachable:
        todo, open_rules = [(number, False)], set[int]()
        while todo:
            current, is_left = todo.pop()
            if is_left:
                open_rules.discard(current)
                inner = [starts[first] for first in _first_rules(rules[current], empty)]
                ways = len(rules[current]) + sum(one[0] for one in inner)
                depth = 1 + max((one[1] for one in inner), default=0)
                if ways > STARTS_MAX or depth > DEPTH_MAX:
                    raise BadGrammar("it has too many ways to go on at one place: use fewer alternatives")
                starts[current] = (ways, depth)
            elif current in open_rules:
                raise BadGrammar("a part of it is itself again without anything in between")
            elif current not in starts:
                open_rules.add(current)
                todo.append((current, True))
                todo += [(first, False) for first in _first_rules(rules[current], empty)]


def _check_forks(rules: Sequence[tuple[Items, ...]], reachable: Sequence[int], forks: Mapping[int, int]) -> None:
    """Raise BadGrammar if forks inside each other multiply too far; a fork inside itself always does."""
    users: dict[int, list[int]] = {number: [] for number in reachable}
    for number in reachable:
        for inner in {item.number for choice in rules[number] for item in choice if isinstance(item, Rule)}:
            users[inner].append(number)
    ways = {number: forks.get(number, 1) for number in reachable}
    todo = [number for number in reachable if ways[number] > 1]
    while todo:
        number = todo.pop()
        if ways[number] > FORKS_MAX:
            raise BadGrammar(
                "alternatives inside each other stay possible for too long: let each begin with a property of its own "
                "name, or with a constant of its own"
            )
        for user in users[number]:
            inside = forks.get(user, 1) * ways[number]
            if inside > ways[user]:
                ways[user] = inside
                todo.append(user)


def _choices_text(choices: tuple[Items, ...], names: dict[int, str]) -> str:
    return " | ".join(" ".join(_item_text(item, names) for item in choice) or '""' for choice in choices)


def _item_text(item: Item, names: dict[int, str]) -> str:
    match item:
        case Text(text):
            return '"' + "".join(_escaped(char) for char in text) + '"'
        case Chars(ranges):
            return "[" + "".join(_escaped(a) if a == b else f"{_escaped(a)}-{_escaped(b)}" for a, b in ranges) + "]"
        case Rule(number):
            return names[number]


def _escaped(char: str) -> str:
    if char.isascii() and (char.isalnum() or char in " !#$%&'()*+,./:;<=>?@_`{|}~"):
        return char
    return f"\\U{ord(char):08X}"
