"""Errors of the client, below InferScaleError.

    InferScaleError
    ├── ConnectionFailed              no answer, or one that broke off
    └── ApiError                      the server answered with an error
        ├── AuthenticationError       401: no API key, or one that the server does not know
        ├── PermissionDenied          403: this key may not do that
        ├── NotFound                  404: no such memory or model, or a server without the memory API
        ├── BadRequest                any other 4xx: the request cannot be used
        ├── ServerError               5xx
        └── UnexpectedAnswer          a status or a body that is not the memory API's

Arguments that cannot be sent raise `inferscale.errors.InvalidInput` before anything is sent.
"""

from __future__ import annotations

from inferscale.errors import InferScaleError


class ConnectionFailed(InferScaleError):
    """The server could not be reached, or its answer broke off. A change may have been made or not."""


class ApiError(InferScaleError):
    """The server answered with an error.

    `message` is the server's own text; str() of the error adds the status and what to do. `type`, `code` and
    `param` are OpenAI's, where the server gave them.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        type: str | None = None,
        code: str | int | None = None,
        param: str | None = None,
        advice: str = "",
    ) -> None:
        super().__init__(f"{message} (HTTP {status}){'. ' if advice else ''}{advice}")
        self.message = message
        self.status = status
        self.type = type
        self.code = code
        self.param = param


class AuthenticationError(ApiError):
    """No API key was given, or the server does not know it."""


class PermissionDenied(ApiError):
    """The API key may not do this."""


class NotFound(ApiError):
    """There is no such memory or model, or the server has no memory API."""


class BadRequest(ApiError):
    """The server cannot use the request; the message says why."""


class ServerError(ApiError):
    """The server failed, or cannot answer now."""


class UnexpectedAnswer(ApiError):
    """What answered does not speak the memory API, or a version of it that this client does not know."""
