"""Admission: whether a request is served now, waits in the fair queue, or is refused at once.

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
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from process.api_keys import TenantLimits
from process.background_tasks import start_task
from process.deadline import Clock, Deadline
from process.errors import Internal, NoCapacity
from services.router.admission_queue import FairQueue, Waiting, patience_s
from services.router.admission_settings import AdmissionSettings
from services.router.rate_limit import RateLimits
from services.router.service_rate import ServiceRate

REASONS = ("rate", "queue", "tenant_queue", "deadline", "pushed_out")
"""Why requests are refused: over a rate limit; the queue is full, or the tenant's part of it; its
time cannot suffice; it gave way to a tenant with fewer.
"""

DEFAULT_STEP_TOKENS = 512
"""Most tokens of a step while no prefill worker has said its own."""

_MAX_RETRY_S = 600.0


@dataclass(frozen=True)
class Asked:
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
class Entry:
    """One request before the admission, for its why-record. It outlives the request."""

    arrival: int = 0
    """Its number among the requests that came, from 1; 0: it did not come as far."""
    turn: int = 0
    """Its number among those that were admitted, from 1; 0: it was not."""
    place: _Place | None = None
    """While it waits."""


@dataclass(frozen=True)
class Standing:
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
class Ticket:
    """One active request. It says what it uses: `num_tokens_used` counts up as that is known."""

    asked: Asked
    on_change: Callable[[Ticket, int, int], None]
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

    asked: Asked
    entry: Entry
    waiting: Waiting
    turn: asyncio.Future[Ticket]


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
        self._places: dict[Waiting, _Place] = {}
        self._active: set[Ticket] = set()
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
        self, asked: Asked, deadline: Deadline, entry: Entry | None = None
    ) -> AsyncIterator[Ticket]:
        """Run the body as an active request; `entry` is kept up to date meanwhile.

        Raises: NoCapacity before any work, with the time after which a retry makes sense;
            DeadlineExceeded in the queue.
        """
        entry = entry if entry is not None else Entry()
        self.counts.num_asked += 1
        entry.arrival = self.counts.num_asked
        limits = self._limits_of(asked.tenant)
        await self._charge(asked, limits)
        ticket: Ticket | None = None
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

    async def _charge(self, asked: Asked, limits: TenantLimits) -> None:
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
        self, charging: asyncio.Task[None], asked: Asked, limits: TenantLimits
    ) -> None:
        try:
            await charging
        except NoCapacity:
            return
        await self._rates.give_back(asked.tenant, limits, asked.num_tokens)

    async def close(self) -> None:
        """See to the end what is under way to Redis; bounded by its timeout."""
        await asyncio.gather(*self._giving_back)

    def standing(self, entry: Entry) -> Standing | None:
        """None: it does not wait (any more)."""
        place = entry.place
        if place is None or place.waiting not in self._places:
            return None
        waiting = place.waiting
        position, num_in_line = self._queue.position(waiting)
        return Standing(
            position,
            num_in_line,
            len(self._queue),
            self._lacking(waiting),
            waiting.due_s - self._clock(),
            self._wait_s(waiting),
        )

    def _lacking(self, waiting: Waiting) -> str:
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
        self, asked: Asked, limits: TenantLimits, deadline: Deadline, entry: Entry
    ) -> Ticket:
        self._start_next()
        pool = asked.model if asked.num_places else ""
        # Room that is left now is for no request that waits: those are held up by their tenants'
        # bounds, or for want of places of another model.
        if self._has_room() and not self._is_blocked(asked.tenant) and not self._is_full(pool):
            return self._enter(asked, entry)
        due_s = self._clock() + patience_s(deadline.left_s())
        waiting = Waiting(
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

    def _check_time(self, waiting: Waiting, deadline: Deadline) -> None:
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

    def _make_place(self, waiting: Waiting, limits: TenantLimits) -> None:
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

    def _full(self, reason: str, waiting: Waiting, said: str) -> NoCapacity:
        self.counts.refused[reason] += 1
        wait_s = self._wait_s(waiting)
        retry_s = min(_MAX_RETRY_S, max(1.0, wait_s or 0.0))
        return NoCapacity(f"{said}; try again in {retry_s:.0f} s", retry_after_s=retry_s)

    def _wait_s(self, waiting: Waiting) -> float | None:
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

    def _enter(self, asked: Asked, entry: Entry) -> Ticket:
        # One step less than a worker's part: something else fits beside a long prompt.
        most = max(1, self._settings.num_steps_ahead - 1) * max(self._step_tokens())
        tokens_ahead = min(asked.num_prompt_tokens, most)
        ticket = Ticket(asked, self._on_change, tokens_ahead, asked.num_places)
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

    def _on_change(self, ticket: Ticket, tokens_ahead: int, places_ahead: int) -> None:
        self._tokens_ahead -= ticket.tokens_ahead - tokens_ahead
        self._places_ahead[ticket.asked.model] -= ticket.places_ahead - places_ahead
        ticket.tokens_ahead, ticket.places_ahead = tokens_ahead, places_ahead
        self._start_next()

    def _leave(self, ticket: Ticket) -> None:
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
