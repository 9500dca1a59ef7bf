"""The one exception for "no": a request that the daemon understands and will not grant.

It carries everything that an answer over HTTP shows, so that any part may raise it and only the API formats it.
Faults of the daemon itself are never a `Refused`.
"""

from __future__ import annotations


class Refused(Exception):
    """A request that cannot be granted.

    Args:
        status: HTTP status: 400, 401, 403, 404, 405, 408, 409, 413, 429, 431 or 503; 500 is the API's word for a fault.
        code: stable word for programs (`completion_not_found`, `live_changed`, ...).
        message: for people: the object, what is wrong, what to do.
        param: the field at fault, if there is one.
        retry_after_s: when to come back; set on 429 and 503.
    """

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class Inability(Exception):
    """A failure of the daemon's surroundings, such as a full disk, that a caller can only wait out.

    `refused` is what the caller is told. It is not a `Refused` itself, so that no part takes it for a "no" to its own
    request.
    """

    def __init__(self, message: str, *, code: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.refused = Refused(503, code, message, retry_after_s=retry_after_s)


def refusal_of(error: Exception) -> Refused | None:
    """What a caller is told of `error`; None for a fault of the daemon, of which only the log tells."""
    match error:
        case Refused():
            return error
        case Inability():
            return error.refused
        case _:
            return None
