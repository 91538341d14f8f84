"""Errors of this package; they hang in the engine's tree (engine/errors.py).

InvalidAdapter(InvalidRequest)   permanent; the message begins with the field or file that is wrong
UnknownAdapter(NotFound)         no adapter of this name is loaded
AdapterInUse(WrongState)         live requests use it: finish or abort them first
TooManyAdapters(NoCapacity)      no slot or no bytes left: unload one first
"""

from __future__ import annotations

from engine.errors import EngineError, InvalidRequest, WrongState
from process.errors import NoCapacity, NotFound


class InvalidAdapter(InvalidRequest):
    """An adapter that this engine would compute wrongly, or that does not fit the model."""


class UnknownAdapter(EngineError, NotFound):
    """No adapter of this name is loaded."""


class AdapterInUse(WrongState):
    """Live requests use the adapter. Nothing was done."""


class TooManyAdapters(EngineError, NoCapacity):
    """The table of adapters is full. Nothing was done."""
