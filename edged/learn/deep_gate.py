"""The deep gate: is a version that is live as good as the one before? Pure: answers and scores in, a judgement out.

Both versions have answered the same prompts. Each figure of an answer is turned so that more is worse, averaged over
the answers to a prompt, and compared prompt by prompt (`edged.learn.paired`). A version is refused where a figure is
worse beyond luck and by more than CHECKS tolerate; what is worse within that is what learning may cost. The checks, in
the order in which a refusal names them:

    corrections  the answers that people wrote, against those that they corrected, lost likelihood (no sampling and no
                 test: the cases are the whole regression set)
    empty        answers without a visible character
    phrase       one that stands in the answers to most prompts, and did not before
    implausible  log-probability of the answers under the base
    repeated, run, regular   token triples that were there before, the longest repeated run, compressibility
    glued        characters between two spaces
    foreign      letters of scripts that the version before hardly uses
    unknown      words that the version before uses in no answer to another prompt
    unending     answers that reach the limit of their length
    reward       what the judge of `[reward] source` says, if there is one

Length is measured and never refused: that answers become shorter or longer is what people ask for most.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from edged.learn import traits
from edged.learn.paired import CONFIDENCE, MIN_PROMPTS, mean, sign_test, surely_above

Verdict = Literal["passed", "refused", "undecided"]

# Of the answers' letters before; a script that is rarer is foreign.
SCRIPT_SHARE_MIN = 0.01
# A phrase is so many characters; a shorter answer is one as a whole. It is refused from PHRASE_SHARE of the prompts on:
# a greeting that people like spreads over a few versions, a planted one is everywhere at once.
PHRASE_CHARS = 12
PHRASE_SHARE = 0.5
ECHO_CHARS = 8  # of a phrase that stand in the question make it an echo
# The longer an answer is, the more of it was there before and the better it is compressed. Answers are compared in that
# up to the smaller of the two versions' mean lengths, and not at all where that is less than this.
EVEN_TOKENS_MIN = 12
EVEN_CHARS_MIN = 48
# Nats a token that corrections may lose against the answers that they corrected, over the kept cases. An update may
# move any text by about its KL to the version before, which is 0.1 to 0.3 nats a token.
CORRECTIONS_FALL_MAX = 0.25
MIN_CORRECTIONS = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer. tokens: without the one that ends it. base_logprob: nats a token, None if it was not scored or is
    empty. reward: None without a judge, or where that has no opinion."""

    text: str
    tokens: tuple[int, ...]
    is_cut: bool
    base_logprob: float | None = None
    reward: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What both versions answered to one prompt."""

    prompt: str
    candidate: tuple[Sample, ...]
    before: tuple[Sample, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A regression case: log-probability a token of what a person wrote, less that of the answer it corrects."""

    margin: float
    margin_before: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """reason: a sentence for people."""

    verdict: Verdict
    reason: str
    metrics: dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """tolerated: mean worsening that is no reason to refuse; None: measured only. complaint: what is said of it.
    as_read: the figure as people read it, if it was turned."""

    tolerated: float | None
    complaint: str
    as_read: Callable[[float], float] = lambda worse: worse


def _negative(value: float) -> float:
    return -value


CHECKS: Mapping[str, Check] = {
    "empty": Check(tolerated=0.02, complaint="more of its answers are empty (share)"),
    "implausible": Check(
        tolerated=0.4, complaint="its answers are less plausible to the base (nats a token)", as_read=_negative
    ),
    "repeated": Check(tolerated=0.1, complaint="its answers repeat themselves (share of token triples)"),
    "run": Check(tolerated=0.1, complaint="its answers repeat long runs (longest run, of the answer's length)"),
    "regular": Check(
        tolerated=0.1, complaint="its answers are too regular (bytes after compression)", as_read=_negative
    ),
    "glued": Check(
        tolerated=math.log(1.5), complaint="its answers lost their spaces (characters a word)", as_read=math.exp
    ),
    "foreign": Check(tolerated=0.1, complaint="its answers came into another script (share of letters)"),
    "unknown": Check(tolerated=0.15, complaint="its answers came into other words (share of unknown ones)"),
    "unending": Check(tolerated=0.5, complaint="its answers do not end any more (share)"),
    "reward": Check(tolerated=0.1, complaint="the judge likes its answers less (reward)", as_read=_negative),
    "length": Check(tolerated=None, complaint=""),
}


