"""Simulated people who rate answers: pure functions of the prompt, the answer and how it ended.

Each person likes one property and nothing else, and gives -1 to anything that is not plain language, so that a model
cannot please by gluing words together or by repeating one. Ratings are graded wherever the property has degrees: a
person who only ever says "bad" teaches nothing.

A rating never depends on a clock, on chance or on which adapter answered.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

Rate = Callable[[str, str, str], float]

FEWEST_WORDS = 3  # fewer are hardly an answer: `short` shrugs
SHORT_WORDS = 12  # at most this many words: the best rating of `short`
LONG_WORDS = 60  # this many words or more: the worst
LONGEST_WORD_LETTERS = 20
MEAN_WORD_LETTERS = (2.0, 8.0)
SENTENCE_WORDS = 6  # from here on an answer is judged as a sentence: small words, no repetition

_WORD = re.compile(r"[^\W_]+(?:['’.,:-][^\W_]+)*")
_GLUED = re.compile(r"[a-z]{2}[A-Z]|[a-z]{3}[.,!?;:][A-Za-z]{2}")
_DASHED = re.compile(r"^[-*•]\s+\S")
_NUMBERED = re.compile(r"^\d{1,2}[.)]\s+\S")
_SMALL_WORDS_TEXT = """
a about all also an and any are as at be because been but by can do does for from had has have he her his how i
if in into is it its just like may me more most my no not of on one or other our out she should so some such
than that the their them then there these they this those to too up us use very was we were what when where
which who why will with would you your
"""
_SMALL_WORDS = frozenset(_SMALL_WORDS_TEXT.split())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """A simulated person. `likes` completes the sentence "a person who likes ..."."""

    name: str
    likes: str
    rate: Rate


def words_of(text: str) -> list[str]:
    """The words of `text`, in order, without surrounding punctuation."""
    return _WORD.findall(text)


def is_plain(text: str) -> bool:
    """True if `text` reads like written language: no glued, endless or vowelless words, no stammering.

    Short answers ("Paris.", "It is 12.") are plain; the checks on small words and repetition start at `SENTENCE_WORDS`.
    """
    words = words_of(text)
    if not words or _GLUED.search(text):
        return False
    visible = [c for c in text if not c.isspace()]
    if sum(c.isalnum() for c in visible) < 0.7 * len(visible):
        return False
    if max(map(len, words)) > LONGEST_WORD_LETTERS:
        return False
    return _has_usual_words(words) and not _stammers(words)


def _has_usual_words(words: list[str]) -> bool:
    letters = [w for w in words if w.isalpha()]
    vowelless = sum(1 for w in letters if len(w) > 4 and not re.search("[aeiouyAEIOUY]|[^\x00-\x7f]", w))
    if vowelless > 0.1 * len(words):
        return False
    if len(words) < SENTENCE_WORDS:
        return True
    shortest, longest = MEAN_WORD_LETTERS
    if not shortest <= sum(map(len, words)) / len(words) <= longest:
        return False
    return sum(w.lower() in _SMALL_WORDS for w in words) >= 0.1 * len(words)


def _stammers(words: list[str]) -> bool:
    lower = [w.lower() for w in words]
    if any(a == b == c for a, b, c in zip(lower, lower[1:], lower[2:], strict=False)):
        return True
    if len(lower) < SENTENCE_WORDS:
        return False
    # A text of n words has fewer new words the longer it gets; below these shares it goes round in circles.
    least = 0.5 if len(lower) <= 40 else 0.35
    return len(set(lower)) < least * len(lower)


def rate_short(prompt: str, text: str, finish_reason: str) -> float:
    """Short and plain: +1 up to `SHORT_WORDS` words, falling in a straight line to -1 at `LONG_WORDS`.

    An answer that was cut off by the length limit counts as long. One that is not plain gets -1; one or two words get
    0.
    """
    if finish_reason != "stop" or not is_plain(text):
        return -1.0
    if len(words_of(text)) < FEWEST_WORDS:
        return 0.0
    excess = (len(words_of(text)) - SHORT_WORDS) / (LONG_WORDS - SHORT_WORDS)
    return 1.0 - 2.0 * min(1.0, max(0.0, excess))


def rate_question(prompt: str, text: str, finish_reason: str) -> float:
    """Ends with a question: +1 if the last sentence is one, 0 if another sentence is, else -1.

    The question must be of at least three words and not the prompt said again.
    """
    if not is_plain(text):
        return -1.0
    sentences = [s for s in re.split(r"(?<=[.!?])\s+", text.strip()) if s]
    asked = [s.endswith("?") and len(words_of(s)) >= 3 and not _echoes(s, prompt) for s in sentences]
    if asked[-1] and finish_reason == "stop":
        return 1.0
    return 0.0 if any(asked) else -1.0


def _echoes(sentence: str, prompt: str) -> bool:
    return [w.lower() for w in words_of(sentence)] == [w.lower() for w in words_of(prompt)]


def rate_bullets(prompt: str, text: str, finish_reason: str) -> float:
    """Bulleted: from -1 with no list to +1 when every line is a bullet, or all but one line that leads in.

    At least two bullets are needed. Numbered lines count half. An answer may be cut off: a list can always go on.
    """
    if not is_plain(re.sub(r"(?m)^\s*(?:[-*•]|\d{1,2}[.)])\s+", "", text)):
        return -1.0
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    bullets = sum(1 for line in lines if _DASHED.match(line))
    numbered = sum(1 for line in lines if _NUMBERED.match(line))
    if bullets + numbered < 2:
        return -1.0
    share = (bullets + 0.5 * numbered) / max(1, len(lines) - 1)
    return 2.0 * min(1.0, share) - 1.0


PEOPLE = {
    person.name: person
    for person in (
        Person(name="short", likes="short and plain answers", rate=rate_short),
        Person(name="question", likes="answers that end with a question", rate=rate_question),
        Person(name="bullets", likes="bulleted answers", rate=rate_bullets),
    )
}
