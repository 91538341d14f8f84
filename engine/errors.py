"""Errors of the engine, by what the caller can do about them.

EngineError(BatonError)
  NoBlocks(NoCapacity)             retry later; nothing was taken
  InvalidRequest(InvalidArgument)  permanent; a field is wrong
    RequestTooLong                 ... beyond the window, or more blocks than there are
  UnknownRequest(NotFound)         no live request has this id
  DuplicateRequest(AlreadyExists)  a live request has this id
  WrongState(FailedPrecondition)   the call does not fit the request's state or its blocks
  InvalidLogits(Internal)          NaN, +inf or an empty support: ends that request only
  LoadError                        the engine cannot start; one line: what, and how to fix it
    ModelNotSupported              ... this model type
    TooFewBlocks                   ... no room for one full context window
  IntegrityError(Internal)         a conservation law is broken: our own mistake
"""

from __future__ import annotations

from process.errors import (
    AlreadyExists,
    BatonError,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NoCapacity,
    NotFound,
)


class EngineError(BatonError):
    """Root of the engine's errors."""


class NoBlocks(EngineError, NoCapacity):
    """Not enough free blocks now. Nothing was taken."""


class InvalidRequest(InvalidArgument, EngineError):
    """A field of the request is wrong; the message begins with its name."""


class RequestTooLong(InvalidRequest):
    """The prompt leaves no room for output in the context window: it could never run."""


class UnknownRequest(EngineError, NotFound):
    """No live request has this id (never reserved, finished, or aborted)."""


class DuplicateRequest(EngineError, AlreadyExists):
    """A live request has this id."""


class WrongState(EngineError, FailedPrecondition):
    """The call does not fit the request's state or its blocks."""


class InvalidLogits(EngineError, Internal):
    """The model's logits for one request hold NaN or +inf, or no token is left to draw."""


class LoadError(EngineError):
    """The engine cannot start. The message is one line that says what is wrong and how to fix
    it."""


class ModelNotSupported(LoadError):
    """A model type, or a property of a model, that this engine would compute wrongly."""


class TooFewBlocks(LoadError):
    """The KV cache could not hold one request that fills the context window."""


class IntegrityError(EngineError, Internal):
    """A conservation law does not hold."""