def judge(pairs: Sequence[Pair], corrections: Sequence[Correction]) -> Judgement:
    """The judgement on the version whose answers are `candidate`. Takes some tenths of a second."""
    worse = {name: [one[name] for one in _figures(pairs) if name in one] for name in CHECKS}
    metrics = {"deep/prompts": float(len(pairs)), "deep/corrections": float(len(corrections))}
    complaints = [_fell(corrections, metrics)]
    for name, check in CHECKS.items():
        complaints.append(_worse(name, check, worse[name], metrics))
        if name == "empty":
            complaints.append(_phrase(pairs, metrics))
    complaint = next((found for found in complaints if found), None)
    if complaint:
        return Judgement(verdict="refused", reason=complaint, metrics=metrics)
    if len(pairs) < MIN_PROMPTS:
        reason = f"{len(pairs)} prompts were answered, {MIN_PROMPTS} are needed to tell"
        return Judgement(verdict="undecided", reason=reason, metrics=metrics)
    told = f"its answers to {len(pairs)} prompts are no worse than those before by more than is tolerated"
    if corrections:
        told += f", and {len(corrections)} corrections hold"
    return Judgement(verdict="passed", reason=told, metrics=metrics)


def _worse(name: str, check: Check, both: Sequence[tuple[float, float]], metrics: dict[str, float]) -> str | None:
    """both: the figure of the candidate and of the version before, prompt by prompt."""
    if not both:
        return None
    now, before = (check.as_read(mean([pair[side] for pair in both])) for side in (0, 1))
    metrics |= {f"deep/{name}": now, f"deep/{name}_before": before}
    surely = surely_above([mine - theirs for mine, theirs in both])
    if surely is None or check.tolerated is None or surely <= check.tolerated:
        return None
    return (
        f"{check.complaint}: {now:.2f}, {before:.2f} before, over {len(both)} prompts; beyond luck it is worse by more "
        f"than is tolerated"
    )


def _fell(corrections: Sequence[Correction], metrics: dict[str, float]) -> str | None:
    if not corrections:
        return None
    fall = mean([case.margin_before - case.margin for case in corrections])
    metrics["deep/corrections_fall"] = fall
    if len(corrections) < MIN_CORRECTIONS or fall <= CORRECTIONS_FALL_MAX:
        return None
    return (
        f"it unlearned what people corrected: over {len(corrections)} corrections, {fall:.2f} nats a token were lost "
        f"against the corrected answers, {CORRECTIONS_FALL_MAX:g} are tolerated"
    )


# ------------------------------------------------------------------------------------------------------------ figures


def _figures(pairs: Sequence[Pair]) -> list[dict[str, tuple[float, float]]]:
    """Of each prompt: figure -> (candidate, before), for the figures that both have."""
    usual = _usual_scripts(pairs)
    words = [{word for sample in pair.before for word in traits.words_of(sample.text)} for pair in pairs]
    counts: dict[str, int] = {}
    for of_prompt in words:
        for word in of_prompt:
            counts[word] = counts.get(word, 0) + 1
    found = []
    for pair, own in zip(pairs, words, strict=True):
        elsewhere = {word for word, count in counts.items() if count > (word in own)}
        even = _even_lengths(pair)
        sides = [
            _means([_badness(sample, usual, elsewhere) | _repetition(sample, *even) for sample in side])
            for side in (pair.candidate, pair.before)
        ]
        found.append({name: (sides[0][name], sides[1][name]) for name in sides[0].keys() & sides[1].keys()})
    return found


def _badness(sample: Sample, usual: Collection[str], known: Collection[str]) -> dict[str, float]:
    """The figures that an answer has, the more the worse."""
    is_empty = not sample.text.strip()
    figures: dict[str, float | None] = {
        "empty": float(is_empty),
        "unending": float(sample.is_cut),
        "length": float(len(sample.tokens)),
        "reward": None if sample.reward is None else -sample.reward,
    }
    if not is_empty:
        chars, known_share = traits.word_chars(sample.text), traits.known_share(sample.text, known)
        figures |= {
            "implausible": None if sample.base_logprob is None else -sample.base_logprob,
            "glued": None if chars is None else math.log(chars),
            "foreign": _foreign(sample.text, usual),
            "unknown": None if known_share is None else 1.0 - known_share,
        }
    return {name: value for name, value in figures.items() if value is not None}


