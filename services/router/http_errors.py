"""`HttpError` and the functions that map an exception to it: status, OpenAI's error envelope, and
the headers that tell a client whether to retry. Pure.

    {"error": {"message": ..., "type": ..., "param": the field or null, "code": ...}}

The body of a failed request and the event that ends a failed stream hold the same object. An
exception that is no BatonError becomes status 500, and its text is not sent to the client.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from process import rpc_errors
from services.router.validation import ContextLengthExceeded

CLIENT_CLOSED = 499
"""Status of a request whose client closed the connection, as nginx logs it; no client reads it."""


class ModelNotFound(rpc_errors.InvalidArgument):
    """Error for a model name that the router does not serve. HTTP answers 404, as OpenAI's API
    does.
    """

    def __init__(self, problem: str) -> None:
        super().__init__("model", problem)


@dataclass(frozen=True)
class HttpError:
    """One error as an HTTP client sees it: status, envelope, retry headers."""

    status: int
    message: str
    kind: str
    """Value of `type` in the envelope."""
    code: str
    param: str | None = None
    retry_after_s: float | None = None

    def body(self) -> dict[str, Any]:
        """Return the envelope."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> Mapping[str, str]:
        """Return the headers that say whether and when to retry. OpenAI's client reads all three
        names.
        """
        if self.retry_after_s is None:
            return {"x-should-retry": "false"}
        return {
            "retry-after": str(max(1, math.ceil(self.retry_after_s))),
            "retry-after-ms": str(max(1, math.ceil(self.retry_after_s * 1000))),
            "x-should-retry": "true",
        }


# Most specific first: the first that matches decides.
_KINDS: tuple[tuple[type[rpc_errors.BatonError], int, str, str], ...] = (
    (rpc_errors.InvalidArgument, 400, "invalid_request_error", "invalid_value"),
    (rpc_errors.Unauthenticated, 401, "authentication_error", "invalid_api_key"),
    (rpc_errors.PermissionDenied, 403, "permission_error", "permission_denied"),
    (rpc_errors.NotFound, 404, "invalid_request_error", "not_found"),
    (rpc_errors.AlreadyExists, 409, "invalid_request_error", "already_exists"),
    (rpc_errors.FailedPrecondition, 409, "invalid_request_error", "failed_precondition"),
    (rpc_errors.NoCapacity, 429, "rate_limit_error", "no_capacity"),
    (rpc_errors.Unavailable, 503, "service_unavailable_error", "unavailable"),
    (rpc_errors.DeadlineExceeded, 504, "timeout_error", "deadline_exceeded"),
    (rpc_errors.Cancelled, CLIENT_CLOSED, "invalid_request_error", "cancelled"),
)


def http_error_of(error: BaseException) -> HttpError:
    """Return the HTTP error for an exception. `param` is the field as the exception names it;
    `InvalidArgument.renamed` gives it the client's name.
    """
    if isinstance(error, rpc_errors.InvalidArgument):
        if isinstance(error, ContextLengthExceeded):
            return _too_long(error)
        is_model = isinstance(error, ModelNotFound)
        return HttpError(
            404 if is_model else 400,
            str(error),
            "invalid_request_error",
            "model_not_found" if is_model else "invalid_value",
            param=error.field,
        )
    for kind, status, name, code in _KINDS:
        if isinstance(error, kind):
            return HttpError(status, str(error), name, code, retry_after_s=error.retry_after_s)
    text = f"internal error ({type(error).__name__}); see the server's log"
    return HttpError(500, text, "server_error", "internal_error")


def _too_long(error: ContextLengthExceeded) -> HttpError:
    """Return the error for a prompt that exceeds the context window, with OpenAI's text and code.
    Clients look for both, to shorten the request or to choose a model with a longer window.
    """
    num_prompt, num_output = error.num_prompt_tokens, error.num_output_tokens
    where = error.field if error.field.startswith(("messages", "input")) else "prompt"
    return HttpError(
        400,
        f"This model's maximum context length is {error.context_window} tokens. However, you "
        f"requested {num_prompt + num_output} tokens ({num_prompt} in the {where}, {num_output} "
        f"in the completion). Please reduce the length of the {where} or completion. "
        f"({error})",
        "invalid_request_error",
        "context_length_exceeded",
        param=error.field,
    )


def http_error_of_status(status: int, message: str) -> HttpError:
    """Return the error for a request that HTTP itself refuses, such as an unknown path, a wrong
    method or a body that is too large.
    """
    codes = {
        404: "not_found",
        405: "method_not_allowed",
        411: "length_required",
        413: "too_large",
        415: "unsupported_media_type",
        417: "expectation_failed",
    }
    return HttpError(status, message, "invalid_request_error", codes.get(status, "invalid_request"))
