"""What both client ports keep in bounds: how much is read for whom, and who takes no answer.

A call's caller is asked for before its message is read; the port's other services (health,
reflection) ask for none, and share the room of their host. Knows no request. One asyncio loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.metrics_core import Metric

from process.grpc_server import PublicPortLimits
from process.memory_budget import MemoryBudget, MemoryGrant
from process.metrics import Labels, counter, gauge
from services.router.caller import Caller
from services.router.config import RouterLimits, RouterTimes
from services.router.stalled_readers import StalledReaders

AUTHORIZATION = "authorization"
"""Metadata with the API key, as HTTP's header."""


class Clients:
    """See the module."""

    def __init__(self, limits: RouterLimits, times: RouterTimes) -> None:
        self.readers = StalledReaders(times.stall_s)
        self.read_s = times.read_s
        """For a message, or a body, to arrive."""
        self.keep_alive_s = times.sse_keep_alive_s
        """For which an event stream may be silent."""
        self.memory_budget = MemoryBudget(limits.max_intake_bytes, wait_s=times.intake_wait_s)
        self._limits = limits
        self._times = times

    def grant(self, caller: Caller, host: str, num_bytes: int | None) -> MemoryGrant:
        """For one body. None: it does not say how long it is."""
        most = self._limits.max_request_bytes
        return self.memory_budget.grant(
            owner_of(caller, host), most if num_bytes is None else min(num_bytes, most)
        )

    def port_limits(self, service: str, caller_of: Callable[[str], Caller]) -> PublicPortLimits:
        """The bounds of a gRPC port; `caller_of` is asked about calls of `service`."""
        prefix = f"/{service}/"

        def authenticate(method: str, context: Any) -> str:
            caller = caller_of(authorization_of(context)) if method.startswith(prefix) else None
            return owner_of(caller, context.peer().rpartition(":")[0])

        return PublicPortLimits(
            authenticate,
            self.memory_budget,
            read_s=self.read_s,
            max_connections=self._limits.max_connections,
            idle_s=self._times.idle_s,
        )

    def families(self, labels: Labels) -> Iterator[Metric]:
        """For /metrics."""
        held = self.memory_budget.num_bytes
        text = "Requests' messages that are read or served, of limits.max_intake_bytes."
        yield gauge("baton_router_intake_bytes", text, labels, held)
        text = "Requests that found no room to be read in times.intake_wait_s."
        yield counter("baton_router_intake_refused", text, labels, self.memory_budget.num_refused)
        text = "Requests that arrived slowly, refused since others waited for their room."
        yield counter("baton_router_intake_recalled", text, labels, self.memory_budget.num_recalled)
        text = "Requests over gRPC cancelled since their client took nothing for times.stall_s."
        yield counter("baton_router_readers_stalled", text, labels, self.readers.num_stalled)

    def check_integrity(self) -> None:
        """Raises: Internal naming the law that is broken."""
        self.memory_budget.check_integrity()
        self.readers.check_integrity()

    @property
    def left(self) -> dict[str, int]:
        """What must be 0 when nobody is served."""
        return {
            "bytes taken in": self.memory_budget.num_bytes,
            "requests waiting to be read": self.memory_budget.num_waiting,
            "answers being written": self.readers.num_readers,
        }


def authorization_of(context: Any) -> str:
    """Of a gRPC call; empty: it has none."""
    return str(dict(context.invocation_metadata() or ()).get(AUTHORIZATION, ""))


def owner_of(caller: Caller | None, host: str) -> str:
    """Who shares room: those of one tenant; where nobody says who it is, those of one host."""
    return caller.tenant if caller is not None and caller.tenant else f"host {host}"
