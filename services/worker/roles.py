"""Role: a worker role (prefill or decode) by name, and what it adds to the worker's core.

A role's code is imported when a worker begins that role: services refer to one another by these
names alone, and a worker that never changes its role loads no other's. Values and one import.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Protocol, cast

import grpc.aio

from process.deadline import Deadline
from process.errors import InvalidArgument
from services.worker.core import WorkerCore

_CLASSES = {
    "prefill": ("services.prefill.role", "PrefillRole"),
    "decode": ("services.decode.role", "DecodeRole"),
}
ROLES = tuple(_CLASSES)


class Role(Protocol):
    """Interface of what a prefill or decode worker adds to the core."""

    def start(self) -> None: ...
    def add_service(self, server: grpc.aio.Server) -> None: ...
    def leave(self, by: Deadline) -> None:
        """Move requests that can continue on another worker, by the time `by`, because this one
        drains. New requests are refused already."""

    async def stop(self) -> None: ...


MakeRole = Callable[[WorkerCore], Role]


def role_class(name: str) -> MakeRole:
    """Return the class of a role by name. Raises: InvalidArgument naming the existing roles."""
    if name not in _CLASSES:
        raise InvalidArgument("role", f"{name!r} is none of {', '.join(ROLES)}")
    module, attribute = _CLASSES[name]
    return cast(MakeRole, getattr(importlib.import_module(module), attribute))
