"""SimulatedCluster: a discrete-time simulation of prefill and decode workers under load, to test
the autoscaler's plan or another rule: it gives the latencies of requests while workers start, stop
and flip.

A prefill worker computes one prompt after the other. A decode worker runs all of its streams at
once, in steps of a + b * batch seconds. The router sends a prompt to the prefill worker with the
fewest queued tokens, once a decode worker has a place for its stream. A started worker serves after
`start_s`, a flipped one after `flip_s`. Streams of a decode worker that stops or flips continue on
another one; a prefill worker finishes its prompts first. Deterministic; not thread-safe.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field, replace

from process.rpc_errors import Internal
from services.autoscaler.decision import Flip
from services.autoscaler.signals import (
    ByRole,
    DurationCounts,
    Observations,
    ObservedTraffic,
    ObservedWorker,
    Pool,
    Role,
    Work,
)

# ---- machines, workers and requests


@dataclass(frozen=True)
class Machines:
    """True speeds, sizes and delays of the simulated workers."""

    token_s: float = 1 / 25_000
    """Seconds of prefill for one prompt token."""
    step_s: float = 0.0066
    stream_s: float = 0.00005
    """A decode step takes step_s + stream_s * batch seconds."""
    max_streams: int = 64
    stream_blocks: int = 80
    num_blocks: int = 25_000
    start_s: float = 60.0
    flip_s: float = 5.0
    drain_s: float = 5.0
    """Shortest time until the device of a leaving worker is free."""


@dataclass
class SimulatedRequest:
    """Request of the simulated load, with its times in seconds of simulated time: arrival (`at_s`),
    dispatch, first token, end."""

    at_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    sent_s: float | None = None
    first_s: float | None = None
    end_s: float | None = None

    @property
    def num_uncached_tokens(self) -> int:
        """Prompt tokens to compute; at least 1."""
        return max(1, self.num_prompt_tokens - self.num_cached_tokens)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the arrival to the first token; None: there is no token yet."""
        return None if self.first_s is None else self.first_s - self.at_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds between two output tokens; None: the request has not ended."""
        if self.first_s is None or self.end_s is None:
            return None
        return (self.end_s - self.first_s) / max(1, self.num_output_tokens - 1)


@dataclass
class SimulatedWorker:
    """Simulated worker, with its queued prompts and its streams."""

    name: str
    role: Role
    serves_at_s: float
    leaves_at_s: float | None = None
    """Not None: the worker is draining, and its device is free at this time at the earliest."""
    is_flipping: bool = False
    prompts: deque[SimulatedRequest] = field(default_factory=deque)
    done_s: float = 0.0
    """Seconds already spent on the first prompt."""
    num_reserved: int = 0
    """Places reserved for streams of prompts that are not computed yet."""
    progress: float = 0.0
    """Decode steps so far: tokens that a stream would have received that was there from the
    start."""
    streams: list[tuple[float, int, SimulatedRequest]] = field(default_factory=list)
    """Heap of (progress at which the stream ends, tie-breaker, request)."""
    work: Work = field(default_factory=Work)
    """Work since the previous observation."""

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that this worker has yet to compute."""
        return sum(request.num_uncached_tokens for request in self.prompts)


# ---- the cluster

STEP_S = 0.05
"""Step of the simulation in seconds. Events within a step count as of its end, except the ends of
prompts, which are exact."""

BOUNDS_S = tuple(0.001 * 1.25**power for power in range(56))
"""Bounds of the histograms in seconds: 1 ms to 3.6 minutes, each 1.25 times the one before."""


