"""FairQueue: which of the requests that wait is next, by priority, tenants' shares and deadlines.

Classes of equal priority go strictly one before the other, but for every LOWER_EVERY-th turn, which
the lower ones get in rotation, so that none starves. Within a class tenants share by deficit round
robin over tokens (Shreedhar and Varghese, 1995): each turn a tenant is credited its quantum times
its weight, and served while its credit covers the request at its queue's head. So of two tenants
that always wait neither gets ahead of the other by more than a quantum and a request. Within a
tenant's line the request goes first that is due first; of equals, the one that came first.

A structure over values: no clock, no I/O. Laws: `check_integrity`. One asyncio loop.
"""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from process.errors import Internal

QUANTUM_TOKENS = 512
"""A tenant's credit per turn, at weight 1. Less than most requests: turns stay short."""

_MIN_PATIENCE_S = 2.0**-6

LOWER_EVERY = 10
"""Of so many turns one goes to a lower class."""

MAX_PATIENCE_S = 64.0
"""A request with more time is due as if it had this much: what comes later than this after it never
goes before it, however short its time is. Guessed."""

IsBlocked = Callable[[str], bool]
"""Whether a tenant may not be served now, for a reason of its own."""


@dataclass(eq=False)
class Waiting:
    """One request in the queue. `num_tokens`: what serving it is expected to cost. `pool`: the
    decode workers that it needs a place at, named by their model; empty: it needs none. `due_s`: a
    moment on a clock that all in the queue share."""

    tenant: str
    priority: int
    num_tokens: int
    weight: float = 1.0
    pool: str = ""
    due_s: float = 0.0


def patience_s(left_s: float) -> float:
    """After how many seconds a request with so much time left is due: a power of two, the nearest
    one. Equal budgets arrive some milliseconds apart (gRPC rounds them on the wire): these must not
    decide about an order."""
    if left_s >= MAX_PATIENCE_S:
        return MAX_PATIENCE_S
    return float(2.0 ** round(math.log2(max(left_s, _MIN_PATIENCE_S))))


def _due_s(waiting: Waiting) -> float:
    return waiting.due_s


@dataclass
class _Line:
    """One tenant's requests of one class, in the order in which they are due."""

    weight: float
    requests: list[Waiting] = field(default_factory=list)
    credit: float = 0.0
    num_tokens: Counter[str] = field(default_factory=Counter)
    """By pool."""

    def tokens_before(self, newcomer: Waiting) -> int:
        """Of its pool, what is served before it, or would be if it came now."""
        return sum(
            one.num_tokens
            for one in itertools.takewhile(lambda one: one is not newcomer, self.requests)
            if one.pool == newcomer.pool and one.due_s <= newcomer.due_s
        )


class _Class:
    """The lines of one priority; `ring`: in whose turn they are, the first one's turn now."""

    def __init__(self) -> None:
        self.lines: dict[str, _Line] = {}
        self.ring: deque[str] = deque()
        self._is_credited = False

    def push(self, waiting: Waiting) -> None:
        line = self.lines.get(waiting.tenant)
        if line is None:
            line = self.lines[waiting.tenant] = _Line(waiting.weight)
            self.ring.append(waiting.tenant)
        line.weight = waiting.weight  # as it is configured by now
        insort(line.requests, waiting, key=_due_s)  # behind its equals
        line.num_tokens[waiting.pool] += waiting.num_tokens

    def remove(self, waiting: Waiting) -> None:
        line = self.lines[waiting.tenant]
        self._take_out(waiting)
        if line.requests:
            # Nobody saves up by asking for much and taking it back.
            line.credit = min(line.credit, line.requests[0].num_tokens)

    def pop(self, is_blocked: IsBlocked, full: Collection[str]) -> Waiting | None:
        free: dict[str, Waiting] = {}  # each tenant's first request that may be served
        for tenant, line in self.lines.items():
            if not is_blocked(tenant):
                first = next((one for one in line.requests if one.pool not in full), None)
                if first is not None:
                    free[tenant] = first
        if not free:
            return None
        num_passed = 0
        while True:
            line, waiting = self.lines[self.ring[0]], free.get(self.ring[0])
            if waiting is not None:
                if not self._is_credited:
                    line.credit += QUANTUM_TOKENS * line.weight
                    self._is_credited = True
                if waiting.num_tokens <= line.credit:
                    line.credit -= waiting.num_tokens
                    self._take_out(waiting)
                    return waiting
            self.ring.rotate(-1)
            self._is_credited = False
            num_passed += 1
            if num_passed % len(self.ring) == 0:
                self._skip_rounds(free)

    def _skip_rounds(self, free: Mapping[str, Waiting]) -> None:
        """Credit at once all the rounds in which no request could be served."""
        lines = [(self.lines[tenant], waiting) for tenant, waiting in free.items()]
        num_rounds = min(
            math.ceil((waiting.num_tokens - line.credit) / (QUANTUM_TOKENS * line.weight))
            for line, waiting in lines
        )
        for line, _ in lines:
            line.credit += max(0, num_rounds - 1) * QUANTUM_TOKENS * line.weight

    def _take_out(self, waiting: Waiting) -> None:
        line = self.lines[waiting.tenant]
        line.requests.remove(waiting)
        line.num_tokens[waiting.pool] -= waiting.num_tokens
        if not line.requests:
            self._drop(waiting.tenant)

    def _drop(self, tenant: str) -> None:
        """An idle tenant keeps no credit: it would come back with a burst."""
        if self.ring[0] == tenant:
            self._is_credited = False
        self.ring.remove(tenant)
        del self.lines[tenant]


