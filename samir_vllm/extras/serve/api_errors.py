"""A refused request in OpenAI's shape: a status, and a JSON object that names the field to blame.

Knows the shape alone: neither HTTP libraries nor what was wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """A request that gets an error for an answer.

    Args:
        status: HTTP status, 400 to 599.
        message: one line with cause and remedy.
        type: OpenAI's kind of error, such as ``invalid_request_error``.
        param: the field to blame, as a path such as ``messages[0].content``; None: no single one.
        code: a word for programs, such as ``model_not_found``.
        headers: HTTP headers to go with it, such as ``Retry-After``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers) if headers else None

    def __reduce__(self) -> tuple[Any, ...]:
        given = (self.status, self.message, self.type, self.param, self.code, self.headers)
        return ApiError, given  # Exception's own would call us with the message alone

    def body(self) -> dict[str, dict[str, str | None]]:
        """``{"error": {"message", "type", "param", "code"}}``; every string of it can be written as UTF-8."""
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": {key: value and _encodable(value) for key, value in fields.items()}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Status 400: the request itself is wrong."""
    return ApiError(400, message, param=param, code=code)


def model_not_found(message: str) -> ApiError:
    """Status 404: the request asks for a model that isn't served."""
    return ApiError(404, message, param="model", code="model_not_found")


def _encodable(text: str) -> str:
    """The text with lone surrogates, which a field's name may hold, spelt out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
