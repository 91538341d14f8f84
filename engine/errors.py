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

from process.errors import (
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
    """Root of the engine's errors."""


Error = TypeVar("Error", bound=EngineError)


def fresh(error: Error) -> Error:
    """The same error without traceback, cause or context: for one that is kept and handed to many.

    A raised exception grows by the frames of everyone it was raised for.
    """
    other = type(error).__new__(type(error), *error.args)
    other.__dict__.update(error.__dict__)
    return other


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
    """The model's logits for one request hold NaN or +inf, or are all -inf."""


class EmptySupport(InvalidArgument, EngineError):
    """The model's logits were sound, but what the request asked for left no token to draw.

    `processors` names what was applied, in order, by name and parameter.
    """

    def __init__(self, processors: tuple[str, ...], position: int) -> None:
        named = ", ".join(processors)
        super().__init__("sampling", f"no token is left for position {position} after {named}")
        self.processors = processors
        self.position = position


class ParkingRefused(EngineError, NoCapacity):
    """There is no room to park a preempted request's blocks. Nothing was kept."""


class PolicyFailed(EngineError, Internal):
    """The stop policy raised an exception when it saw this request."""


class LoadError(EngineError):
    """The engine cannot start. The message is one line that says what is wrong and how to fix
    it."""


class ModelNotSupported(LoadError):
    """A model type, or a property of a model, that this engine would compute wrongly."""


class TooFewBlocks(LoadError):
    """The KV cache could not hold one request that fills the context window."""


class IntegrityError(EngineError, Internal):
    """A conservation law does not hold."""


class RankFailed(EngineError, Unavailable):
    """A process that computes a part of this engine's model is gone or too late: the engine is
    over. One line: which, and how it ended."""


class InvalidAdapter(InvalidRequest):
    """An adapter that this engine would compute wrongly, or that does not fit the model."""


class UnknownAdapter(EngineError, NotFound):
    """No adapter of this name is loaded."""


class AdapterInUse(WrongState):
    """Live requests use the adapter. Nothing was done."""


class TooManyAdapters(EngineError, NoCapacity):
    """The table of adapters is full. Nothing was done."""
