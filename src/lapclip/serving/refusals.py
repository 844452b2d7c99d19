"""Why a request is not answered: what went wrong, the HTTP status, and what the caller can do.

A dialect turns a refusal into its own error form (`Dialect.error` in `dialects/__init__.py`).
"""

from __future__ import annotations

from lapclip.errors import LapclipError


class Refusal(LapclipError):
    """A request that is not answered, with the reason."""

    status = 400
    code = "invalid_request"
    """A short name for programs."""
    retry_after: float | None = None
    """Seconds after which the same request may succeed."""

    def __init__(
        self, message: str, *, position: int | None = None, field: str | None = None, hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.position, self.field = position, field

    @property
    def reason(self) -> str:
        """The message as one line, with the position of the item it is about."""
        where = "" if self.position is None else f"Item {self.position}: "
        return f"{where}{self.message}" + (f" Try: {self.hint}" if self.hint else "")


class BadItem(Refusal):
    """An image or a text that cannot be embedded; `position` counts from 0."""

    code = "invalid_input"


class Unsupported(Refusal):
    """A field, an option or a value that is known and cannot be had here."""

    code = "unsupported"


class NoKey(Refusal):
    """The API key is missing or wrong."""

    status = 401
    code = "invalid_api_key"


class Forbidden(Refusal):
    """A name or an origin that this server does not answer to."""

    status = 403
    code = "forbidden"


class Unknown(Refusal):
    """A path, a model or an image that is not there."""

    status = 404
    code = "not_found"


class Late(Refusal):
    """A request that was not sent in time."""

    status = 408
    code = "request_timeout"


class WrongModel(Refusal):
    """The caller demanded the vectors of another model."""

    status = 409
    code = "wrong_model"


class TooLarge(Refusal):
    """More bytes, pixels or items than are taken at once."""

    status = 413
    code = "too_large"


class TooMany(Refusal):
    """The queue is full: nothing was done for this request."""

    status = 429
    code = "too_many_requests"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(Refusal):
    """The server ends, is not ready, or could not answer in time."""

    status = 503
    code = "unavailable"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Fault(Refusal):
    """The engine failed on what should have worked: a fault of the model or of ours."""

    status = 500
    code = "internal_error"


class BadUpstream(Refusal):
    """The server that this one passes some requests on to did not answer them."""

    status = 502
    code = "bad_upstream"