class SimulatedCluster:
    """Simulation of the workers, the router and the requests of one model."""

    def __init__(self, machines: Machines, workers: ByRole[int]) -> None:
        """workers: numbers of workers that serve from the beginning."""
        self.machines = machines
        self.now_s = 0.0
        self.num_arrived = 0
        self.finished: list[SimulatedRequest] = []
        self._names = itertools.count(1)
        self._tie = itertools.count()
        self._workers: list[SimulatedWorker] = []
        for role in Role:
            for _ in range(workers.of(role)):
                self._start(role, 0.0)
        self._waiting: deque[SimulatedRequest] = deque()
        self._places: dict[int, SimulatedWorker] = {}
        """For each request in prefill, by `id`, the decode worker of its stream."""
        self._moving: deque[tuple[SimulatedRequest, float]] = deque()
        """Streams without a worker, and the number of tokens that they have yet to receive."""
        self._seen = ObservedTraffic(1.0)
        self._seen_at_s = 0.0
        self._ttft, self._tpot = _no_counts(), _no_counts()

    # ---- what is done to it

    def arrive(self, request: SimulatedRequest) -> None:
        """Add a request; the caller has advanced the simulation to its arrival time."""
        self._waiting.append(request)
        self.num_arrived += 1
        self._seen = replace(self._seen, num_arrived=self._seen.num_arrived + 1)

    def set(self, wanted: ByRole[int]) -> None:
        """Set the wanted numbers of workers; workers start and leave accordingly."""
        for role in Role:
            staying = [w for w in self._workers if w.role is role and w.leaves_at_s is None]
            for _ in range(wanted.of(role) - len(staying)):
                self._start(role, self.now_s + self.machines.start_s)
            # Those that do not serve yet go first, then those with the least to do.
            staying.sort(key=lambda w: (w.serves_at_s <= self.now_s, _load(w), w.name))
            for worker in staying[: max(0, len(staying) - wanted.of(role))]:
                self._leave(worker)

    def flip(self, flip: Flip) -> None:
        """Move one worker to the other role.

        Raises: KeyError for an unknown or leaving worker.
        """
        found = {w.name: w for w in self._workers if w.leaves_at_s is None}
        worker = found[flip.worker_id]
        self._hand_over(worker)
        worker.role, worker.is_flipping = flip.to, True
        worker.serves_at_s = self.now_s + self.machines.flip_s

    def advance(self, to_s: float) -> None:
        """Run the simulation up to the time `to_s`, in seconds."""
        while self.now_s < to_s - 1e-9:
            self._step(min(STEP_S, to_s - self.now_s))

    # ---- what is seen of it

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        streams = sum(len(w.streams) + len(w.prompts) for w in self._workers)
        return len(self._waiting) + len(self._moving) + streams

    def serving(self) -> ByRole[int]:
        """Return the numbers of workers that serve now."""
        return ByRole(len(self._ready(Role.PREFILL)), len(self._ready(Role.DECODE)))

    def present(self) -> ByRole[int]:
        """Return the numbers of workers that hold a device: starting, serving or leaving."""
        return ByRole(
            *(sum(worker.role is role for worker in self._workers) for role in Role),
        )

    def observe(self) -> Observations:
        """Return an observation, and start new counts: each event is in one observation only."""
        elapsed_s = self.now_s - self._seen_at_s
        has_workers = all(self._ready(role) for role in Role)
        num_waiting = len(self._waiting)
        traffic = replace(
            self._seen,
            elapsed_s=elapsed_s or STEP_S,
            ttft=DurationCounts(BOUNDS_S, tuple(self._ttft)),
            tpot=DurationCounts(BOUNDS_S, tuple(self._tpot)),
            num_waiting=0 if has_workers else num_waiting,
            num_queued=num_waiting if has_workers else 0,
            num_running=self.num_open - num_waiting,
        )
        seen = Observations(
            now_s=self.now_s,
            pools=ByRole(self._pool(Role.PREFILL), self._pool(Role.DECODE)),
            traffic=traffic if elapsed_s else None,
            routers_age_s=1.0,
            scale_age_s=0.0,
            num_flipping=sum(worker.is_flipping for worker in self._workers),
        )
        self._seen, self._seen_at_s = ObservedTraffic(1.0), self.now_s
        self._ttft, self._tpot = _no_counts(), _no_counts()
        for worker in self._workers:
            worker.work = Work()
        return seen

    def _pool(self, role: Role) -> Pool:
        workers = [worker for worker in self._workers if worker.role is role]
        staying = [worker for worker in workers if worker.leaves_at_s is None]
        return Pool(
            wanted=len(staying),
            num_ready=sum(worker.serves_at_s <= self.now_s for worker in staying),
            num_draining=len(workers) - len(staying),
            workers=tuple(self._view(w) for w in workers if w.serves_at_s <= self.now_s),
        )

    def _view(self, worker: SimulatedWorker) -> ObservedWorker:
        machines = self.machines
        num_streams = len(worker.streams)
        held = (num_streams + worker.num_reserved) * machines.stream_blocks
        return ObservedWorker(
            worker_id=worker.name,
            age_s=1.0,
            is_draining=worker.leaves_at_s is not None,
            can_flip=True,
            num_running=num_streams if worker.role is Role.DECODE else min(1, len(worker.prompts)),
            num_waiting=worker.num_reserved or max(0, len(worker.prompts) - 1),
            num_queued_tokens=worker.num_queued_tokens,
            num_blocks=machines.num_blocks,
            num_free_blocks=max(0, machines.num_blocks - held),
            work=worker.work,
        )

    def check_integrity(self) -> None:
        """Check that no request is lost or in two places, and that every reserved place belongs to
        a prompt.

        Raises: Internal.
        """
        there = [id(request) for request in self._waiting]
        there += [id(request) for request, _ in self._moving]
        for worker in self._workers:
            there += [id(request) for request in worker.prompts]
            there += [id(request) for _, _, request in worker.streams]
            num_kept = sum(place is worker for place in self._places.values())
            if num_kept != worker.num_reserved:
                raise Internal(f"{worker.name} keeps {worker.num_reserved} places for {num_kept}")
        if len(set(there)) != len(there) or len(there) + len(self.finished) != self.num_arrived:
            raise Internal(
                f"{self.num_arrived} requests arrived, {len(self.finished)} ended, "
                f"{len(there)} are there"
            )
        if len(self._places) != sum(len(worker.prompts) for worker in self._workers):
            raise Internal("not every prompt has a place for its stream, or nobody else")

    # ---- workers

    def _start(self, role: Role, serves_at_s: float) -> None:
        name = f"{role.value}-{next(self._names):03d}"
        self._workers.append(SimulatedWorker(name, role, serves_at_s))

    def _leave(self, worker: SimulatedWorker) -> None:
        is_serving = worker.serves_at_s <= self.now_s
        self._hand_over(worker)
        worker.leaves_at_s = self.now_s + (self.machines.drain_s if is_serving else 0.0)

    def _hand_over(self, worker: SimulatedWorker) -> None:
        for end, _, request in worker.streams:
            self._moving.append((request, end - worker.progress))
        worker.streams.clear()
        for number, place in self._places.items():
            if place is worker:
                self._places[number] = _NOWHERE
        worker.num_reserved = 0

    def _ready(self, role: Role) -> list[SimulatedWorker]:
        return [
            worker
            for worker in self._workers
            if worker.role is role
            and worker.serves_at_s <= self.now_s
            and worker.leaves_at_s is None
        ]

    # ---- time

    def _step(self, step_s: float) -> None:
        begin_s, self.now_s = self.now_s, self.now_s + step_s
        for worker in self._workers:
            if worker.prompts:
                self._prefill(worker, begin_s, step_s)
            if worker.streams:
                self._decode(worker, step_s)
            if worker.is_flipping and worker.prompts:
                worker.serves_at_s = self.now_s + self.machines.flip_s
            elif worker.is_flipping and worker.serves_at_s <= self.now_s:
                worker.is_flipping = False
        self._workers = [
            worker
            for worker in self._workers
            if worker.leaves_at_s is None or worker.leaves_at_s > self.now_s or worker.prompts
        ]
        self._place_moving()
        self._dispatch()

    def _dispatch(self) -> None:
        """Send waiting prompts to prefill workers while decode workers have places for their
        streams."""
        prefill, decode = self._ready(Role.PREFILL), self._ready(Role.DECODE)
        if not prefill:
            return
        queued = {worker.name: worker.num_queued_tokens for worker in prefill}
        while self._waiting:
            place = min(decode, key=_load, default=None)
            if place is None or not self._has_place(place):
                return
            request = self._waiting.popleft()
            request.sent_s = self.now_s
            worker = min(prefill, key=lambda w: (queued[w.name], w.name))
            queued[worker.name] += request.num_uncached_tokens
            worker.prompts.append(request)
            place.num_reserved += 1
            self._places[id(request)] = place
            waited_s = self._seen.queue_s + self.now_s - request.at_s
            self._seen = replace(self._seen, queue_s=waited_s)

    def _has_place(self, worker: SimulatedWorker) -> bool:
        num = len(worker.streams) + worker.num_reserved + 1
        machines = self.machines
        return num <= machines.max_streams and num * machines.stream_blocks <= machines.num_blocks

    def _prefill(self, worker: SimulatedWorker, begin_s: float, step_s: float) -> None:
        spent_s, num_tokens, token_s = 0.0, 0, self.machines.token_s
        while worker.prompts and spent_s < step_s:
            request = worker.prompts[0]
            needs_s = request.num_uncached_tokens * token_s - worker.done_s
            if needs_s > step_s - spent_s:
                worker.done_s += step_s - spent_s
                spent_s = step_s
                break
            spent_s += needs_s
            worker.done_s = 0.0
            num_tokens += request.num_uncached_tokens
            worker.prompts.popleft()
            self._first_token(request, begin_s + spent_s)
        # The tokens and seconds of an unfinished prompt are reported when it ends.
        busy_s = num_tokens * token_s
        work = worker.work
        worker.work = replace(
            work,
            num_steps=work.num_steps + (1 if num_tokens else 0),
            step_s=work.step_s + busy_s,
            num_computed_tokens=work.num_computed_tokens + num_tokens,
        )

    def _first_token(self, request: SimulatedRequest, at_s: float) -> None:
        request.first_s = at_s
        _count(self._ttft, at_s - request.at_s)
        place = self._places.pop(id(request))
        left = float(request.num_output_tokens - 1)
        if place is _NOWHERE:
            self._moving.append((request, left))
            return
        place.num_reserved -= 1
        heapq.heappush(place.streams, (place.progress + left, next(self._tie), request))

    def _place_moving(self) -> None:
        decode = self._ready(Role.DECODE)
        while self._moving and decode:
            place = min(decode, key=_load)
            if not self._has_place(place):
                return
            request, left = self._moving.popleft()
            heapq.heappush(place.streams, (place.progress + left, next(self._tie), request))

    def _decode(self, worker: SimulatedWorker, step_s: float) -> None:
        machines, batch = self.machines, len(worker.streams)
        one_s = machines.step_s + machines.stream_s * batch
        worker.progress += step_s / one_s
        work = worker.work
        num_steps = max(1, round(step_s / one_s))
        worker.work = replace(
            work,
            num_steps=work.num_steps + num_steps,
            step_s=work.step_s + num_steps * one_s,
            num_computed_tokens=work.num_computed_tokens + num_steps * batch,
            num_decode_tokens=work.num_decode_tokens + num_steps * batch,
        )
        while worker.streams and worker.streams[0][0] <= worker.progress:
            _, _, request = heapq.heappop(worker.streams)
            self._end(request)

    def _end(self, request: SimulatedRequest) -> None:
        request.end_s = self.now_s
        self.finished.append(request)
        seen, tpot_s = self._seen, request.tpot_s
        assert tpot_s is not None
        self._seen = replace(
            seen,
            num_finished=seen.num_finished + 1,
            num_prompt_tokens=seen.num_prompt_tokens + request.num_prompt_tokens,
            num_cached_tokens=seen.num_cached_tokens + request.num_cached_tokens,
            num_output_tokens=seen.num_output_tokens + request.num_output_tokens,
        )
        _count(self._tpot, tpot_s)


_NOWHERE = SimulatedWorker("nowhere", Role.DECODE, 0.0)
"""Place of a stream whose decode worker left before the stream began."""


def _load(worker: SimulatedWorker) -> tuple[int, str]:
    return len(worker.streams) + worker.num_reserved + len(worker.prompts), worker.name


def _no_counts() -> list[int]:
    return [0] * (len(BOUNDS_S) + 1)


def _count(counts: list[int], value_s: float) -> None:
    counts[bisect_left(BOUNDS_S, value_s)] += 1
