"""DraftTraces: what calls of draft workers took that were made for traced requests. Nothing is
noted, and nothing costs, where nobody is traced.

One call guesses for several sequences: each traced one of them notes all of it. What is kept of a
request is of one size, however many calls there are. `watch` and `take` belong to the loop's
thread, the rest to the engine's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.sequence import Key

MAX_ADDRESSES = 8
"""Of draft workers, that are kept of one request."""


@dataclass(slots=True)
class DraftCalls:
    """Those of one request. Moments are the drafter's clock's, which is time.monotonic."""

    num_calls: int = 0
    num_late: int = 0
    num_failed: int = 0
    num_nodes: int = 0
    """Guesses that came for this request."""
    first_s: float = 0.0
    last_s: float = 0.0
    """From the first call's beginning to the last one's end."""
    waited_s: float = 0.0
    longest_s: float = 0.0
    addresses: list[str] = field(default_factory=list)


class DraftTraces:
    """See the module."""

    def __init__(self) -> None:
        self._calls: dict[str, DraftCalls] = {}

    def watch(self, request_id: str) -> None:
        """It is traced, until it is taken."""
        self._calls[request_id] = DraftCalls()

    def take(self, request_id: str) -> DraftCalls | None:
        """What was noted of it; None: no call."""
        calls = self._calls.pop(request_id, None)
        return calls if calls is not None and calls.num_calls else None

    @property
    def is_on(self) -> bool:
        """Somebody is traced."""
        return bool(self._calls)

    def note(
        self,
        address: str,
        began_s: float,
        ended_s: float,
        guessed: Iterable[tuple[Key, int]],
        *,
        is_late: bool,
        is_failed: bool,
    ) -> None:
        """One call.

        Args:
            guessed: for whom, and how many nodes came.
        """
        num_nodes: dict[str, int] = {}
        for (request_id, _), num in guessed:
            if request_id in self._calls:
                num_nodes[request_id] = num_nodes.get(request_id, 0) + num
        for request_id, num in num_nodes.items():
            calls = self._calls.get(request_id)
            if calls is None:  # it was taken meanwhile
                continue
            if not calls.num_calls:
                calls.first_s = began_s
            calls.num_calls += 1
            calls.num_late += is_late
            calls.num_failed += is_failed
            calls.num_nodes += num
            calls.last_s = ended_s
            calls.waited_s += ended_s - began_s
            calls.longest_s = max(calls.longest_s, ended_s - began_s)
            if address not in calls.addresses and len(calls.addresses) < MAX_ADDRESSES:
                calls.addresses.append(address)
