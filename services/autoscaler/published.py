"""What a leader wants, as it publishes it to those who follow: one line of JSON, with a number for
each role. Pure.
"""

from __future__ import annotations

import json

from services.autoscaler.signals import ByRole, Role

_MAX_WORKERS = 1_000_000
_MAX_CHARS = 200


def to_text(wanted: ByRole[int]) -> str:
    """One line."""
    return json.dumps({role.value: wanted.of(role) for role in Role})


def from_text(text: str) -> ByRole[int] | None:
    """None: it says nothing, or what no leader of ours says."""
    if len(text) > _MAX_CHARS:
        return None
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict):
        return None
    nums = [said.get(role.value) for role in (Role.PREFILL, Role.DECODE)]
    prefill, decode = (
        num if type(num) is int and 0 <= num <= _MAX_WORKERS else None for num in nums
    )
    return None if prefill is None or decode is None else ByRole(prefill, decode)
