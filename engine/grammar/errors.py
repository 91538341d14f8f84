"""Errors of grammars. All but the last two are the sender's, permanent, and name what to change.

InvalidRequest("grammar", ...)   malformed, not supported, too large, or without any text
  GrammarTooCostly               ... too dear to compile, or too dear per token
GrammarBusy(NoCapacity)          too many compilations wait; retry later
GrammarFailed(Internal)          the compiling process broke: our own mistake
"""

from __future__ import annotations

from engine.errors import EngineError, InvalidRequest
from process.rpc_errors import Internal, NoCapacity


class GrammarTooCostly(InvalidRequest):
    """Raised if compiling a grammar, or following it for one token, exceeds GrammarLimits."""


class GrammarBusy(EngineError, NoCapacity):
    """Raised if `max_num_waiting` compilations wait already, or `max_num_waiting_per_sender` of the
    sender. Nothing was done."""


class GrammarFailed(EngineError, Internal):
    """Raised if the compiling process could not be started, or ended by itself."""


def refuse(problem: str) -> InvalidRequest:
    """Return the error for an invalid grammar, with the field name "grammar"."""
    return InvalidRequest("grammar", problem)
