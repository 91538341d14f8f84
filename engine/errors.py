"""Errors of the engine, by what the caller can do about them.

EngineError(BatonError)
  NoBlocks(NoCapacity)             retry later; nothing was taken
  InvalidRequest(InvalidArgument)  permanent; a field is wrong
    RequestTooLong                 ... beyond the window, or more blocks than there are
    InvalidAdapter                 ... of an adapter; the message begins with the field or file
  UnknownRequest(NotFound)         no live request has this id
  UnknownAdapter(NotFound)         no adapter of this name is loaded
  DuplicateRequest(AlreadyExists)  a live request has this id
  WrongState(FailedPrecondition)   the call does not fit the request's state or its blocks
    AdapterInUse                   ... live requests use it: finish or abort them first
  InvalidLogits(Internal)          NaN, +inf, or no finite logit at all: ends that request only
  EmptySupport(InvalidArgument)    the request's own masks left no token: ends that request only
  TooManyAdapters(NoCapacity)      no slot or no bytes left: unload an adapter first
  ParkingRefused(NoCapacity)       no room for the bytes of a swapped request: compute them again
  PolicyFailed(Internal)           the stop policy raised: ends that request only
  LoadError                        the engine cannot start; one line: what, and how to fix it
    ModelNotSupported              ... this model type
    TooFewBlocks                   ... no room for one full context window
  RankFailed(Unavailable)          a process with a part of the model is gone: the engine is over
  IntegrityError(Internal)         a conservation law is broken: our own mistake
"""

from __future__ import annotations

from typing import TypeVar

from process.rpc_errors import (
    AlreadyExists,
    BatonError,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NoCapacity,
    NotFound,
    Unavailable,
)


class EngineError(BatonError):
    """Base class of the engine's errors."""


Error = TypeVar("Error", bound=EngineError)


def fresh(error: Error) -> Error:
    """Return a copy of an error without traceback, cause or context, for an error that is stored
    and raised several times: a raised exception keeps the frames of every place where it was
    raised."""
    other = type(error).__new__(type(error), *error.args)
    other.__dict__.update(error.__dict__)
    return other


class NoBlocks(EngineError, NoCapacity):
    """Raised if there are not enough free blocks now. No block was taken."""


class InvalidRequest(InvalidArgument, EngineError):
    """Raised if a field of the request is wrong; the message begins with the field's name."""


class RequestTooLong(InvalidRequest):
    """Raised if the prompt leaves no room for output in the context window, so that the request can
    never run."""


class UnknownRequest(EngineError, NotFound):
    """Raised if no live request has this id (never reserved, finished, or aborted)."""


class DuplicateRequest(EngineError, AlreadyExists):
    """Raised if a live request has this id already."""


class WrongState(EngineError, FailedPrecondition):
    """Raised if a call does not fit the request's state or its blocks."""


class InvalidLogits(EngineError, Internal):
    """Raised if the model's logits for one request contain NaN or +inf, or are all -inf."""


class EmptySupport(InvalidArgument, EngineError):
    """Raised if the request's own processors mask every token, though the model's logits are
    finite. `processors` names them in order, with parameters."""

    def __init__(self, processors: tuple[str, ...], position: int) -> None:
        named = ", ".join(processors)
        super().__init__("sampling", f"no token is left for position {position} after {named}")
        self.processors = processors
        self.position = position


class ParkingRefused(EngineError, NoCapacity):
    """Raised if there is no room to park a preempted request's blocks. Nothing was stored."""


class PolicyFailed(EngineError, Internal):
    """Raised if the stop policy raised an exception for this request."""


class LoadError(EngineError):
    """Raised if the engine cannot start. The message is one line that says what is wrong and how to
    fix it."""


class ModelNotSupported(LoadError):
    """Raised for a model type, or a property of a model, that this engine would compute wrongly."""


class TooFewBlocks(LoadError):
    """Raised if the KV cache cannot hold one request that fills the context window."""


class IntegrityError(EngineError, Internal):
    """Raised if an invariant does not hold, which is a bug of the engine."""


class RankFailed(EngineError, Unavailable):
    """Raised if a process that computes a part of this engine's model has ended or does not
    respond: the engine cannot be used any more. One line names the process and how it ended."""


class InvalidAdapter(InvalidRequest):
    """Raised for an adapter that this engine would compute wrongly, or that does not fit the
    model."""


class UnknownAdapter(EngineError, NotFound):
    """Raised if no adapter of this name is loaded."""


class AdapterInUse(WrongState):
    """Raised if live requests use the adapter. Nothing was done."""


class TooManyAdapters(EngineError, NoCapacity):
    """Raised if there is no slot or memory for another adapter. Nothing was done."""
