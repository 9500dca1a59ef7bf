"""Reads the TOML file, and tells every mistake in it at once.

`load` reads the file, lays the command line's overrides over it and checks everything before it complains, so that an
operator repairs a file in one round. What the keys are, and which of them change on SIGHUP, stands in `edged.settings`.
"""

from __future__ import annotations

import difflib
import json
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import annotated_types
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from edged.addresses import Listen, TcpListen, UnixListen, parse_listen
from edged.settings import JUDGED, Section, Settings, learns_from_judged
from engine.protocol import OBJECTIVES

__all__ = [
    "ConfigError",
    "Listen",
    "Settings",
    "TcpListen",
    "UnixListen",
    "all_keys",
    "live_changes",
    "load",
    "notes",
    "parse_listen",
    "with_live_changes",
]

_SHOWN_VALUE_CHARS = 60
BYTES_PER_TOKEN = 2  # of a prompt, or more, in most writing: a bound without the model's tokeniser
TEMPLATE_TOKENS = 64  # that a chat template puts round a prompt
# Reward source -> the key of [reward] that says where it is.
_SOURCE_NEEDS = {"function": "function", "http": "url", "classifier": "classifier"}


class ConfigError(Exception):
    """The configuration cannot be used. `problems`: one line for each mistake; the message is all of them."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


_SECTIONS: dict[str, type[Section]] = {name: type(section) for name, section in Settings()}

KTO_RATIO_MAX = 4.0 / 3.0  # as the trainer has it (`engine.train.objectives.kto`), which this process does not import


def load(path: Path | None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """The settings of the file at `path` (None: the defaults), with `overrides` (dotted key -> value) laid over them.

    Raises ConfigError with every problem: unreadable file, TOML syntax, unknown names, types, ranges, contradictions.
    """
    document: dict[str, Any] = {} if path is None else _read(path)
    for dotted, value in (overrides or {}).items():
        section, _, key = dotted.partition(".")
        table = document.get(section, {})
        if isinstance(table, dict):  # else the section itself is the problem that gets reported
            document[section] = {**table, key: value}
    return _check(document)


def notes(settings: Settings) -> list[str]:
    """What works, but hardly as it was meant: lines for people."""
    learn, found = settings.learn, []
    feeds = {OBJECTIVES[name] for name in learn.objectives}
    if "groups" in feeds and not feeds & {"rated", "thumbs"}:
        names = " and ".join(name for name in learn.objectives if OBJECTIVES[name] == "groups")
        found.append(
            f"learn.objectives: {names} learns from a rating only beside a different one of the same completion"
            " (n above 1); other ratings wait. Add ppo or kto to learn from them too"
        )
    if settings.reward.source != "feedback" and "thumbs" in feeds and not feeds & {"rated", "groups"}:
        found.append(
            "learn.objectives: kto learns in practice only from rewards of both signs; a judge whose rewards are never"
            " below 0 teaches it nothing. Have it give negative ones too, or add ppo or grpo"
        )
    ratio = learn.liked_weight / learn.disliked_weight
    if not 1.0 <= ratio <= KTO_RATIO_MAX:
        found.append(
            f"learn.liked_weight and disliked_weight: {ratio:.3g} to 1 has the effect of "
            f"{1.0 if ratio < 1.0 else KTO_RATIO_MAX:.3g} to 1, because KTO holds it within 1 and 4/3"
        )
    return found


def live_changes(old: Settings, new: Settings) -> tuple[list[str], list[str]]:
    """Dotted keys that differ: those that take effect on SIGHUP, and those that need a restart."""
    changed_live: list[str] = []
    needs_restart: list[str] = []
    for section, key, info in all_keys():
        if getattr(getattr(old, section), key) != getattr(getattr(new, section), key):
            (changed_live if _extra(info, "live") else needs_restart).append(f"{section}.{key}")
    return changed_live, needs_restart


def with_live_changes(old: Settings, new: Settings) -> Settings:
    """`old` with the live keys of `new`: what is in force after a SIGHUP."""
    changed, _ = live_changes(old, new)
    sections = dict(old)
    for dotted in changed:
        section, _, key = dotted.partition(".")
        value = getattr(getattr(new, section), key)
        sections[section] = sections[section].model_copy(update={key: value})
    return old.model_copy(update=sections)


def all_keys() -> list[tuple[str, str, FieldInfo]]:
    """Every key of the file in order: section, key, and its field with default and description."""
    return [(name, key, info) for name, cls in _SECTIONS.items() for key, info in cls.model_fields.items()]


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError([f"{path}: line {line} is not UTF-8 text"]) from error
    except ValueError as error:  # a TOMLDecodeError, which names the line, or a number of thousands of digits
        raise ConfigError([f"{path}: not valid TOML: {error}"]) from error
    except RecursionError as error:
        raise ConfigError([f"{path}: not usable: values are nested too deeply"]) from error


def _check(document: dict[str, Any]) -> Settings:
    problems: list[str] = []
    faulty: set[str] = set()
    sections: dict[str, Section] = {}
    for name in document.keys() - _SECTIONS.keys():
        problems.append(f"{name}: got an unknown section, expected one of {', '.join(_SECTIONS)}{_hint(name, '')}")
    for name, cls in _SECTIONS.items():
        table = document.get(name, {})
        if not isinstance(table, dict):
            problems.append(f"{name}: got {_shown(table)}, expected a section [{name}]")
            table = {}
        sections[name], found = _check_section(name, cls, table)
        for key, lines in found.items():
            faulty.add(f"{name}.{key}")
            problems += lines
    # Faulty keys stand at their defaults, so that the rest can be judged too.
    settings = Settings.model_validate(sections)
    problems += [line for involved, line in _contradictions(settings) if not involved & faulty]
    if problems:
        raise ConfigError(sorted(problems))
    return settings


def _check_section(name: str, cls: type[Section], table: dict[str, Any]) -> tuple[Section, dict[str, list[str]]]:
    """The section with faulty keys left at their defaults, and the problems of each faulty key."""
    try:
        return cls.model_validate(table), {}
    except ValidationError as error:
        problems: dict[str, list[str]] = {}
        for detail in error.errors(include_url=False):
            key = str(detail["loc"][0])
            info = cls.model_fields.get(key)
            lines = problems.setdefault(key, [])
            if info is None:
                lines.append(f"{name}.{key}: got an unknown key, expected a key of [{name}]{_hint(key, name)}")
            elif detail["type"] == "value_error":  # a value, or an item of a list, judged by a function of its own
                item = f"{name}.{key}" + "".join(f"[{index}]" for index in detail["loc"][1:])
                lines.append(f"{item}: got {_shown(detail['input'])}, expected {detail['ctx']['error']}")
            elif not lines:  # a union reports once for each of its types
                lines.append(f"{name}.{key}: got {_shown(table[key])}, expected {_expected(info)}")
        return cls.model_validate({key: value for key, value in table.items() if key not in problems}), problems


def _contradictions(settings: Settings) -> list[tuple[set[str], str]]:
    """Pairs of keys that cannot both hold: the keys involved, and the line to show."""
    found: list[tuple[set[str], str]] = []

    def at_most(small: str, large: str, why: str) -> None:
        low, high = (operand(settings, dotted) for dotted in (small, large))
        if low > high:
            found.append(({small, large}, f"{small}: got {_shown(low)}, expected <= {large} ({_shown(high)}): {why}"))

    def operand(settings: Settings, dotted: str) -> float:
        if dotted == "serve.context_tokens":  # where 0 stands for a number
            return settings.serve.pool_tokens
        section, _, key = dotted.partition(".")
        return typing.cast(float, getattr(getattr(settings, section), key))

    at_most("learn.batch_ratings", "learn.max_batch", "the new ratings of an update must fit into it")
    at_most("learn.live_kl_max", "gate.live_kl_max", "the gate would refuse updates that the trainer allows")
    at_most("serve.default_max_tokens", "serve.context_tokens", "an answer must fit into the context")
    at_most("practice.max_tokens", "serve.context_tokens", "an answer must fit into the context")
    at_most("practice.group_size", "learn.max_batch", "a group must fit into an update")
    gate, pool = settings.gate, settings.serve.pool_tokens
    prompt_tokens = max(len(prompt.encode()) for prompt in gate.fluency_prompts) // BYTES_PER_TOKEN + TEMPLATE_TOKENS
    if prompt_tokens + gate.fluency_tokens > pool:
        keys = {"gate.fluency_tokens", "gate.fluency_prompts", "serve.context_tokens"}
        line = f"gate.fluency_tokens: got {gate.fluency_tokens}, expected <= {max(0, pool - prompt_tokens)} beside "
        line += (
            f"serve.context_tokens ({pool}): the longest of gate.fluency_prompts, {prompt_tokens} tokens or so, and "
        )
        found.append((keys, line + "its answer must fit into the context; ask for fewer, shorten it or enlarge that"))
    if settings.learn.kl_target > 0 and settings.learn.kl_coef == 0:
        line = f"learn.kl_coef: got 0, expected > 0 beside learn.kl_target ({_shown(settings.learn.kl_target)}): "
        found.append(({"learn.kl_coef", "learn.kl_target"}, line + "0 stays 0 however it is multiplied; begin at 0.1"))
    serve = settings.serve
    if serve.backend == "remote" and not serve.url:
        line = 'serve.url: got "", expected the URL of a server: serve.backend is "remote"'
        found.append(({"serve.backend", "serve.url"}, line))
    if serve.url and serve.backend not in ("auto", "remote"):
        line = f'serve.url: got {_shown(serve.url)}, expected "": serve.backend is "{serve.backend}"'
        found.append(({"serve.backend", "serve.url"}, line))
    source = settings.reward.source
    if source in _SOURCE_NEEDS and not getattr(settings.reward, needed := _SOURCE_NEEDS[source]):
        keys = {"reward.source", f"reward.{needed}"}
        found.append((keys, f'reward.{needed}: got "", expected a value: reward.source is "{source}"'))
    if source != "feedback" and not learns_from_judged(settings.learn.objectives):
        names, judged = ", ".join(settings.learn.objectives), ", ".join(JUDGED)
        line = f"learn.objectives: got {names}, expected one of {judged} among them: "
        found.append(({"learn.objectives", "reward.source"}, line + f'reward.source is "{source}"'))
    for pins, device in (("serve", "serve_device"), ("actor", "train_device")):
        pinned, named = getattr(settings.placement, pins), getattr(settings.placement, device)
        if pinned and named != "auto":
            keys = {f"placement.{pins}", f"placement.{device}"}
            line = f"placement.{pins}: got {_shown(pinned)}, expected [] beside placement.{device} ({_shown(named)}): "
            found.append((keys, line + "one of them says where"))
    for repeated in {str(address) for address in settings.api.listen if settings.api.listen.count(address) > 1}:
        if not repeated.endswith(":0"):
            found.append(({"api.listen"}, f"api.listen: got {_shown(repeated)} twice, expected different addresses"))
    return found


def _expected(info: FieldInfo) -> str:
    wording = _extra(info, "expected") or _type_wording(info.annotation)
    limits = []
    for limit in info.metadata:
        match limit:
            case annotated_types.Ge(ge=bound):
                limits.append(f">= {bound}")
            case annotated_types.Gt(gt=bound):
                limits.append(f"> {bound}")
            case annotated_types.Le(le=bound):
                limits.append(f"<= {bound}")
            case annotated_types.Lt(lt=bound):
                limits.append(f"< {bound}")
            case annotated_types.MinLen():
                limits.append("that is not empty")
            case annotated_types.MaxLen(max_length=bound):
                limits.append(f"of at most {bound} characters")
    return f"{wording} {' and '.join(limits)}".strip()


def _type_wording(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return "one of " + ", ".join(f'"{value}"' for value in typing.get_args(annotation))
    if origin is tuple:
        return "a list of texts"
    assert not isinstance(annotation, types.UnionType), "unions need their own `expected`"
    wordings = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    return wordings[annotation]


def _extra(info: FieldInfo, name: str) -> Any:
    assert isinstance(info.json_schema_extra, dict)
    return info.json_schema_extra[name]


def _hint(name: str, section: str) -> str:
    """What an unknown section (`section` == "") or key may have been meant to be."""
    known = list(_SECTIONS[section].model_fields) if section else list(_SECTIONS)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {section + '.' if section else ''}{close[0]}?"
    elsewhere = [f"{other}.{key}" for other, key, _ in all_keys() if key == name]
    return f"; did you mean {' or '.join(elsewhere)}?" if elsewhere else ""


def _shown(value: Any) -> str:
    """`value` as the file writes it, cut to a line."""
    if isinstance(value, dict):
        return "a table"
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _SHOWN_VALUE_CHARS else text[: _SHOWN_VALUE_CHARS - 3] + "..."
