"""What goes along with a gRPC status, in the details of `google.rpc.Status`: which field is wrong,
and when to come again. Knows no status codes; pure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from process import errors

MAX_RETRY_AFTER_S = 3600.0
"""Longest pause that anybody here asks for; a message that says more was spoiled."""

_KEY = "grpc-status-details-bin"


def status(code: int, message: str, error: BaseException) -> status_pb2.Status:
    """The status of `error` with its details; `code` as in google.rpc.Code."""
    details = []
    if isinstance(error, errors.InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=str(error)
        )
        details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    if isinstance(error, errors.BatonError) and error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status_pb2.Status(code=code, message=message, details=details)


def read(trailers: Iterable[tuple[str, Any]]) -> tuple[str | None, float | None]:
    """The wrong field and the seconds to wait that a call's trailing metadata tell of. Details that
    cannot be read, or cannot be right, are passed over: the status itself says what is wrong."""
    field: str | None = None
    retry_after_s: float | None = None
    bad_request, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    with contextlib.suppress(DecodeError):
        for detail in _details(trailers):
            if detail.Unpack(bad_request) and bad_request.field_violations:
                field = bad_request.field_violations[0].field
            elif detail.Unpack(retry):
                told_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
                retry_after_s = told_s if 0 <= told_s <= MAX_RETRY_AFTER_S else None
    return field, retry_after_s


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _details(trailers: Iterable[tuple[str, Any]]) -> Iterable[any_pb2.Any]:
    for key, value in trailers:
        if key == _KEY:
            return status_pb2.Status.FromString(value).details  # type: ignore[no-any-return]
    return ()
