"""Who may: callers and scopes, and the checks that keep foreign web pages out.

- A Unix socket is guarded by its file mode; the caller is the peer's user id and has every scope.
- Loopback TCP takes anybody as long as no key exists; from then on, and always on other addresses, a caller is an API
  key with its scopes.
- A browser can be made to talk to a TCP port of its own machine. `Doorkeeper` refuses names that an attacker could
  point at this machine (DNS rebinding) and requests that another site's page sends.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from typing import Protocol
from urllib.parse import urlsplit

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from edged.api.peer import peer_of
from edged.api.ports import KeyRing
from edged.records import Caller, Scope
from edged.refusal import Refused

ALL_SCOPES: frozenset[Scope] = frozenset({"infer", "feedback", "admin"})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Access:
    """Finds the caller of a request and checks its scopes."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    def require(self, scope: Scope | None) -> Callable[[Request], Caller]:
        """A dependency: the caller, who must hold `scope` (None: any valid caller). Raises Refused 401, 403."""

        def check(request: Request) -> Caller:
            caller = self.caller(request)
            if scope is not None:
                check_scope(caller, scope)
            return caller

        return check

    def caller(self, request: Request) -> Caller:
        """Who asks. Raises Refused 401."""
        peer = peer_of(request.scope)
        if peer.listener == "unix":
            return Caller(name=f"uid:{peer.uid}", scopes=ALL_SCOPES)
        if peer.listener == "loopback" and not self._keys.any_keys():
            return Caller(name="loopback", scopes=ALL_SCOPES)
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise Refused(401, "missing_api_key", "an API key is needed: send `Authorization: Bearer KEY`")
        key = self._keys.check(secret.strip())
        if key is None:
            raise Refused(401, "invalid_api_key", "this API key is not valid here, or was revoked")
        return Caller(name=f"key:{key.name}", scopes=key.scopes)


def check_scope(caller: Caller, scope: Scope) -> None:
    """Raises Refused 403 unless the caller holds `scope`."""
    if scope not in caller.scopes:
        raise Refused(
            403,
            "missing_scope",
            f"{caller.name} lacks the scope {scope!r}; make a key that has it with `edged keys create`",
        )


class DoorSettings(Protocol):
    """What the doorkeeper reads of `[api]`."""

    @property
    def allowed_hosts(self) -> Iterable[str]: ...


class Doorkeeper:
    """A layer that checks `Host`, `Origin` and `Sec-Fetch-Site` of every request over TCP."""

    def __init__(self, app: ASGIApp, settings: DoorSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and peer_of(scope).listener != "unix":
            headers = Headers(scope=scope)
            check_host(headers.get("host", ""), self._settings.allowed_hosts)
            check_origin(scope["method"], headers)
        await self._app(scope, receive, send)


def check_host(host: str, allowed: Iterable[str]) -> None:
    """Refuse a name that could be rebound: IP addresses cannot, `localhost` is ours, others must be listed.

    Raises Refused 403.
    """
    name = _split(f"//{host}")[0]
    if name == "localhost" or name.endswith(".localhost") or name in {item.lower() for item in allowed}:
        return
    try:
        ipaddress.ip_address(name)
    except ValueError:
        raise Refused(
            403, "host_not_allowed", f"Host {host!r} is not served here; add it to [api] allowed_hosts if it should be"
        ) from None


def check_origin(method: str, headers: Headers) -> None:
    """Refuse what a page of another origin sends. Raises Refused 403."""
    origin = headers.get("origin")
    if origin is not None and not _same_place(origin, headers.get("host", "")):
        raise Refused(403, "origin_not_allowed", f"a page of {origin!r} may not use this server")
    site = headers.get("sec-fetch-site", "same-origin")
    if method not in SAFE_METHODS and site not in ("same-origin", "none"):
        raise Refused(403, "origin_not_allowed", "a page of another site may not use this server")


def _same_place(origin: str, host: str) -> bool:
    scheme = origin.partition(":")[0]
    default = _DEFAULT_PORTS.get(scheme)
    if default is None:
        return False  # "null", extensions, files
    origin_name, origin_port = _split(origin)
    host_name, host_port = _split(f"//{host}")
    return bool(host_name) and (origin_name, origin_port or default) == (host_name, host_port or default)


def _split(url: str) -> tuple[str, int | None]:
    """Name (lower case, "" if there is none) and port of the authority in `url`."""
    try:
        parts = urlsplit(url)
        return (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        return "", None
