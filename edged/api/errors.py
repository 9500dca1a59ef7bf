"""Errors in OpenAI's shape, made in one place.

`Errors` is the outermost layer of the application: every `Refused` becomes the answer it describes, and every other
exception is logged and becomes a 500 without details. Nothing below it formats an error, but for streams whose first
bytes are already out (see `edged.api.streaming`). Validation mistakes are 400 with `param`; 422 does not exist here.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edged.refusal import Refused, refusal_of

logger = logging.getLogger(__name__)

INTERNAL = Refused(500, "internal_error", "the server failed at this request; its log says why")

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# A mistake that pydantic found -> the code that OpenAI gives it; other mistakes are `invalid_value`.
_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "json_invalid": "invalid_json",
    "unsupported_parameter": "unsupported_parameter",
}
_MESSAGES = {
    "missing": "is required",
    "extra_forbidden": "is not a parameter of this request",
}


def error_body(refused: Refused) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`."""
    return {"error": error_of(refused)}


def error_of(refused: Refused) -> dict[str, Any]:
    """The inner object alone, as the batch route lists it for each bad line."""
    kind = _KINDS.get(refused.status, "server_error" if refused.status >= 500 else "invalid_request_error")
    return {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}


def error_response(refused: Refused) -> Response:
    """The whole answer, with `Retry-After` where the refusal says when to come back."""
    headers = {}
    if refused.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(refused.retry_after_s)))
    if refused.status == 401:
        headers["www-authenticate"] = "Bearer"
    content = json.dumps(error_body(refused), ensure_ascii=False).encode()
    return Response(content, refused.status, headers, "application/json")


def refused_by_validation(mistakes: Sequence[Any]) -> Refused:
    """The first of pydantic's mistakes as a 400. `mistakes`: as from `ValidationError.errors(include_input=False)`."""
    first = mistakes[0]
    kind = str(first["type"])
    param = first.get("ctx", {}).get("param") or _dotted(first["loc"])
    code = _CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    if kind == "json_invalid":
        return Refused(400, code, f"the body is not valid JSON: {first.get('ctx', {}).get('error', 'malformed')}")
    message = _MESSAGES.get(kind, str(first["msg"]).removeprefix("Value error, "))
    return Refused(400, code, f"{param or 'the body'}: {message}", param=param)


def _dotted(loc: Sequence[str | int]) -> str | None:
    """("messages", 0, "role") as "messages[0].role"; None for the body as a whole."""
    path = ""
    if loc and loc[-1] == "[key]":  # pydantic's word for the key itself, in place of its value
        loc = loc[:-1]
    for step in loc:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path or None


async def on_validation_error(request: Request, error: Exception) -> Response:
    """Bad path and query parameters: FastAPI would answer 422. (Bodies are parsed in `edged.api.bodies`.)"""
    if not isinstance(error, RequestValidationError):
        raise error
    # The first step of FastAPI's location is "path" or "query".
    mistakes = [{**mistake, "loc": tuple(mistake["loc"])[1:]} for mistake in error.errors()]
    return error_response(refused_by_validation(mistakes))


async def on_http_exception(request: Request, error: Exception) -> Response:
    """What the router itself refuses: an unknown path, or a method that a path does not have."""
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 404:
        refused = Refused(404, "not_found", f"there is nothing at {request.url.path}; see /openapi.json")
    elif error.status_code == 405:
        refused = Refused(405, "method_not_allowed", f"{request.url.path} does not take {request.method}")
    else:
        refused = Refused(error.status_code, "invalid_request", str(error.detail))
    response = error_response(refused)
    response.headers.update(error.headers or {})
    return response


class Errors:
    """The outermost layer: turns exceptions into answers, unless an answer has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            return  # nobody is left to be answered
        except Exception as error:
            if begun:
                raise  # the connection is cut: a truncated answer must not look like a whole one
            if not isinstance(error, Refused):
                logger.exception("%s %s failed", scope.get("method"), scope.get("path"))
            await error_response(refusal_of(error) or INTERNAL)(scope, receive, send)
