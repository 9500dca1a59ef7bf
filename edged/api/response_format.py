"""OpenAI's `response_format`: what the text of an answer is held to. Pure.

Whether a schema can be held is decided where it is turned into a grammar, in the serve worker: it refuses one that it
cannot with 400 `bad_response_format` and names the part.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from edged.api.bodies import Body, mistake

_ANY_OBJECT = '{"type":"object"}'


class JsonSchema(Body):
    """`json_schema`: the schema and its name. `strict` makes no difference, since every schema is held to."""

    model_config = ConfigDict(validate_by_name=False)

    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Annotated[str, StringConstraints(max_length=4096)] | None = None
    content: dict[str, Any] = Field(alias="schema", default_factory=dict)
    strict: bool | None = None


class ResponseFormat(Body):
    """`{"type": "text"}`, `{"type": "json_object"}`, or `{"type": "json_schema", "json_schema": {...}}`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise mistake("json_schema goes with type 'json_schema', and that with json_schema")
        return self

    @property
    def schema_text(self) -> str | None:
        """The JSON schema, as JSON, that the answer is held to; None for any text."""
        if self.json_schema is not None:
            return json.dumps(self.json_schema.content, ensure_ascii=False, separators=(",", ":"))
        return _ANY_OBJECT if self.type == "json_object" else None
