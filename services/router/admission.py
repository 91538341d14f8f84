"""ServiceRate: how fast waiting requests are taken up, as seen of late. Pure; moments come from
outside.

Measured only while somebody waits: how fast an idle cluster could be says nothing.

What a request is going to cost, before it is tokenized. Pure; an estimate, put right by what it
really used when it is over.

FairQueue: which of the requests that wait is next, by priority, tenants' shares and deadlines.

Classes of equal priority go strictly one before the other, but for every LOWER_EVERY-th turn, which
the lower ones get in rotation, so that none starves. Within a class tenants share by deficit round
robin over tokens (Shreedhar and Varghese, 1995): each turn a tenant is credited its quantum times
its weight, and served while its credit covers the request at its queue's head. So of two tenants
that always wait neither gets ahead of the other by more than a quantum and a request. Within a
tenant's line the request goes first that is due first; of equals, the one that came first.

A structure over values: no clock, no I/O. Laws: `check_integrity`. One asyncio loop.

Holding: requests wait for a worker that is not there but may come, instead of being refused.

`is_expected` is the rule for every such wait: of a new request and of an answer that has begun. A
worker may come if it served, or was starting, a short time ago. `Holding` is the wait of requests
for a model of which a role has never had a worker, or has none for longer than that:

    asked -> free     there are workers, or none is waited for
    asked -> refused  as many are held as may
    asked -> held -> free | refused (the time is up) | over (cancelled, its deadline)

Knows neither workers nor models: the caller's `find` raises while workers are missing, and `look`
is called after each look at the registry. Law: `num_held` is the number of callers inside `wait`.
One asyncio loop.

Admission: whether a request is served now, waits in the fair queue, or is refused at once.

    asked    -> refused   over a rate limit; the queue is full; its time cannot suffice
    asked    -> active    there is room, and no other waits for it
    asked    -> waiting   in the queue -> active, or over: cancelled, pushed out, out of time
    active   -> over

What bounds the active requests: their number, in all and per tenant; the prompt tokens whose first
token is not out yet; and, per model, the places that its decode workers have left for samples. The
last two keep the workers' own queues, which know no tenants, as short as they can be without the
workers standing idle: a request that waits in prefill is past the fair queue, and one that waits in
decode has shown its first token already. A prompt counts for less than one worker's part of the
tokens: a long one keeps no request from another worker.

Of one tenant and priority the request goes first that came first; one that has little time is in
line as if it had come earlier (`admission_queue.patience_s`). Where a request stands, and what it
waits for, says `standing`.

When the queue is full its longest tenant gives way: its newest request is refused in the stead of a
newcomer of a tenant that has fewer. Laws: `check_integrity`. Whose turn it is decides
`admission_queue`. One asyncio loop.
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
"""After so long a measurement counts half. Guessed: longer than a burst, shorter than a change of
the number of workers."""

LEAST_S = 1.0
"""Less time seen than this tells no rate."""


class ServiceRate:
    """See the module."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._since_s: float | None = None

    def on_backlog(self, now_s: float, *, is_backlog: bool) -> None:
        """From now on somebody waits, or nobody."""
        self._pass(now_s)
        self._since_s = now_s if is_backlog else None

    def on_start(self, now_s: float, num_tokens: int) -> None:
        """A request that had waited is served from now on."""
        if self._since_s is None:
            return  # not for want of room: it says nothing of the cluster
        self._pass(now_s)
        self._tokens += num_tokens

    def tokens_per_s(self, now_s: float) -> float | None:
        """None: not enough was seen. A queue that stands still brings it down."""
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
"""Of English text, about; of other text more tokens come, and are charged at the end."""

_MESSAGE_TOKENS = 8
"""What a chat template puts around one message, about."""


def asked_of(
    request: inference_pb2.GenerateRequest, tenant: str, model: str, *, default_max_tokens: int
) -> AdmissionRequest:
    """The request as admission sees it; `model`: by the name that the router has for it."""
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
class QueuedRequest:
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


