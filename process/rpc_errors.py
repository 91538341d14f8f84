"""Errors that cross a process border, by what the caller can do about them.

    BatonError
      InvalidArgument(field)      permanent; the request is wrong at `field`
      Unauthenticated             permanent; the caller is unknown
      PermissionDenied            permanent; the caller is known, and may not
      NotFound                    permanent; no such model, lease, push
      AlreadyExists               permanent; this request id runs with another body
      FailedPrecondition          permanent here; another layout, model or incarnation
      NoCapacity                  retry after `retry_after_s`; nothing was done
      Unavailable                 retry after `retry_after_s`; a peer is away
      DeadlineExceeded            permanent; the request's own time is over
      Cancelled                   permanent; the caller asked for it
      Internal                    permanent; our own mistake

Packages may derive their own (a kvstore `StaleBlock`, an engine `ModelTooLarge`); `process.rpc`
is the one place that turns them into gRPC status codes and back.
"""

from __future__ import annotations


class BatonError(Exception):
    """Base class of the errors that cross a process border. `retry_after_s` is None when a retry
    cannot help."""

    retry_after_s: float | None = None

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s


class InvalidArgument(BatonError):
    """A field of the request is wrong. The message begins with the field's name."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem

    def renamed(self, field: str) -> InvalidArgument:
        """The same error under the name that the field has in another interface."""
        error = type(self).__new__(type(self))
        error.__dict__.update(self.__dict__)
        InvalidArgument.__init__(error, field, self.problem)
        return error


class Unauthenticated(BatonError):
    """The caller showed no valid key."""


class PermissionDenied(BatonError):
    """The caller is known, and may not make this call."""


class NotFound(BatonError):
    """The model, lease, push or other thing that a call names does not exist (any more)."""


class AlreadyExists(BatonError):
    """The request id is in flight with another body."""


class FailedPrecondition(BatonError):
    """The two sides do not fit: layout, model, incarnation or order of calls."""


class NoCapacity(BatonError):
    """There is no room for the request now. Nothing was done."""

    retry_after_s = 1.0


class Unavailable(BatonError):
    """A peer (a worker, store or Redis) is away or is stopping."""

    retry_after_s = 1.0


class DeadlineExceeded(BatonError):
    """The time limit of the request itself has passed."""


class Cancelled(BatonError):
    """The caller cancelled the request."""


class Internal(BatonError):
    """A mistake of this program, not of its caller."""