class FairQueue:
    """See the module."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}
        self._num_waiting: dict[str, int] = {}
        self.num_for = Counter[str]()
        """Requests that wait, by pool; of those alone for which some do."""
        self._num_turns = 0
        self._num_lower_turns = 0
        self.num_tokens = 0
        """Expected cost of all that wait."""

    def __len__(self) -> int:
        return sum(self._num_waiting.values())

    def num_of(self, tenant: str) -> int:
        """Requests of this tenant that wait."""
        return self._num_waiting.get(tenant, 0)

    def push(self, waiting: Waiting) -> None:
        """Behind those of its tenant and class that are due before it or with it."""
        self._classes.setdefault(waiting.priority, _Class()).push(waiting)
        self._num_waiting[waiting.tenant] = self.num_of(waiting.tenant) + 1
        self.num_for[waiting.pool] += 1
        self.num_tokens += waiting.num_tokens

    def remove(self, waiting: Waiting) -> None:
        """It waits no longer: cancelled, or its time is over."""
        self._classes[waiting.priority].remove(waiting)
        self._forget(waiting)

    def pop(
        self, is_blocked: IsBlocked = lambda tenant: False, full: Collection[str] = ()
    ) -> Waiting | None:
        """Take out the next request; None: none may be served. `full`: pools without a place; a
        request for another one passes those that wait for them."""
        for priority in self._turn():
            waiting = self._classes[priority].pop(is_blocked, full)
            if waiting is not None:
                self._num_turns += 1
                self._forget(waiting)
                return waiting
        return None

    def longest(self) -> str | None:
        """The tenant with most requests waiting."""
        return max(self._num_waiting, key=lambda tenant: self._num_waiting[tenant], default=None)

    def newest_of(self, tenant: str) -> Waiting | None:
        """The tenant's request that is due last, of its least urgent class."""
        for priority in sorted(self._classes):
            line = self._classes[priority].lines.get(tenant)
            if line is not None:
                return line.requests[-1]
        return None

    def position(self, waiting: Waiting) -> tuple[int, int]:
        """Where it stands in the line of its tenant and class, from 1, and how many stand there."""
        requests = self._classes[waiting.priority].lines[waiting.tenant].requests
        return requests.index(waiting) + 1, len(requests)

    def tokens_ahead(
        self, newcomer: Waiting, is_blocked: IsBlocked = lambda tenant: False
    ) -> float:
        """What will about be served before `newcomer`, if nothing else comes, itself left out. Only
        requests of its pool count: others do not wait for the same."""
        ahead, pool = 0.0, newcomer.pool
        for priority, of_class in self._classes.items():
            if priority > newcomer.priority:
                ahead += sum(
                    line.num_tokens[pool]
                    for tenant, line in of_class.lines.items()
                    if not is_blocked(tenant)
                )
            elif priority == newcomer.priority:
                own = of_class.lines.get(newcomer.tenant)
                own_tokens = own.tokens_before(newcomer) if own is not None else 0
                # While its own line is served to its end, others get as much by their weights.
                turns = (own_tokens + newcomer.num_tokens) / newcomer.weight
                ahead += own_tokens + sum(
                    min(line.num_tokens[pool], turns * line.weight + QUANTUM_TOKENS)
                    for tenant, line in of_class.lines.items()
                    if tenant != newcomer.tenant and not is_blocked(tenant)
                )
        return ahead

    def check_integrity(self) -> None:
        """Raises: Internal naming the law that is broken."""
        counts: dict[str, int] = {}
        num_for = Counter[str]()
        num_tokens = 0
        for of_class in self._classes.values():
            if sorted(of_class.ring) != sorted(of_class.lines) or not of_class.lines:
                raise Internal("the admission queue's ring differs from its lines")
            for tenant, line in of_class.lines.items():
                costs = Counter[str]()
                for waiting in line.requests:
                    costs[waiting.pool] += waiting.num_tokens
                    num_for[waiting.pool] += 1
                if line.requests != sorted(line.requests, key=_due_s):
                    raise Internal(f"the admission queue's line of {tenant} is out of order")
                if not line.requests or line.num_tokens != costs:
                    raise Internal(f"the admission queue's tokens of {tenant} do not sum up")
                if line.credit < 0:
                    raise Internal(f"the admission queue's credit of {tenant} is {line.credit}")
                counts[tenant] = counts.get(tenant, 0) + len(line.requests)
                num_tokens += costs.total()
        if (counts, num_for, num_tokens) != (self._num_waiting, self.num_for, self.num_tokens):
            raise Internal("the admission queue's counts differ from its lines")

    def _turn(self) -> Iterator[int]:
        """Priorities in the order in which they are asked this turn."""
        falling = sorted(self._classes, reverse=True)
        if len(falling) > 1 and self._num_turns % LOWER_EVERY == LOWER_EVERY - 1:
            place = 1 + self._num_lower_turns % (len(falling) - 1)
            self._num_lower_turns += 1
            falling.insert(0, falling.pop(place))
        return iter(falling)

    def _forget(self, waiting: Waiting) -> None:
        if not self._classes[waiting.priority].lines:
            del self._classes[waiting.priority]
        self.num_tokens -= waiting.num_tokens
        self.num_for[waiting.pool] -= 1
        if not self.num_for[waiting.pool]:
            del self.num_for[waiting.pool]
        self._num_waiting[waiting.tenant] -= 1
        if not self._num_waiting[waiting.tenant]:
            del self._num_waiting[waiting.tenant]
