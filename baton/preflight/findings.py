"""What one check of preflight found. A value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """It may work, or nobody knows."""
    FAIL = "fail"
    """Installing would not give a working deployment."""


@dataclass(frozen=True)
class Finding:
    """See the module."""

    check: str
    """Which check, in one or two words."""

    status: Status
    """How bad."""

    what: str
    """What was seen, in one line."""

    fix: str = ""
    """What to do about it; empty where nothing is to be done."""
