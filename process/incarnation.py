"""The random id of one life of a process. Whatever an earlier life published is void."""

from __future__ import annotations

import secrets


def new() -> bytes:
    """16 random bytes; never equal between two lives."""
    return secrets.token_bytes(16)