def _due_s(waiting: QueuedRequest) -> float:
    return waiting.due_s


@dataclass
class _Line:
    """One tenant's requests of one class, in the order in which they are due."""

    weight: float
    requests: list[QueuedRequest] = field(default_factory=list)
    credit: float = 0.0
    num_tokens: Counter[str] = field(default_factory=Counter)
    """By pool."""

    def tokens_before(self, newcomer: QueuedRequest) -> int:
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

    def push(self, waiting: QueuedRequest) -> None:
        line = self.lines.get(waiting.tenant)
        if line is None:
            line = self.lines[waiting.tenant] = _Line(waiting.weight)
            self.ring.append(waiting.tenant)
        line.weight = waiting.weight  # as it is configured by now
        insort(line.requests, waiting, key=_due_s)  # behind its equals
        line.num_tokens[waiting.pool] += waiting.num_tokens

    def remove(self, waiting: QueuedRequest) -> None:
        line = self.lines[waiting.tenant]
        self._take_out(waiting)
        if line.requests:
            # Nobody saves up by asking for much and taking it back.
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
        """Credit at once all the rounds in which no request could be served."""
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

    def push(self, waiting: QueuedRequest) -> None:
        """Behind those of its tenant and class that are due before it or with it."""
        self._classes.setdefault(waiting.priority, _Class()).push(waiting)
        self._num_waiting[waiting.tenant] = self.num_of(waiting.tenant) + 1
        self.num_for[waiting.pool] += 1
        self.num_tokens += waiting.num_tokens

    def remove(self, waiting: QueuedRequest) -> None:
        """It waits no longer: cancelled, or its time is over."""
        self._classes[waiting.priority].remove(waiting)
        self._forget(waiting)

    def pop(
        self, is_blocked: IsBlocked = lambda tenant: False, full: Collection[str] = ()
    ) -> QueuedRequest | None:
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

    def newest_of(self, tenant: str) -> QueuedRequest | None:
        """The tenant's request that is due last, of its least urgent class."""
        for priority in sorted(self._classes):
            line = self._classes[priority].lines.get(tenant)
            if line is not None:
                return line.requests[-1]
        return None

    def position(self, waiting: QueuedRequest) -> tuple[int, int]:
        """Where it stands in the line of its tenant and class, from 1, and how many stand there."""
        requests = self._classes[waiting.priority].lines[waiting.tenant].requests
        return requests.index(waiting) + 1, len(requests)

    def tokens_ahead(
        self, newcomer: QueuedRequest, is_blocked: IsBlocked = lambda tenant: False
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
    """Whether a worker is away that may soon be there: it served, or was starting, less than
    `wait_s` ago.

    Args: seen_s: when each worker of the role last served or was starting, by id. here: those that
        serve now.
    """
    return any(now_s - at_s < wait_s for name, at_s in seen_s.items() if name not in here)


class Holding:
    """See the module."""

    def __init__(self, hold_s: float, max_requests: int) -> None:
        """hold_s: how long one request is held at most where no worker is expected; 0: not at
        all."""
        self._hold_s = hold_s
        self._max_requests = max_requests
        self._waiting: set[asyncio.Future[None]] = set()
        self.num_held = 0

    @property
    def is_on(self) -> bool:
        """Whether requests are held where no worker is expected."""
        return self._hold_s > 0

    def look(self) -> None:
        """Who may serve may have changed: all that are held look again."""
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
        """Until `find` does not raise Unavailable any more.

        Args: on_held: called when it must wait. is_coming: whether the missing workers are
            expected; while it holds, only `deadline` ends the wait.
        Returns: whether it had to. Raises: NoCapacity when as many are held as may; Unavailable,
        the last one of `find`, when the time is up; DeadlineExceeded.
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
        """Raises: Internal when more wait for news than are held."""
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
"""Why requests are refused: over a rate limit; the queue is full, or the tenant's part of it; its
time cannot suffice; it gave way to a tenant with fewer.
"""

DEFAULT_STEP_TOKENS = 512
"""Most tokens of a step while no prefill worker has said its own."""

_MAX_RETRY_S = 600.0


@dataclass(frozen=True)
class AdmissionRequest:
    """One request, before any work. Tokens are estimates: nothing is tokenized yet."""

    tenant: str
    priority: int
    num_prompt_tokens: int
    max_output_tokens: int
    model: str = ""
    num_places: int = 0
    """Places that it takes at a decode worker of the model, one for each sample or beam; 0: it
    needs no decode worker."""

    @property
    def num_tokens(self) -> int:
        """What it is expected to cost."""
        return max(1, self.num_prompt_tokens + self.max_output_tokens)


@dataclass(eq=False)
class AdmissionEntry:
    """One request before the admission, for its why-record. It outlives the request."""

    arrival: int = 0
    """Its number among the requests that came, from 1; 0: it did not come as far."""
    turn: int = 0
    """Its number among those that were admitted, from 1; 0: it was not."""
    place: _Place | None = None
    """While it waits."""


@dataclass(frozen=True)
class QueuePosition:
    """Where a request that waits stands now."""

    position: int
    """In the line of its tenant and priority, from 1."""
    num_in_line: int
    num_waiting: int
    """In all lines."""
    waits_for: str
    due_in_s: float
    expected_wait_s: float | None
    """Until its turn; None: not known yet."""


@dataclass(eq=False)
class AdmissionTicket:
    """One active request. It says what it uses: `num_tokens_used` counts up as that is known."""

    asked: AdmissionRequest
    on_change: Callable[[AdmissionTicket, int, int], None]
    """Called with the tokens and places that are left ahead of it."""
    tokens_ahead: int
    """Of its prompt; 0 once its first token is out."""
    places_ahead: int
    """Those it needs; 0 once a decode worker has taken it on, and counts them itself."""
    num_tokens_used: int = 0

    def on_reserved(self) -> None:
        """A decode worker has taken it on."""
        if self.places_ahead:
            self.on_change(self, self.tokens_ahead, 0)

    def on_tokens(self, num_tokens: int) -> None:
        """So many of its tokens are out; with the first ones another prompt may follow."""
        self.num_tokens_used += num_tokens
        if self.tokens_ahead or self.places_ahead:
            self.on_change(self, 0, 0)


@dataclass
class AdmissionCounts:
    """Since start."""

    num_asked: int = 0
    num_admitted: int = 0
    num_waited: int = 0
    """Of them, those that had to wait."""
    refused: Counter[str] = field(default_factory=Counter)
    """By reason, one of REASONS."""


@dataclass(eq=False)
class _Place:
    """Who waits for its turn."""

    asked: AdmissionRequest
    entry: AdmissionEntry
    waiting: QueuedRequest
    turn: asyncio.Future[AdmissionTicket]


class Admission:
    """See the module."""

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
        """`limits_of`: a tenant's own limits, None: it has none of its own. `step_tokens`: most
        tokens of one step of each prefill worker; of at least one. `has_decode_place`: whether the
        model's decode workers have a place left, beside so many of requests that are on their way
        there; `look` is to be called when there may be one.
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
        """Requests being served."""
        return len(self._active)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._places)

    @property
    def problem(self) -> str:
        """What is not as it should be; empty: nothing."""
        return self._rates.problem

    @asynccontextmanager
    async def admit(
        self, asked: AdmissionRequest, deadline: Deadline, entry: AdmissionEntry | None = None
    ) -> AsyncIterator[AdmissionTicket]:
        """Run the body as an active request; `entry` is kept up to date meanwhile.

        Raises: NoCapacity before any work, with the time after which a retry makes sense;
            DeadlineExceeded in the queue.
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
                # Its client left while the prompt was computed: nobody gets that for nothing.
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
        """Raises: NoCapacity over a rate limit."""
        take = self._rates.take(asked.tenant, limits, asked.num_tokens)
        try:
            if limits.max_tokens_per_min:
                # Who is cancelled here may be charged all the same: then it comes back.
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
        """See to the end what is under way to Redis; bounded by its timeout."""
        await asyncio.gather(*self._giving_back)

    def standing(self, entry: AdmissionEntry) -> QueuePosition | None:
        """None: it does not wait (any more)."""
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
        """What there is none of for a request that waits."""
        if self._is_blocked(waiting.tenant):
            return "the end of a request of its tenant (max_active_requests)"
        if len(self._active) >= self._settings.max_active_requests:
            return "the end of a request (router.admission.max_active_requests)"
        if waiting.pool and self._is_full(waiting.pool):
            return "a place at a decode worker (engine.max_num_running)"
        return "the first tokens of prompts before it (router.admission.num_steps_ahead)"

    def look(self) -> None:
        """Decode workers may have places by now."""
        self._start_next()

    def check_integrity(self) -> None:
        """Raises: Internal naming the law that is broken."""
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
        # Room that is left now is for no request that waits: those are held up by their tenants'
        # bounds, or for want of places of another model.
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
                self._leave(place.turn.result())  # its turn had come in the same moment
            raise
        finally:
            entry.place = None

    def _check_time(self, waiting: QueuedRequest, deadline: Deadline) -> None:
        """Raises: NoCapacity when the request's time would be over before its turn."""
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
        """Raises: NoCapacity when the queue is full and nobody has to give way."""
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
        """How long it would wait; None: not known."""
        rate = self._paces[waiting.pool].tokens_per_s(self._clock())
        if rate is None:
            return None
        return self._queue.tokens_ahead(waiting, self._is_blocked) / rate

    def _has_room(self) -> bool:
        settings = self._settings
        bound = settings.num_steps_ahead * sum(self._step_tokens())
        return len(self._active) < settings.max_active_requests and self._tokens_ahead < bound

    def _is_full(self, pool: str) -> bool:
        """Whether a further request would wait for a place at its decode worker. One free place is
        enough for a request with several samples: so many as it has may never be free at once."""
        return bool(pool) and not self._has_decode_place(pool, self._places_ahead[pool])

    def _is_blocked(self, tenant: str) -> bool:
        bound = self._limits_of(tenant).max_active_requests
        return bool(bound) and self._num_active[tenant] >= bound

    def _limits_of(self, tenant: str) -> TenantLimits:
        return self._own_limits_of(tenant) or self._others

    def _enter(self, asked: AdmissionRequest, entry: AdmissionEntry) -> AdmissionTicket:
        # One step less than a worker's part: something else fits beside a long prompt.
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
        """Requests that there is room for begin, in the queue's order."""
        full = set[str]()
        while self._places and self._has_room():
            full = {pool for pool in self._queue.num_for if self._is_full(pool)}
            waiting = self._queue.pop(self._is_blocked, full)
            if waiting is None:
                break
            place = self._places.pop(waiting)
            if not place.turn.done():  # else it is on its way out
                self._paces[waiting.pool].on_start(self._clock(), waiting.num_tokens)
                self.counts.num_waited += 1
                place.turn.set_result(self._enter(place.asked, place.entry))
        has_room, now_s = self._has_room(), self._clock()
        for pool in {*self._paces, *self._queue.num_for}:
            # A wait for the end of the same tenant's requests says nothing of the cluster's pace.
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
        """Off the request's path: its client waits for nothing of this."""
        if limits.max_tokens_per_min and num_tokens:
            self._in_background(self._rates.give_back(tenant, limits, num_tokens))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = start_task(work, "give back tokens")
        self._giving_back.add(task)
        task.add_done_callback(self._giving_back.discard)
