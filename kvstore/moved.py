"""What one call of a store's client moved, as its caller sees it: which way, how much, how long,
and what did not come and why. For whoever measures or traces; it changes nothing. A value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Moved:
    """See the module. `seconds` holds all of the call: control, bytes, checksums and what was
    compared with them."""

    direction: Literal["read", "write"]
    transport: str
    num_bytes: int
    """That may be used: bytes that failed do not count."""
    seconds: float
    failed: Mapping[str, int] = field(default_factory=dict)
    """Blocks by reason."""
    num_put_again: int = 0
    """Blocks of a write that the store refused for want of what they follow, and whose caller puts
    them again with that: no failure."""
