"""Identity: role, id and incarnation of a worker during one life. Immutable; any thread."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from process import entrypoint


@dataclass(frozen=True)
class Identity:
    """Role, worker id and incarnation of one worker life."""

    role: str
    worker_id: str
    incarnation: bytes

    @classmethod
    def new(cls, role: str, worker_id: str) -> Identity:
        """Create the identity of a new life. An empty `worker_id` becomes the role and a random
        part."""
        return cls(
            role, worker_id or f"{role}-{secrets.token_hex(4)}", entrypoint.new_incarnation()
        )
