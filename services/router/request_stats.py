"""RequestLog: the router's record of running and recently ended requests, for the status, the live
page and `baton top`; with the measurements of a request's time (StageTimes) and KV (KvAccount).

`StageTimes` divides a request's time into stages. Each stage begins where the one before ended, so
the stages sum to the whole exactly, and those up to the first token to the time to first token. A
stage in which another process worked is split by that process's own account; the rest (network,
scheduling delay) goes to one named stage. When exactly within the stage the other process worked is
not known, so its parts are laid one after the other from the beginning.

`KvAccount` collects what each worker of a request reports about its KV, in the order in which they
worked. The entry of a worker that lost the request has a reason (`MOVED`, `LOST`). Prompt tokens
that a later worker computes although an earlier one had them count as recomputed for that reason,
which the workers themselves do not know. A worker that failed is assumed to have had the whole
prompt.

`RequestLog` follows each request with a RequestRecord: its tenant, state, times and KV account, but
no text. A record is live until the request ends, then kept among the last `num_kept`. Invariants:
the live records are those of the requests that the table of attempts has admitted; `totals` is the
sum over all ended requests.

`UsageHistory` keeps the changes of the log's totals for the last NUM_POINTS intervals, so that a
page that is opened shows the recent past.

No I/O. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from process.background_tasks import end_tasks, start_task
from process.deadline import Clock
from process.trace_spans import Value
from protos import common_pb2, inference_pb2
from services.router.admission import AdmissionEntry
from services.router.metrics import prompt_sources
from services.router.policies import DECODE, PREFILL, Choice

BEFORE_FIRST = frozenset(
    {"prefill_queue", "prefill_fetch", "prefill_compute", "decode_fetch", "decode_queue"}
)
"""Stages of workers' accounts that are over when the first token is drawn."""

Details = Callable[[], Mapping[str, Value]]
"""Function that returns a stage's span attributes; called only for a request that is traced."""


@dataclass(frozen=True, slots=True)
class Lap:
    """One uninterrupted piece of a stage; begin and end are seconds on the request's clock."""

    stage: str
    begin_s: float
    end_s: float
    details: Details | None = None


