"""JSON bodies: parsed strictly by pydantic from the raw bytes, whatever content type the client names.

FastAPI's own parsing goes through `json.loads`, which takes NaN, lone surrogates and bottomless nesting, and answers
422. Here a body is parsed once, by pydantic-core, and the first mistake is a 400 that names the field.

In every body a `null` means the same as leaving the field out, as with OpenAI.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from edged.api.errors import refused_by_validation

MODEL_REF = "#/components/schemas/{model}"


class Body(BaseModel):
    """A request body: strict types, no unknown fields, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: item for name, item in value.items() if item is not None}
        return value

    @classmethod
    def of_json(cls, data: bytes) -> Self:
        """Parse. Raises Refused 400."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise refused_by_validation(error.errors(include_url=False, include_input=False)) from None


B = TypeVar("B", bound=Body)


def mistake(message: str, *, param: str | None = None) -> PydanticCustomError:
    """An error for validators to raise. `param` names the field where the place of the validator does not."""
    return PydanticCustomError("invalid_value", "{message}", {"message": message, "param": param})


def unsupported(message: str, *, param: str | None = None) -> PydanticCustomError:
    """An error for validators to raise at what OpenAI has and this server has not. `param` as of `mistake`."""
    return PydanticCustomError("unsupported_parameter", "{message}", {"message": message, "param": param})


def json_body(model: type[B]) -> Callable[[Request], Coroutine[Any, Any, B]]:
    """A dependency that parses the request's body as `model`."""

    async def parse(request: Request) -> B:
        return model.of_json(await _read(request))

    return parse


def optional_json_body(model: type[B]) -> Callable[[Request], Coroutine[Any, Any, B]]:
    """The same, where no body at all means `{}`."""

    async def parse(request: Request) -> B:
        return model.of_json(await _read(request) or b"{}")

    return parse


async def _read(request: Request) -> bytes:
    # `request.body()` would keep the bytes beside what they are parsed to, for as long as the answer takes.
    return b"".join([piece async for piece in request.stream()])


def describe(model: type[Body], *, required: bool = True) -> dict[str, Any]:
    """The `openapi_extra` of a route with this body. `add_schemas` puts the models themselves into the document."""
    schema = {"$ref": MODEL_REF.format(model=model.__name__)}
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def add_schemas(document: dict[str, Any], models: tuple[type[Body], ...]) -> None:
    """Add the schema of every body model to an OpenAPI document."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for model in models:
        schema = model.model_json_schema(ref_template=MODEL_REF)
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
