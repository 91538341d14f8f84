"""Errors of grammars. All but the last two are the sender's, permanent, and name what to change.

InvalidRequest("grammar", ...)   malformed, not supported, too large, or without any text
  GrammarTooCostly               ... too dear to compile, or too dear per token
GrammarBusy(NoCapacity)          too many compilations wait; retry later
GrammarFailed(Internal)          the compiling process broke: our own mistake
"""

from __future__ import annotations

from engine.errors import EngineError, InvalidRequest
from process.errors import Internal, NoCapacity


class GrammarTooCostly(InvalidRequest):
    """Compiling it, or following it for one token, went beyond GrammarLimits."""


class GrammarBusy(EngineError, NoCapacity):
    """`max_num_waiting` compilations wait already, or the sender has its share of them. Nothing was
    done."""


class GrammarFailed(EngineError, Internal):
    """The process that compiles could not be started, or ended by itself."""


def refuse(problem: str) -> InvalidRequest:
    """The sender's mistake, under the one field name that grammars have."""
    return InvalidRequest("grammar", problem)