class StageTimes:
    """Seconds by stage, in the order in which stages first occurred."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._last_s = clock()
        self._seconds: dict[str, float] = {}
        self._laps: list[Lap] = []
        self.begin_s = self._last_s
        """Moment of creation, on the clock."""
        self.first_token_s: float | None = None
        """Moment at which the first token was sent, on the clock; None: none was."""

    def mark(self, stage: str, details: Details | None = None) -> None:
        """Book the time since the last mark as `stage`."""
        begin_s, end_s = self._lap()
        cut_s = self.cut(begin_s, end_s)
        self._add(stage, begin_s, cut_s, details)
        self._add(stage, cut_s, end_s, details)

    def mark_split(
        self,
        parts: Iterable[tuple[str, float]],
        rest: str,
        *,
        wire: str = "",
        details: Details | None = None,
    ) -> None:
        """Book the time since the last mark as `parts` and, for what is left, as `rest`. If the
        first token was sent in between, what is left before it is booked as `wire` (if given).

        Args: parts: (stage, seconds) as another process measured them.
        """
        begin_s, end_s = self._lap()
        known = [(stage, max(0.0, seconds)) for stage, seconds in parts]
        cut_s = self.cut(begin_s, end_s)
        if cut_s > begin_s:
            before = [part for part in known if part[0] in BEFORE_FIRST]
            known = [part for part in known if part[0] not in BEFORE_FIRST]
            self._lay(before, wire or rest, begin_s, cut_s, details)
        self._lay(known, rest, cut_s, end_s, details)

    def first_token(self) -> float:
        """Record that a token was sent; only the first call counts. Returns: the time to first
        token in seconds."""
        if self.first_token_s is None:
            self.first_token_s = self._clock()
        return self.first_token_s - self.begin_s

    def cut(self, begin_s: float, end_s: float) -> float:
        """Return the moment of the first token clamped to [begin_s, end_s]; `begin_s` when there is
        none."""
        first_s = self.first_token_s
        return begin_s if first_s is None else min(max(first_s, begin_s), end_s)

    def stages(self) -> Sequence[tuple[str, float]]:
        """Return (stage, seconds) so far."""
        return tuple(self._seconds.items())

    def laps(self) -> Sequence[Lap]:
        """Return all pieces so far, each beginning where the one before ended; none is empty. A
        piece never spans the moment of the first token."""
        return tuple(self._laps)

    @property
    def last_s(self) -> float:
        """Moment of the last mark, on the clock."""
        return self._last_s

    @property
    def total_s(self) -> float:
        """Seconds from the beginning to the last mark; the sum of the stages up to rounding."""
        return self._last_s - self.begin_s

    @property
    def elapsed_s(self) -> float:
        """Seconds from the beginning until now."""
        return self._clock() - self.begin_s

    def _lap(self) -> tuple[float, float]:
        """Set a mark. Returns: the last mark and the new one."""
        begin_s, self._last_s = self._last_s, self._clock()
        return begin_s, self._last_s

    def _lay(
        self,
        parts: Sequence[tuple[str, float]],
        rest: str,
        begin_s: float,
        end_s: float,
        details: Details | None,
    ) -> None:
        """Lay `parts` from the beginning on, then `rest` to the end."""
        total_s = sum(seconds for _, seconds in parts)
        # The clocks of two processes drift by parts in a million: scale the account down to the
        # time that passed here.
        scale = min(1.0, (end_s - begin_s) / total_s) if total_s > 0 else 1.0
        at_s = begin_s
        for stage, seconds in parts:
            until_s = min(end_s, at_s + seconds * scale)
            self._add(stage, at_s, until_s, details)
            at_s = until_s
        self._add(rest, at_s, end_s, details)

    def _add(self, stage: str, begin_s: float, end_s: float, details: Details | None) -> None:
        """Add a piece to a stage; an empty piece adds no lap."""
        self._seconds[stage] = self._seconds.get(stage, 0.0) + (end_s - begin_s)
        if end_s <= begin_s:
            return
        last = self._laps[-1] if self._laps and begin_s != self.first_token_s else None
        if last is not None and last.stage == stage and last.details is details is None:
            # A request that waits for a worker marks the same stage many times: merge the pieces.
            begin_s = self._laps.pop().begin_s
        self._laps.append(Lap(stage, begin_s, end_s, details))


MOVED = "moved"
"""Reason: the worker was leaving and moved the request."""
LOST = "worker_lost"
"""Reason: the worker failed."""


_ALL = 2**63
"""Number of tokens greater than every prompt."""


class KvAccount:
    """KV accounts of one request's workers."""

    def __init__(self) -> None:
        self._legs: list[common_pb2.KvLeg] = []
        self._expected: common_pb2.KvLeg | None = None
        self._again = ""
        self._num_reached = 0
        """Prompt tokens, counted from the first, whose KV some worker has had."""

    @property
    def legs(self) -> tuple[common_pb2.KvLeg, ...]:
        """The accounts so far, in order."""
        return tuple(self._legs)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that did not have to be computed: by the account of the first prefill
        worker, or of the decode worker where no prefill worker was asked; by the expectation until
        there is an account."""
        told = [leg for leg in self._legs if leg.num_tokens_computed or _num_found(leg)]
        expected = [self._expected] if self._expected is not None else []
        by_prefill = [leg for leg in told if leg.role == PREFILL]
        return next(map(_num_found, [*by_prefill, *told, *expected]), 0)

    def expect(self, num_tokens_found: int) -> None:
        """Set how many prompt tokens the next worker is expected to find cached, for messages that
        are sent before the worker's account comes."""
        self._expected = common_pb2.KvLeg(num_tokens_local=num_tokens_found)

    def add(self, leg: common_pb2.KvLeg, block_size: int, ended_by: str = "") -> None:
        """Add a worker's own account.

        Args:
            block_size: tokens in a block of the worker's cache.
            ended_by: `MOVED` or `LOST`; empty when the worker did its part.
        """
        num_found, num_computed = _num_found(leg), leg.num_tokens_computed
        num_again = min(num_computed, self._num_reached - num_found)
        if self._again and num_again > 0:
            num_blocks = -(-num_again // block_size)
            leg.recomputed.add(reason=self._again, num_blocks=num_blocks)
        self._num_reached = max(self._num_reached, num_found + num_computed)
        self._again = ""
        leg.ended_by = ended_by
        self._legs.append(leg)

    def add_silent(self, worker_id: str, incarnation: str, ended_by: str) -> None:
        """Add a decode worker that gave no account: it failed, or left before it did anything."""
        if ended_by == LOST:
            self._num_reached = _ALL
        self._legs.append(
            common_pb2.KvLeg(
                role=DECODE, worker_id=worker_id, incarnation=incarnation, ended_by=ended_by
            )
        )

    def recompute_for(self, reason: str) -> None:
        """Set the reason under which prompt tokens that the next worker computes again are counted;
        empty: they are not counted here."""
        self._again = reason


def _num_found(leg: common_pb2.KvLeg) -> int:
    """Return the prompt tokens that the worker had in its cache or read from a store."""
    return leg.num_tokens_local + sum(count.num_tokens for count in leg.from_store)


INTERVAL_S = 2.0
NUM_POINTS = 300
"""Points that are kept: ten minutes."""


class UsageHistory:
    """Time series of hit rates, tokens and latencies of this router, one point each interval."""

    def __init__(
        self,
        totals: Callable[[], Totals],
        levels: Callable[[], tuple[int, int]],
        *,
        wall_ns: Callable[[], int] = time.time_ns,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """levels: returns the requests in flight at this router, and those that wait at workers."""
        self._totals = totals
        self._levels = levels
        self._wall_ns = wall_ns
        self._interval_s = interval_s
        self._before = deepcopy(totals())
        self._points: deque[inference_pb2.UsagePoint] = deque(maxlen=NUM_POINTS)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to take a point every interval."""
        self._task = start_task(self._run(), "usage history")

    async def stop(self) -> None:
        """Stop taking points."""
        await end_tasks([self._task])
        self._task = None

    @property
    def points(self) -> Sequence[inference_pb2.UsagePoint]:
        """The points, oldest first."""
        return tuple(self._points)

    def take_point(self) -> None:
        """Close the current interval and add its point."""
        now, before = deepcopy(self._totals()), self._before
        self._before = now
        num_first = now.num_first_tokens - before.num_first_tokens
        num_in_flight, num_waiting = self._levels()
        self._points.append(
            inference_pb2.UsagePoint(
                unix_ms=self._wall_ns() // 1_000_000,
                num_tokens_computed=now.sources["computed"] - before.sources["computed"],
                num_tokens_local=now.sources["local"] - before.sources["local"],
                num_tokens_from_store=now.sources["store"] - before.sources["store"],
                num_output_tokens=now.num_output_tokens - before.num_output_tokens,
                num_finished=now.num_finished - before.num_finished,
                num_failed=now.num_failed - before.num_failed,
                first_token_s=(
                    (now.first_token_s - before.first_token_s) / num_first if num_first else 0.0
                ),
                num_in_flight=num_in_flight,
                num_waiting=num_waiting,
            )
        )

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            self.take_point()


NUM_KEPT = 256
MAX_SPANS = 64
"""Stage spans of one record; a request that waits long for room has two for each try."""
MANY = "many tries"


class Flow(Protocol):
    """State of a request that its record shows; RequestLifecycle implements it."""

    @property
    def state(self) -> Enum:
        """Enum member whose value says in words what the request is doing."""

    @property
    def choice(self) -> Choice | None:
        """The workers chosen last; None: none yet."""


class Times(Protocol):
    """Stage times that a record shows; StageTimes implements it."""

    @property
    def begin_s(self) -> float: ...
    @property
    def elapsed_s(self) -> float: ...
    def laps(self) -> Sequence[Lap]: ...


@dataclass
class Totals:
    """Sums over all requests that ended since start."""

    num_finished: int = 0
    num_failed: int = 0
    num_output_tokens: int = 0
    num_first_tokens: int = 0
    first_token_s: float = 0.0
    sources: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("computed", "local", "store"), 0)
    )


class RequestRecord:
    """Record of one request. `flow` is set once there is a lifecycle; it and the times are released
    at the end."""

    def __init__(
        self, request_id: str, tenant: str, model: str, times: Times, arrived_unix_ms: int
    ) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.model = model
        self.entry = AdmissionEntry()
        """State of the request in admission."""
        self.flow: Flow | None = None
        self.doing = "waiting to be admitted"
        """What the request is doing while there is no `flow`."""
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.first_token_s = 0.0
        self.outcome = ""
        self.code = ""
        self._times: Times | None = times
        self._ended: inference_pb2.RequestInfo | None = None
        self._provenance: common_pb2.Provenance | None = None
        self._arrived_unix_ms = arrived_unix_ms

    def is_of(self, request_id: str, tenant: str) -> bool:
        """Return whether the record has this id and tenant; empty matches any."""
        return request_id in ("", self.request_id) and tenant in ("", self.tenant)

    def on_message(self, message: inference_pb2.GenerateResponse) -> None:
        """Count a message that was sent."""
        self.num_output_tokens += len(message.token_ids)
        if message.token_ids and not self.first_token_s and self._times is not None:
            self.first_token_s = self._times.elapsed_s
        if message.HasField("provenance"):
            self._provenance = message.provenance

    def end(self) -> None:
        """Freeze the record as a message, and release everything else."""
        self._ended = self.to_proto()
        self._times = self.flow = None

    def to_proto(self) -> inference_pb2.RequestInfo:
        """Return the record as of now."""
        if self._ended is not None:
            return self._ended
        told = inference_pb2.RequestInfo(
            request_id=self.request_id,
            tenant=self.tenant,
            model=self.model,
            arrived_unix_ms=self._arrived_unix_ms,
            outcome=self.outcome,
            code=self.code,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            first_token_s=self.first_token_s,
            provenance=self._provenance,
        )
        if not self.outcome:
            told.state = self.flow.state.value if self.flow is not None else self.doing
        choice = self.flow.choice if self.flow is not None else None
        if choice is not None:
            told.prefill_id, told.decode_id = choice.prefill_id or "", choice.decode_id or ""
        if self._times is not None:
            told.elapsed_s = self._times.elapsed_s
            told.spans.extend(_spans(self._times, told.state))
        return told

    @property
    def provenance(self) -> common_pb2.Provenance | None:
        """The request's account, once it was sent."""
        return self._provenance


class RequestLog:
    """Records of the requests of this router, and their totals."""

    def __init__(
        self, *, num_kept: int = NUM_KEPT, wall_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._wall_ns = wall_ns
        self._live: dict[RequestRecord, None] = {}
        self._ended: deque[RequestRecord] = deque(maxlen=num_kept)
        self.totals = Totals()

    @property
    def num_live(self) -> int:
        """Number of requests that are being followed."""
        return len(self._live)

    @contextmanager
    def follow(
        self, request_id: str, tenant: str, model: str, times: Times
    ) -> Iterator[RequestRecord]:
        """Context manager: keep a live record of one request while the body serves it. The body
        sets the outcome."""
        record = RequestRecord(request_id, tenant, model, times, self._wall_ns() // 1_000_000)
        self._live[record] = None
        try:
            yield record
        finally:
            del self._live[record]
            record.end()
            self._count(record)
            self._ended.append(record)

    def newest(self, num: int) -> list[inference_pb2.RequestInfo]:
        """Return at most `num` records: running requests, newest first, then those that
        ended last."""
        return [record.to_proto() for record in itertools.islice(self._newest(), num)]

    def find(self, request_id: str, tenant: str = "") -> RequestRecord | None:
        """Return the newest request with this id and tenant (empty: any); None: it is not known, or
        not any more."""
        return next((one for one in self._newest() if one.is_of(request_id, tenant)), None)

    def ids_with(self, prefix: str, tenant: str = "") -> set[str]:
        """Return the request ids that begin with `prefix`, of this tenant (empty: any)."""
        return {
            one.request_id
            for one in self._newest()
            if tenant in ("", one.tenant) and one.request_id.startswith(prefix)
        }

    def _newest(self) -> Iterator[RequestRecord]:
        """Return all records: running requests, newest first, then ended ones, newest first."""
        return itertools.chain(reversed(self._live), reversed(self._ended))

    def _count(self, record: RequestRecord) -> None:
        """Add an ended request to the totals."""
        totals = self.totals
        totals.num_finished += record.outcome == "finished"
        totals.num_failed += record.outcome == "failed"
        totals.num_output_tokens += record.num_output_tokens
        totals.num_first_tokens += record.first_token_s > 0
        totals.first_token_s += record.first_token_s
        if record.provenance is not None:
            for source, num_tokens in prompt_sources(record.provenance).items():
                totals.sources[source] += num_tokens


def _spans(times: Times, state: str) -> Iterator[inference_pb2.StageSpan]:
    """Return the stages end to end, then the state since the last of them. Successive pieces of one
    stage are merged; when there are too many, the middle ones become one piece, named `MANY`."""
    merged: list[tuple[str, float, float]] = []
    for lap in times.laps():
        begin_s, end_s = lap.begin_s - times.begin_s, lap.end_s - times.begin_s
        if merged and merged[-1][0] == lap.stage:
            begin_s = merged.pop()[1]
        merged.append((lap.stage, begin_s, end_s))
    if len(merged) > MAX_SPANS:
        half = MAX_SPANS // 2
        gap = (MANY, merged[half][1], merged[-half][1])
        merged = [*merged[:half], gap, *merged[-half:]]
    if state:
        merged.append((state, merged[-1][2] if merged else 0.0, times.elapsed_s))
    for stage, begin_s, end_s in merged:
        yield inference_pb2.StageSpan(stage=stage, begin_s=begin_s, end_s=end_s)
