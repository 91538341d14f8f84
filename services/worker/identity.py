"""Identity: who a worker is, in one life. A frozen value; any thread."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from process import entrypoint


@dataclass(frozen=True)
class Identity:
    """Who this worker is, in this life."""

    role: str
    worker_id: str
    incarnation: bytes

    @classmethod
    def new(cls, role: str, worker_id: str) -> Identity:
        """A new life. An empty `worker_id` becomes the role and a random part."""
        return cls(
            role, worker_id or f"{role}-{secrets.token_hex(4)}", entrypoint.new_incarnation()
        )
