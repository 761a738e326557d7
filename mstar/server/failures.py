"""Failures as clients see them: status, OpenAI's error object, and nothing of our insides."""

import msgspec

from mstar.engine.output import ErrorInfo

MAX_MESSAGE_LEN = 1000

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_implemented",
    503: "service_unavailable",
}
_CODES = {
    400: "invalid_value",
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "server_busy",
    500: "internal_error",
    503: "unavailable",
}


class ApiError(Exception):
    """A failure of one HTTP request.

    Args:
        status: HTTP status.
        message: A sentence for the user.
        code: A stable slug; ``None`` takes the status's own.
        param: The field at fault, as the user wrote it.
        retry_after: Seconds after which trying again makes sense.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = ErrorInfo(
            clip(message, MAX_MESSAGE_LEN), code or _CODES.get(status, "error"), param
        )
        self.retry_after = retry_after

    @classmethod
    def of(cls, status: int, error: ErrorInfo) -> "ApiError":
        """Return the failure that another process reported."""
        return cls(status, error.message, code=error.code, param=error.param)

    @property
    def headers(self) -> dict[str, str]:
        """Headers that go with the answer."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    def body(self) -> bytes:
        """Return the JSON body of the answer."""
        error = {
            "message": self.error.message,
            "type": _TYPES.get(self.status, "invalid_request_error"),
            "param": None if self.error.param is None else clip(self.error.param, 200),
            "code": self.error.code,
        }
        return msgspec.json.encode({"error": error})


def clip(text: str, length: int) -> str:
    """Return ``text``, cut to ``length`` characters, printable and encodable.

    >>> clip("abcdef", 4)
    'abc…'
    """
    text = text if len(text) <= length else text[: length - 1] + "…"
    return text.encode("utf-8", "replace").decode("utf-8")
