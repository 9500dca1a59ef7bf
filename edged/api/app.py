"""Puts the API together: ports in, an ASGI application out.

From the outside in, a request passes `Errors` (makes every failure an answer), `Doorkeeper` (keeps foreign pages out),
`BodyLimits`, and then the routes, each of which names the scope that it needs. The application relies on what
`edged.api.server` puts into each request's scope: who the peer is, and whether the server is stopping.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from edged import __version__
from edged.api.access import Access, Doorkeeper
from edged.api.adapters import ChangeRequest, ImportRequest, KeepRequest, PinRequest, adapter_routes
from edged.api.asks import ChatRequest, TextRequest
from edged.api.bodies import add_schemas
from edged.api.completions import completion_routes
from edged.api.control import KeyRequest, control_routes, key_routes, probe_routes, record_routes
from edged.api.errors import Errors, on_http_exception, on_validation_error
from edged.api.feedback import BATCH_PATH, FeedbackRequest, PreferenceRequest, feedback_routes
from edged.api.limits import BodyLimits
from edged.api.page import page_routes
from edged.api.ports import Answers, CompletionBook, Control, EpisodeBook, FeedbackBook, KeyRing
from edged.api.stored import MetadataRequest, stored_routes

BODIES = (
    ChatRequest,
    TextRequest,
    MetadataRequest,
    FeedbackRequest,
    PreferenceRequest,
    ChangeRequest,
    PinRequest,
    KeepRequest,
    ImportRequest,
    KeyRequest,
)


class AppSettings(Protocol):
    """What the application reads of `[api]`, at each request: an object that follows a reload works too."""

    @property
    def max_body_bytes(self) -> int: ...
    @property
    def read_timeout_s(self) -> float: ...
    @property
    def allowed_hosts(self) -> Sequence[str]: ...


def build_app(
    *,
    answers: Answers,
    feedback: FeedbackBook,
    episodes: EpisodeBook,
    completions: CompletionBook,
    control: Control,
    keys: KeyRing,
    settings: AppSettings,
) -> FastAPI:
    """The application with every route of the contract. Nothing is started or opened."""
    access = Access(keys)
    app = FastAPI(
        title="edged",
        version=__version__,
        summary="A language model that learns from the ratings of its answers, on this machine.",
        # Their pages load scripts from a CDN, which a box without a network cannot.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a path that is none is told so, in the error shape of all others
        exception_handlers={RequestValidationError: on_validation_error, HTTPException: on_http_exception},
        middleware=[
            Middleware(Errors),
            Middleware(Doorkeeper, settings=settings),
            Middleware(BodyLimits, settings=settings, streamed_paths={BATCH_PATH}),
        ],
    )
    app.include_router(completion_routes(answers, control, access))
    app.include_router(stored_routes(completions, feedback, answers, control, access))
    app.include_router(feedback_routes(feedback, answers, access))
    app.include_router(adapter_routes(control, access))
    app.include_router(control_routes(control, access))
    app.include_router(record_routes(episodes, access))
    app.include_router(key_routes(keys, access))
    app.include_router(probe_routes(control, access))
    app.include_router(page_routes())
    _describe_bodies(app)
    return app


def _describe_bodies(app: FastAPI) -> None:
    """Make the OpenAPI document hold the bodies, which FastAPI does not parse, and no 422, which is never sent."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, summary=app.summary, routes=app.routes, tags=app.openapi_tags
            )
            add_schemas(schema, BODIES)
            for operations in schema["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
