"""How a key is written down: `key` and `list_key` say its default, meaning and range, and whether it is `live`; a
`Section` holds keys. No setting stands here.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


def key(default: Any, description: str, *, live: bool = False, expected: str | None = None, **limits: Any) -> Any:
    """A key of the file. `expected` replaces the wording made from type and limits in error messages."""
    return Field(default, description=description, json_schema_extra={"live": live, "expected": expected}, **limits)


def list_key(default: tuple[Any, ...], description: str, **options: Any) -> Any:
    """A key that holds a list in the file and a tuple here: only the container is lenient, items stay strict."""
    return key(default, description, strict=False, **options)


class Section(BaseModel):
    """One `[section]`: frozen, strict about types, and closed to unknown keys."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )
