"""`Admission` decides whether a request is served now, waits in a fair queue, or is refused at
once.

    asked    -> refused   over a rate limit; the queue is full; its deadline cannot be met
    asked    -> active    there is room, and no other request waits for it
    asked    -> waiting   in the queue -> active, or over: cancelled, pushed out, deadline passed
    active   -> over

Bounds of the active requests: their number, in all and per tenant; the prompt tokens of requests
without a first output token; and, per model, the free places of its decode workers. The last two
keep the workers' own queues, which do not know tenants, as short as possible without idle workers:
a request that waits in prefill has passed the fair queue, and one that waits in decode has streamed
its first token already. A long prompt counts for less than one worker's part of the tokens, so that
it keeps no request from another worker. When the queue is full, the tenant with most waiting
requests gives way: its newest request is refused in place of a request from a tenant with fewer.

`FairQueue` decides which waiting request is next:

- Higher priorities go strictly first, but every LOWER_EVERY-th turn goes to the lower ones in
  rotation, so that none starves.
- Within a priority, tenants share by deficit round robin over tokens (Shreedhar and Varghese,
  1995). Each turn a tenant is credited its quantum times its weight, and served while the credit
  covers its first request. So of two tenants that always wait neither gets ahead by more than one
  quantum and one request.
- Within one tenant's line, the earliest due time goes first, then the earliest arrival. The due
  time is the arrival time plus `patience_s` of the time left: a request with a near deadline counts
  as older.

Costs are estimated before tokenization (`asked_of`); the estimate is corrected by what the request
really used. `ServiceRate` measures how fast waiting requests start, for the expected wait.

`Holding` holds requests for a model that has no worker yet, instead of refusing them:

    asked -> free     there are workers, or none is waited for
    asked -> refused  as many requests are held as allowed
    asked -> held -> free | refused (held for too long) | over (cancelled, its deadline)

It does not know workers: the caller's `find` raises while workers are missing, and `look` is called
after each read of the registry. `is_expected` is the common rule for whether a worker may come
back.

Invariants are checked by the `check_integrity` methods. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from bisect import insort
from collections import Counter, defaultdict, deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from process.api_keys import TenantLimits
from process.background_tasks import start_task
from process.deadline import Clock, Deadline
from process.rpc_errors import DeadlineExceeded, Internal, NoCapacity, Unavailable
from protos import inference_pb2
from services.router.config import AdmissionSettings
from services.router.rate_limit import RateLimits

HALF_LIFE_S = 10.0
"""Age at which a measurement counts half. Guessed: longer than a burst, shorter than a change of
the number of workers."""

LEAST_S = 1.0
"""Least observed time from which a rate is computed."""


class ServiceRate:
    """Rate at which waiting requests start, in tokens per second, decayed by HALF_LIFE_S.

    Measured only while requests wait: an idle cluster shows no rate. Pure: times are arguments.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._since_s: float | None = None

    def on_backlog(self, now_s: float, *, is_backlog: bool) -> None:
        """Record whether requests wait for the cluster from now on."""
        self._pass(now_s)
        self._since_s = now_s if is_backlog else None

    def on_start(self, now_s: float, num_tokens: int) -> None:
        """Record that a waiting request starts, with its expected tokens."""
        if self._since_s is None:
            return  # it did not wait for room: it tells nothing of the cluster's rate
        self._pass(now_s)
        self._tokens += num_tokens

    def tokens_per_s(self, now_s: float) -> float | None:
        """Return the rate; None: not enough was observed. A stalled queue lowers it."""
        self._pass(now_s)
        if self._seconds < LEAST_S or self._tokens <= 0:
            return None
        return self._tokens / self._seconds

    def _pass(self, now_s: float) -> None:
        if self._since_s is None:
            return
        passed_s = max(0.0, now_s - self._since_s)
        self._since_s = now_s
        keep = math.pow(0.5, passed_s / HALF_LIFE_S)
        self._tokens *= keep
        self._seconds = self._seconds * keep + passed_s


BYTES_PER_TOKEN = 4
"""Estimate for English text; other text has more tokens, which are charged at the end."""

_MESSAGE_TOKENS = 8
"""Estimate of the tokens that a chat template adds to one message."""


def asked_of(
    request: inference_pb2.GenerateRequest, tenant: str, model: str, *, default_max_tokens: int
) -> AdmissionRequest:
    """Return the request as admission sees it. `model`: the router's main name of the model."""
    sampling = request.sampling
    max_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else default_max_tokens
    num_sequences = max(sampling.n, sampling.beam.num_beams, 1)
    needs_decode = not request.embed and (max_tokens > 1 or sampling.HasField("beam"))
    return AdmissionRequest(
        tenant,
        request.priority,
        _num_prompt_tokens(request),
        0 if request.embed else max_tokens * num_sequences,
        model,
        num_sequences if needs_decode else 0,
    )


def _num_prompt_tokens(request: inference_pb2.GenerateRequest) -> int:
    kind = request.WhichOneof("prompt")
    if kind == "token_ids":
        return len(request.token_ids.ids)
    if kind == "chat":
        num_bytes = request.chat.ByteSize()
        return num_bytes // BYTES_PER_TOKEN + _MESSAGE_TOKENS * len(request.chat.messages)
    return max(1, len(request.text) // BYTES_PER_TOKEN)


QUANTUM_TOKENS = 512
"""Credit of a tenant per turn, at weight 1. Less than most requests, so that turns stay short."""

_MIN_PATIENCE_S = 2.0**-6

LOWER_EVERY = 10
"""Number of turns of which one goes to a lower priority."""

MAX_PATIENCE_S = 64.0
"""Bound of a request's patience: a request that arrives later than this after it never goes before
it, however near its deadline is. Guessed."""

IsBlocked = Callable[[str], bool]
"""Function that returns whether a tenant is at its own bound of active requests."""


@dataclass(eq=False)
class QueuedRequest:
    """One request in the queue.

    `num_tokens`: expected cost. `pool`: the model that it needs a decode place of; empty: it needs
    none. `due_s`: due time, on a clock that all requests in the queue share.
    """

    tenant: str
    priority: int
    num_tokens: int
    weight: float = 1.0
    pool: str = ""
    due_s: float = 0.0


def patience_s(left_s: float) -> float:
    """Return the seconds after which a request with `left_s` until its deadline is due.

    The nearest power of two, at most MAX_PATIENCE_S. Equal deadlines arrive some milliseconds apart
    (gRPC rounds them on the wire), which must not decide the order.
    """
    if left_s >= MAX_PATIENCE_S:
        return MAX_PATIENCE_S
    return float(2.0 ** round(math.log2(max(left_s, _MIN_PATIENCE_S))))


def _due_s(waiting: QueuedRequest) -> float:
    return waiting.due_s


@dataclass
class _Line:
    """One tenant's requests of one priority, in the order of their due times."""

    weight: float
    requests: list[QueuedRequest] = field(default_factory=list)
    credit: float = 0.0
    num_tokens: Counter[str] = field(default_factory=Counter)
    """Expected cost of the requests, by pool."""

    def tokens_before(self, newcomer: QueuedRequest) -> int:
        """Return the tokens in the line, of the same pool, that are served before `newcomer`."""
        return sum(
            one.num_tokens
            for one in itertools.takewhile(lambda one: one is not newcomer, self.requests)
            if one.pool == newcomer.pool and one.due_s <= newcomer.due_s
        )


class _Class:
    """The tenants' lines of one priority. `ring`: tenants in turn; the first one's turn is now."""

    def __init__(self) -> None:
        self.lines: dict[str, _Line] = {}
        self.ring: deque[str] = deque()
        self._is_credited = False

    def push(self, waiting: QueuedRequest) -> None:
        line = self.lines.get(waiting.tenant)
        if line is None:
            line = self.lines[waiting.tenant] = _Line(waiting.weight)
            self.ring.append(waiting.tenant)
        line.weight = waiting.weight  # the weight may have been reconfigured
        insort(line.requests, waiting, key=_due_s)  # after requests with an equal due time
        line.num_tokens[waiting.pool] += waiting.num_tokens

    def remove(self, waiting: QueuedRequest) -> None:
        line = self.lines[waiting.tenant]
        self._take_out(waiting)
        if line.requests:
            # A tenant must not gain credit by queueing large requests and cancelling them.
            line.credit = min(line.credit, line.requests[0].num_tokens)

    def pop(self, is_blocked: IsBlocked, full: Collection[str]) -> QueuedRequest | None:
        free: dict[str, QueuedRequest] = {}  # each tenant's first request that may be served
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

    def _skip_rounds(self, free: Mapping[str, QueuedRequest]) -> None:
        """Credit at once all rounds in which no request could be served."""
        lines = [(self.lines[tenant], waiting) for tenant, waiting in free.items()]
        num_rounds = min(
            math.ceil((waiting.num_tokens - line.credit) / (QUANTUM_TOKENS * line.weight))
            for line, waiting in lines
        )
        for line, _ in lines:
            line.credit += max(0, num_rounds - 1) * QUANTUM_TOKENS * line.weight

    def _take_out(self, waiting: QueuedRequest) -> None:
        line = self.lines[waiting.tenant]
        line.requests.remove(waiting)
        line.num_tokens[waiting.pool] -= waiting.num_tokens
        if not line.requests:
            self._drop(waiting.tenant)

    def _drop(self, tenant: str) -> None:
        """Remove an idle tenant with its credit: it would come back with a burst."""
        if self.ring[0] == tenant:
            self._is_credited = False
        self.ring.remove(tenant)
        del self.lines[tenant]


class FairQueue:
    """Queue that is fair between tenants, with priorities and due times; see the module docstring.

    A plain data structure: no clock, no I/O.
    """

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}
        self._num_waiting: dict[str, int] = {}
        self.num_for = Counter[str]()
        """Number of waiting requests by pool; pools without any are absent."""
        self._num_turns = 0
        self._num_lower_turns = 0
        self.num_tokens = 0
        """Expected cost of all waiting requests."""

    def __len__(self) -> int:
        return sum(self._num_waiting.values())

    def num_of(self, tenant: str) -> int:
        """Return the number of the tenant's waiting requests."""
        return self._num_waiting.get(tenant, 0)

    def push(self, waiting: QueuedRequest) -> None:
        """Add a request, after those of its tenant and priority that are not due later."""
        self._classes.setdefault(waiting.priority, _Class()).push(waiting)
        self._num_waiting[waiting.tenant] = self.num_of(waiting.tenant) + 1
        self.num_for[waiting.pool] += 1
        self.num_tokens += waiting.num_tokens

    def remove(self, waiting: QueuedRequest) -> None:
        """Remove a request that was cancelled or is past its deadline."""
        self._classes[waiting.priority].remove(waiting)
        self._forget(waiting)

    def pop(
        self, is_blocked: IsBlocked = lambda tenant: False, full: Collection[str] = ()
    ) -> QueuedRequest | None:
        """Remove and return the next request; None: none may be served. `full`: pools without a
        free place; requests of other pools pass those that wait for them."""
        for priority in self._turn():
            waiting = self._classes[priority].pop(is_blocked, full)
            if waiting is not None:
                self._num_turns += 1
                self._forget(waiting)
                return waiting
        return None

    def longest(self) -> str | None:
        """Return the tenant with most waiting requests; None: the queue is empty."""
        return max(self._num_waiting, key=lambda tenant: self._num_waiting[tenant], default=None)

    def newest_of(self, tenant: str) -> QueuedRequest | None:
        """Return the tenant's request that is due last, of its lowest priority."""
        for priority in sorted(self._classes):
            line = self._classes[priority].lines.get(tenant)
            if line is not None:
                return line.requests[-1]
        return None

    def position(self, waiting: QueuedRequest) -> tuple[int, int]:
        """Return its position in its tenant's line, from 1, and the length of that line."""
        requests = self._classes[waiting.priority].lines[waiting.tenant].requests
        return requests.index(waiting) + 1, len(requests)

    def tokens_ahead(
        self, newcomer: QueuedRequest, is_blocked: IsBlocked = lambda tenant: False
    ) -> float:
        """Return an estimate of the tokens served before `newcomer`, if no other request arrives.
        Only requests of its pool count: others do not wait for the same places."""
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
                # While its own line is served up to it, other tenants get as much by their weights.
                turns = (own_tokens + newcomer.num_tokens) / newcomer.weight
                ahead += own_tokens + sum(
                    min(line.num_tokens[pool], turns * line.weight + QUANTUM_TOKENS)
                    for tenant, line in of_class.lines.items()
                    if tenant != newcomer.tenant and not is_blocked(tenant)
                )
        return ahead

    def check_integrity(self) -> None:
        """Check counts and order. Raises: Internal naming the broken invariant."""
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
        """Return the priorities in the order in which they are tried this turn."""
        falling = sorted(self._classes, reverse=True)
        if len(falling) > 1 and self._num_turns % LOWER_EVERY == LOWER_EVERY - 1:
            place = 1 + self._num_lower_turns % (len(falling) - 1)
            self._num_lower_turns += 1
            falling.insert(0, falling.pop(place))
        return iter(falling)

    def _forget(self, waiting: QueuedRequest) -> None:
        if not self._classes[waiting.priority].lines:
            del self._classes[waiting.priority]
        self.num_tokens -= waiting.num_tokens
        self.num_for[waiting.pool] -= 1
        if not self.num_for[waiting.pool]:
            del self.num_for[waiting.pool]
        self._num_waiting[waiting.tenant] -= 1
        if not self._num_waiting[waiting.tenant]:
            del self._num_waiting[waiting.tenant]


_RETRY_S = 1.0


def is_expected(
    seen_s: Mapping[str, float], here: Collection[str], now_s: float, wait_s: float
) -> bool:
    """Return whether a worker is away that may come back: it served, or was starting, less than
    `wait_s` seconds ago.

    Args: seen_s: time when each worker of the role last served or was starting, by id. here: ids
        of the workers that serve now.
    """
    return any(now_s - at_s < wait_s for name, at_s in seen_s.items() if name not in here)


class Holding:
    """Hold of requests for a model that has no worker yet; see the module docstring.

    Invariant: `num_held` is the number of callers that are held inside `wait`.
    """

    def __init__(self, hold_s: float, max_requests: int) -> None:
        """Args: hold_s: longest hold of a request while no worker is expected; 0: none.
        max_requests: most requests that are held at once."""
        self._hold_s = hold_s
        self._max_requests = max_requests
        self._waiting: set[asyncio.Future[None]] = set()
        self.num_held = 0

    @property
    def is_on(self) -> bool:
        """Whether requests are held while no worker is expected."""
        return self._hold_s > 0

    def look(self) -> None:
        """Wake all held requests: the usable workers may have changed."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def wait(
        self,
        find: Callable[[], object],
        deadline: Deadline,
        on_held: Callable[[], None],
        is_coming: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait until `find` does not raise Unavailable any more. Return whether it had to wait.

        Returns False at once, even while workers are missing, where holding is off and no worker is
        expected.

        Args: on_held: called when the wait begins. is_coming: returns whether the missing workers
            are expected; while they are, only `deadline` ends the wait.
        Raises: NoCapacity when as many requests are held as allowed; Unavailable, with the last
            problem that `find` raised, after `hold_s`; DeadlineExceeded.
        """
        if _problem(find) is None or not (self.is_on or is_coming()):
            return False
        if self.num_held >= self._max_requests:
            raise NoCapacity(
                f"{self.num_held} requests wait for the first worker to start",
                retry_after_s=_RETRY_S,
            )
        bound = deadline.sooner(self._hold_s)
        self.num_held += 1
        try:
            on_held()
            while (problem := _problem(find)) is not None:
                if deadline.expired:
                    raise DeadlineExceeded("the request's time ran out: no worker started")
                if is_coming():
                    await self._news(deadline)
                elif bound.expired:
                    raise Unavailable(
                        f"{problem}; none started within {self._hold_s:g} s",
                        retry_after_s=_RETRY_S,
                    )
                else:
                    await self._news(bound)
        finally:
            self.num_held -= 1
        return True

    def check_integrity(self) -> None:
        """Check the counts. Raises: Internal when more callers wait than are held."""
        if len(self._waiting) > self.num_held:
            raise Internal(f"{len(self._waiting)} wait for workers, {self.num_held} are held")

    async def _news(self, bound: Deadline) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await asyncio.wait([future], timeout=bound.left_s())
        finally:
            self._waiting.discard(future)
            future.cancel()


def _problem(find: Callable[[], object]) -> Unavailable | None:
    try:
        find()
    except Unavailable as error:
        return error
    return None


REASONS = ("rate", "queue", "tenant_queue", "deadline", "pushed_out")
"""Reasons of refusals: over a rate limit; the queue is full, or the tenant's part of it; the
deadline cannot be met; the request gave way to a tenant with fewer waiting requests.
"""

DEFAULT_STEP_TOKENS = 512
"""Assumed most tokens of a step while no prefill worker has reported its own."""

_MAX_RETRY_S = 600.0


@dataclass(frozen=True)
class AdmissionRequest:
    """One request as admission sees it; token counts are estimates before tokenization. A value."""

    tenant: str
    priority: int
    num_prompt_tokens: int
    max_output_tokens: int
    model: str = ""
    num_places: int = 0
    """Places that the request takes at a decode worker of the model, one for each sample or beam;
    0: it needs no decode worker."""

    @property
    def num_tokens(self) -> int:
        """Expected cost: prompt tokens plus most output tokens; at least 1."""
        return max(1, self.num_prompt_tokens + self.max_output_tokens)


@dataclass(eq=False)
class AdmissionEntry:
    """Admission record of one request, for `explain`. It outlives the request."""

    arrival: int = 0
    """Number among the requests that asked for admission, from 1; 0: it has not asked."""
    turn: int = 0
    """Number among the admitted requests, from 1; 0: it was not admitted."""
    place: _Place | None = None
    """Entry in the queue while the request waits."""


@dataclass(frozen=True)
class QueuePosition:
    """Queue position of a waiting request, and what it waits for. A value."""

    position: int
    """Position in the line of its tenant and priority, from 1."""
    num_in_line: int
    num_waiting: int
    """Requests in all lines."""
    waits_for: str
    due_in_s: float
    expected_wait_s: float | None
    """Expected wait until the request starts; None: not known yet."""


@dataclass(eq=False)
class AdmissionTicket:
    """Ticket of one active request, through which it reports progress and used tokens."""

    asked: AdmissionRequest
    on_change: Callable[[AdmissionTicket, int, int], None]
    """Called with the ticket and its new `tokens_ahead` and `places_ahead`."""
    tokens_ahead: int
    """Prompt tokens that count as ahead; 0 once the first output token is out."""
    places_ahead: int
    """Decode places that it needs; 0 once a decode worker took it on and counts them itself."""
    num_tokens_used: int = 0

    def on_reserved(self) -> None:
        """Record that a decode worker has taken the request on."""
        if self.places_ahead:
            self.on_change(self, self.tokens_ahead, 0)

    def on_tokens(self, num_tokens: int) -> None:
        """Record generated tokens; with the first ones another prompt may start."""
        self.num_tokens_used += num_tokens
        if self.tokens_ahead or self.places_ahead:
            self.on_change(self, 0, 0)


@dataclass
class AdmissionCounts:
    """Counters of one router since its start."""

    num_asked: int = 0
    num_admitted: int = 0
    num_waited: int = 0
    """Admitted requests that had to wait."""
    refused: Counter[str] = field(default_factory=Counter)
    """Refused requests by reason, one of REASONS."""


@dataclass(eq=False)
class _Place:
    """One waiting request with the future that its turn resolves."""

    asked: AdmissionRequest
    entry: AdmissionEntry
    waiting: QueuedRequest
    turn: asyncio.Future[AdmissionTicket]


class Admission:
    """Admission control of one router; see the module docstring."""

    def __init__(
        self,
        settings: AdmissionSettings,
        rates: RateLimits,
        *,
        limits_of: Callable[[str], TenantLimits | None] = lambda tenant: None,
        step_tokens: Callable[[], Sequence[int]] = lambda: (DEFAULT_STEP_TOKENS,),
        has_decode_place: Callable[[str, int], bool] = lambda model, num_ahead: True,
        clock: Clock = time.monotonic,
    ) -> None:
        """Create the admission of one router, without requests.

        Args:
            limits_of: returns a tenant's own limits; None: it has none.
            step_tokens: returns the most tokens of one step for each prefill worker; never empty.
            has_decode_place: returns whether the model's decode workers have a free place, beside
                the given number for admitted requests that have not reached them yet. Call `look`
                when this may have changed.
        """
        self._settings = settings
        self._rates = rates
        self._own_limits_of = limits_of
        self._step_tokens = step_tokens
        self._has_decode_place = has_decode_place
        self._clock = clock
        self._queue = FairQueue()
        self._places: dict[QueuedRequest, _Place] = {}
        self._active: set[AdmissionTicket] = set()
        self._num_active: Counter[str] = Counter()
        self._tokens_ahead = 0
        self._places_ahead = Counter[str]()  # by model
        self._paces = defaultdict[str, ServiceRate](ServiceRate)  # by pool
        self._giving_back: set[asyncio.Task[None]] = set()
        self._others = TenantLimits(
            max_requests_per_min=settings.max_requests_per_min,
            max_tokens_per_min=settings.max_tokens_per_min,
        )
        self.counts = AdmissionCounts()

    @property
    def num_active(self) -> int:
        """Number of active requests."""
        return len(self._active)

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._places)

    @property
    def problem(self) -> str:
        """Problem of the rate limits, for the cluster status; empty: none."""
        return self._rates.problem

    @asynccontextmanager
    async def admit(
        self, asked: AdmissionRequest, deadline: Deadline, entry: AdmissionEntry | None = None
    ) -> AsyncIterator[AdmissionTicket]:
        """Run the body as an active request, after a wait in the queue where needed.

        `entry` is kept up to date meanwhile.

        Raises: NoCapacity when the request is refused, with the time after which a retry makes
            sense; DeadlineExceeded when the deadline passes in the queue.
        """
        entry = entry if entry is not None else AdmissionEntry()
        self.counts.num_asked += 1
        entry.arrival = self.counts.num_asked
        limits = self._limits_of(asked.tenant)
        await self._charge(asked, limits)
        ticket: AdmissionTicket | None = None
        try:
            ticket = await self._wait_for_turn(asked, limits, deadline, entry)
            yield ticket
        except asyncio.CancelledError:
            if ticket is not None:
                # The client left while the prompt was computed: that work is charged.
                used = max(ticket.num_tokens_used, asked.num_prompt_tokens)
                ticket.num_tokens_used = used
            raise
        finally:
            used = 0
            if ticket is not None:
                used = ticket.num_tokens_used
                self._leave(ticket)
            self._give_back(asked.tenant, limits, asked.num_tokens - used)

    async def _charge(self, asked: AdmissionRequest, limits: TenantLimits) -> None:
        """Charge the request's rate limits. Raises: NoCapacity when it is over one."""
        take = self._rates.take(asked.tenant, limits, asked.num_tokens)
        try:
            if limits.max_tokens_per_min:
                # A request cancelled here may be charged all the same: then the charge is returned.
                charging = asyncio.create_task(take)
                try:
                    await asyncio.shield(charging)
                except asyncio.CancelledError:
                    self._in_background(self._uncharge(charging, asked, limits))
                    raise
            else:
                await take
        except NoCapacity:
            self.counts.refused["rate"] += 1
            raise

    async def _uncharge(
        self, charging: asyncio.Task[None], asked: AdmissionRequest, limits: TenantLimits
    ) -> None:
        try:
            await charging
        except NoCapacity:
            return
        await self._rates.give_back(asked.tenant, limits, asked.num_tokens)

    async def close(self) -> None:
        """Wait until all returned tokens are in Redis; bounded by the timeout of Redis calls."""
        await asyncio.gather(*self._giving_back)

    def standing(self, entry: AdmissionEntry) -> QueuePosition | None:
        """Return the request's queue position; None: it does not wait (any more)."""
        place = entry.place
        if place is None or place.waiting not in self._places:
            return None
        waiting = place.waiting
        position, num_in_line = self._queue.position(waiting)
        return QueuePosition(
            position,
            num_in_line,
            len(self._queue),
            self._lacking(waiting),
            waiting.due_s - self._clock(),
            self._wait_s(waiting),
        )

    def _lacking(self, waiting: QueuedRequest) -> str:
        """Return what a waiting request waits for, with the setting that bounds it."""
        if self._is_blocked(waiting.tenant):
            return "the end of a request of its tenant (max_active_requests)"
        if len(self._active) >= self._settings.max_active_requests:
            return "the end of a request (router.admission.max_active_requests)"
        if waiting.pool and self._is_full(waiting.pool):
            return "a place at a decode worker (engine.max_num_running)"
        return "the first tokens of prompts before it (router.admission.num_steps_ahead)"

    def look(self) -> None:
        """Start waiting requests: decode workers may have free places."""
        self._start_next()

    def check_integrity(self) -> None:
        """Check the queue and the counts. Raises: Internal naming the broken invariant."""
        self._queue.check_integrity()
        if len(self._places) != len(self._queue):
            raise Internal(f"{len(self._places)} wait for {len(self._queue)} places in the queue")
        if self._tokens_ahead != sum(ticket.tokens_ahead for ticket in self._active):
            raise Internal("prompt tokens ahead differ from those of the active requests")
        places_ahead = Counter[str]()
        for ticket in self._active:
            places_ahead[ticket.asked.model] += ticket.places_ahead
        if self._places_ahead != places_ahead:
            raise Internal("places ahead differ from those of the active requests")
        if self._num_active != Counter(ticket.asked.tenant for ticket in self._active):
            raise Internal("active requests per tenant differ from the active requests")

    async def _wait_for_turn(
        self,
        asked: AdmissionRequest,
        limits: TenantLimits,
        deadline: Deadline,
        entry: AdmissionEntry,
    ) -> AdmissionTicket:
        self._start_next()
        pool = asked.model if asked.num_places else ""
        # Waiting requests cannot use the room that is left: their tenants are at their bounds, or
        # another model has no free place.
        if self._has_room() and not self._is_blocked(asked.tenant) and not self._is_full(pool):
            return self._enter(asked, entry)
        due_s = self._clock() + patience_s(deadline.left_s())
        waiting = QueuedRequest(
            asked.tenant, asked.priority, asked.num_tokens, limits.weight, pool, due_s
        )
        self._check_time(waiting, deadline)
        self._make_place(waiting, limits)
        place = _Place(asked, entry, waiting, asyncio.get_running_loop().create_future())
        entry.place = place
        self._queue.push(waiting)
        self._places[waiting] = place
        self._start_next()
        try:
            async with deadline.timeout("waiting to be admitted"):
                return await place.turn
        except BaseException:
            if waiting in self._places:
                del self._places[waiting]
                self._queue.remove(waiting)
                self._start_next()
            elif not place.turn.cancelled() and place.turn.exception() is None:
                self._leave(place.turn.result())  # its turn came in the same moment
            raise
        finally:
            entry.place = None

    def _check_time(self, waiting: QueuedRequest, deadline: Deadline) -> None:
        """Raises: NoCapacity when the expected wait is longer than the time to the deadline."""
        wait_s = self._wait_s(waiting)
        left_s = deadline.left_s()
        if wait_s is not None and wait_s > left_s:
            self.counts.refused["deadline"] += 1
            raise NoCapacity(
                f"it would wait for about {wait_s:.1f} s and has {left_s:.1f} s; try again later, "
                "or with more time",
                retry_after_s=min(_MAX_RETRY_S, max(1.0, wait_s - left_s)),
            )

    def _make_place(self, waiting: QueuedRequest, limits: TenantLimits) -> None:
        """Make room in the queue, if needed by refusing the newest request of the longest tenant.

        Raises: NoCapacity when the queue is full and no other request has to give way.
        """
        bound = limits.max_queued_requests or self._settings.max_queued_per_tenant
        if self._queue.num_of(waiting.tenant) >= bound:
            raise self._full("tenant_queue", waiting, f"{bound} requests of your tenant wait")
        if len(self._queue) < self._settings.max_queued_requests:
            return
        longest = self._queue.longest()
        if longest is None or self._queue.num_of(longest) <= self._queue.num_of(waiting.tenant) + 1:
            raise self._full("queue", waiting, f"{len(self._queue)} requests wait")
        victim = self._queue.newest_of(longest)
        if victim is None:
            raise Internal(f"{longest} has most requests waiting, and none is found")
        place = self._places.pop(victim)
        self._queue.remove(victim)
        if not place.turn.done():
            place.turn.set_exception(
                self._full("pushed_out", victim, "your tenant has most of the requests that wait")
            )

    def _full(self, reason: str, waiting: QueuedRequest, said: str) -> NoCapacity:
        self.counts.refused[reason] += 1
        wait_s = self._wait_s(waiting)
        retry_s = min(_MAX_RETRY_S, max(1.0, wait_s or 0.0))
        return NoCapacity(f"{said}; try again in {retry_s:.0f} s", retry_after_s=retry_s)

    def _wait_s(self, waiting: QueuedRequest) -> float | None:
        """Return the expected wait of a request in seconds; None: not known."""
        rate = self._paces[waiting.pool].tokens_per_s(self._clock())
        if rate is None:
            return None
        return self._queue.tokens_ahead(waiting, self._is_blocked) / rate

    def _has_room(self) -> bool:
        settings = self._settings
        bound = settings.num_steps_ahead * sum(self._step_tokens())
        return len(self._active) < settings.max_active_requests and self._tokens_ahead < bound

    def _is_full(self, pool: str) -> bool:
        """Return whether a further request would wait for a place at a decode worker of the pool.

        One free place is enough for a request with several samples: as many places as it needs may
        never be free at once.
        """
        return bool(pool) and not self._has_decode_place(pool, self._places_ahead[pool])

    def _is_blocked(self, tenant: str) -> bool:
        bound = self._limits_of(tenant).max_active_requests
        return bool(bound) and self._num_active[tenant] >= bound

    def _limits_of(self, tenant: str) -> TenantLimits:
        return self._own_limits_of(tenant) or self._others

    def _enter(self, asked: AdmissionRequest, entry: AdmissionEntry) -> AdmissionTicket:
        # One step less than a worker's part: another prompt fits beside a long one.
        most = max(1, self._settings.num_steps_ahead - 1) * max(self._step_tokens())
        tokens_ahead = min(asked.num_prompt_tokens, most)
        ticket = AdmissionTicket(asked, self._on_change, tokens_ahead, asked.num_places)
        self._active.add(ticket)
        self._num_active[asked.tenant] += 1
        self._tokens_ahead += ticket.tokens_ahead
        self._places_ahead[asked.model] += ticket.places_ahead
        self.counts.num_admitted += 1
        entry.turn = self.counts.num_admitted
        return ticket

    def _start_next(self) -> None:
        """Start the waiting requests that there is room for, in the queue's order."""
        full = set[str]()
        while self._places and self._has_room():
            full = {pool for pool in self._queue.num_for if self._is_full(pool)}
            waiting = self._queue.pop(self._is_blocked, full)
            if waiting is None:
                break
            place = self._places.pop(waiting)
            if not place.turn.done():  # else the request is leaving already
                self._paces[waiting.pool].on_start(self._clock(), waiting.num_tokens)
                self.counts.num_waited += 1
                place.turn.set_result(self._enter(place.asked, place.entry))
        has_room, now_s = self._has_room(), self._clock()
        for pool in {*self._paces, *self._queue.num_for}:
            # A wait for the same tenant's requests to end tells nothing of the cluster's rate.
            is_held_up = not has_room or pool in full
            is_backlog = pool in self._queue.num_for and is_held_up
            self._paces[pool].on_backlog(now_s, is_backlog=is_backlog)

    def _on_change(self, ticket: AdmissionTicket, tokens_ahead: int, places_ahead: int) -> None:
        self._tokens_ahead -= ticket.tokens_ahead - tokens_ahead
        self._places_ahead[ticket.asked.model] -= ticket.places_ahead - places_ahead
        ticket.tokens_ahead, ticket.places_ahead = tokens_ahead, places_ahead
        self._start_next()

    def _leave(self, ticket: AdmissionTicket) -> None:
        self._active.discard(ticket)
        self._tokens_ahead -= ticket.tokens_ahead
        self._places_ahead[ticket.asked.model] -= ticket.places_ahead
        self._num_active[ticket.asked.tenant] -= 1
        if not self._num_active[ticket.asked.tenant]:
            del self._num_active[ticket.asked.tenant]
        self._start_next()

    def _give_back(self, tenant: str, limits: TenantLimits, num_tokens: int) -> None:
        """Give unused tokens back in the background: the client does not wait for it."""
        if limits.max_tokens_per_min and num_tokens:
            self._in_background(self._rates.give_back(tenant, limits, num_tokens))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = start_task(work, "give back tokens")
        self._giving_back.add(task)
        task.add_done_callback(self._giving_back.discard)