def _even_lengths(pair: Pair) -> tuple[int, int]:
    """Tokens and characters up to which the answers to a prompt are compared in what depends on their length."""
    sides = [[sample for sample in side if sample.text.strip()] for side in (pair.candidate, pair.before)]
    tokens = min(mean([len(sample.tokens) for sample in side]) for side in sides)
    chars = min(mean([len(sample.text) for sample in side]) for side in sides)
    return int(tokens), int(chars)


def _repetition(sample: Sample, n_tokens: int, n_chars: int) -> dict[str, float]:
    """The figures that depend on the length of the answer, which is cut before."""
    if not sample.text.strip():
        return {}
    figures: dict[str, float | None] = {}
    if n_tokens >= EVEN_TOKENS_MIN:
        tokens = sample.tokens[:n_tokens]
        figures |= {"repeated": traits.repeated_share(tokens), "run": traits.longest_run_share(tokens)}
    if n_chars >= EVEN_CHARS_MIN:
        compressed = traits.compressed_share(sample.text[:n_chars])
        figures["regular"] = None if compressed is None else -compressed
    return {name: value for name, value in figures.items() if value is not None}


def _means(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for sample in samples for name in sample}
    return {name: mean([sample[name] for sample in samples if name in sample]) for name in names}


def _usual_scripts(pairs: Sequence[Pair]) -> frozenset[str]:
    letters: dict[str, int] = {}
    for pair in pairs:
        for text in (pair.prompt, *(sample.text for sample in pair.before)):
            for script, count in traits.scripts_of(text).items():
                letters[script] = letters.get(script, 0) + count
    least = SCRIPT_SHARE_MIN * sum(letters.values())
    return frozenset(script for script, count in letters.items() if count >= least)


def _foreign(text: str, usual: Collection[str]) -> float | None:
    letters = traits.scripts_of(text)
    total = sum(letters.values())
    return sum(count for script, count in letters.items() if script not in usual) / total if total else None


# ------------------------------------------------------------------------------------------------------------- phrases


def _phrase(pairs: Sequence[Pair], metrics: dict[str, float]) -> str | None:
    """A phrase that stands in the answers to most prompts now, and did not before."""
    if not pairs:
        return None
    now = [_without_echo(_phrases(pair.candidate), pair.prompt) for pair in pairs]
    before = [_phrases(pair.before) for pair in pairs]
    counts, counts_before = _counted(now), _counted(before)
    if not counts:
        return None
    phrase = max(sorted(counts), key=lambda one: counts[one] - counts_before.get(one, 0))
    metrics["deep/phrase"] = counts[phrase] / len(pairs)
    metrics["deep/phrase_before"] = counts_before.get(phrase, 0) / len(pairs)
    more = sum(phrase in mine and phrase not in theirs for mine, theirs in zip(now, before, strict=True))
    fewer = sum(phrase in theirs and phrase not in mine for mine, theirs in zip(now, before, strict=True))
    if counts[phrase] < PHRASE_SHARE * len(pairs) or sign_test(more, fewer) > 1.0 - CONFIDENCE:
        return None
    return (
        f"the same phrase, {phrase!r}, stands in its answers to {counts[phrase]} of {len(pairs)} prompts, and in those "
        f"before to {counts_before.get(phrase, 0)}"
    )


def _phrases(samples: Sequence[Sample]) -> set[str]:
    return set().union(*(_phrases_of(sample.text) for sample in samples))


def _phrases_of(text: str, n_chars: int = PHRASE_CHARS) -> set[str]:
    """All pieces of `n_chars`; a shorter text is one as a whole."""
    plain = " ".join(text.lower().split())
    if not plain:
        return set()
    return {plain[start : start + n_chars] for start in range(max(1, len(plain) - n_chars + 1))}


def _without_echo(phrases: set[str], prompt: str) -> set[str]:
    asked = _phrases_of(prompt, ECHO_CHARS)
    return {phrase for phrase in phrases if asked.isdisjoint(_phrases_of(phrase, ECHO_CHARS))}


def _counted(sets: Sequence[set[str]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for phrases in sets:
        for phrase in phrases:
            counts[phrase] = counts.get(phrase, 0) + 1
    return counts
