"""Failure: an error as a value that can be sent to another process and raised there again.

Only errors of `process.rpc_errors` and the engine's error modules cross by name, with their public
attributes; any other is an Internal one. So what arrives never chooses a class outside of those
modules. Any thread.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from engine import errors as engine_errors
from engine import errors as lora_errors
from engine.grammar import errors as grammar_errors
from process import rpc_errors as process_errors
from process.rpc_errors import BatonError, Internal, InvalidArgument

Detail = str | float | bool | None | list[str | int]

_KINDS: dict[str, type[BatonError]] = {
    name: kind
    for module in (process_errors, engine_errors, grammar_errors, lora_errors)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, BatonError)
}


@dataclass(frozen=True)
class Failure:
    """An error as plain values, which can be encoded."""

    kind: str
    """Name of the error's class."""
    message: str
    field: str = ""
    """Field name of an InvalidArgument."""
    retry_after_s: float | None = None
    details: dict[str, Detail] = dataclasses.field(default_factory=dict)
    """Other public attributes of the error."""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Convert an error to a value; an error of an unknown class becomes Internal, with its
        class name in the message."""
        if not isinstance(error, BatonError):
            return cls("Internal", f"{type(error).__name__}: {error}")
        kind = next(base.__name__ for base in type(error).__mro__ if base.__name__ in _KINDS)
        field = error.field if isinstance(error, InvalidArgument) else ""
        details = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(error).items()
            if name not in ("field", "retry_after_s") and not name.startswith("_")
        }
        return cls(kind, str(error), field, error.retry_after_s, details)

    def to_error(self, *, at: str = "") -> BatonError:
        """Convert back to the error.

        Args:
            at: prefix of its field name (`asks[2].`), for an error that has a field.
        """
        kind = _KINDS.get(self.kind, Internal)
        error = kind.__new__(kind)  # not through its constructor: each class has its own
        error.args = (self.message,)
        if self.retry_after_s is not None:
            error.retry_after_s = self.retry_after_s
        if isinstance(error, InvalidArgument):
            error.field = f"{at}{self.field}"
            error.args = (f"{at}{self.message}",)
        for name, value in self.details.items():
            if name.isidentifier() and not name.startswith("_"):
                setattr(error, name, tuple(value) if isinstance(value, list) else value)
        return error
