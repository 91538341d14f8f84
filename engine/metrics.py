"""EngineMetrics: the engine's own counts and histograms; EngineStats: its levels and totals now.

Plain Python: it knows no exporter, no metric names, no tensors, and no clock but the one that it is
given. The engine calls these methods in a request's life:

    on_reserve, on_start, on_first_scheduled, on_tokens ..., on_finish (per sample), on_end

    queue time  start -> first scheduled: the request could have run, and waited for its turn
    TTFT        reserve -> first token, as the caller sees it; not measured for a request whose
                first token another engine has sampled
    ITL         between two steps that gave one sample tokens; the tokens of one step count once
    TPOT        (last token - first step's) / tokens after the first step, per sample that ended

A live request has one record here, which `on_end` removes; every method is O(1). Engine thread
only; a snapshot is a frozen value for any thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.errors import IntegrityError
from engine.request import FinishReason, RequestState

if TYPE_CHECKING:  # clients of an engine in another process import this module without torch
    from engine.kv.cache_manager import KVCacheManager
    from engine.sequence_group import Group

STEP_BOUNDS_S = (
    *(0.000_25, 0.000_5, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0),
)
"""Upper bounds in seconds of the buckets of per-step durations (step time, ITL, TPOT). Fine between
1 and 100 ms, where people notice; guessed beyond."""

REQUEST_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0, 1.5),
    *(2.5, 4.0, 6.0, 10.0, 20.0, 40.0, 80.0, 160.0),
)
"""Upper bounds in seconds of the buckets of per-request durations (TTFT, queue time)."""

RATE_WINDOW_S = 10.0
"""Seconds of the past over which throughputs are computed. Guessed: long enough for several steps
of a slow model, short enough to show a change of load."""


@dataclass(frozen=True)
class HistogramSnapshot:
    """The buckets of a histogram at one moment. `counts[i]` observations were at most `bounds[i]`
    and above the bound before; the last count is of those above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float
    count: int

    @property
    def mean(self) -> float:
        """The mean of the observations; 0 if there are none."""
        return self.sum / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """Return the upper bound of the bucket in which this share (0 to 1) of observations is
        reached; inf beyond the last bound, 0 without observations."""
        seen = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            if seen and seen >= share * self.count:
                return bound
        return 0.0


class Histogram:
    """A histogram with fixed bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.count = 0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        self.count += 1

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self.bounds, tuple(self.counts), self.sum, self.count)


@dataclass(frozen=True)
class MetricsSnapshot:
    """The engine's counts and histograms since start, at one moment. Pairs are sorted by name."""

    queue_s: HistogramSnapshot
    ttft_s: HistogramSnapshot
    itl_s: HistogramSnapshot
    tpot_s: HistogramSnapshot
    step_s: HistogramSnapshot

    num_requests: int
    """Number of requests reserved since start."""
    num_live_requests: int
    ended: tuple[tuple[str, int], ...]
    """(outcome, number of requests): "finished", "moved", "aborted", or the name of the error that
    ended them."""
    finished: tuple[tuple[str, int], ...]
    """(finish reason, number of samples)."""
    preemptions: tuple[tuple[str, int], ...]
    """(cause, number of preemptions)."""

    num_prompt_tokens: int
    """Number of prompt tokens of all requests reserved: those to prefill without a cache."""
    num_cached_tokens: int
    """Number of prompt tokens found in the device cache."""
    num_loaded_tokens: int
    """Number of prompt tokens whose KV the caller loaded before `start`, without those found in the
    device cache."""
    num_prefill_tokens: int
    """Number of tokens computed for prompts, and recomputed after a preemption."""
    num_decode_tokens: int
    """Number of tokens computed for output tokens after the first, accepted draft tokens
    included."""
    num_output_tokens: int
    """Number of output tokens, sampled or forced by a grammar."""
    num_guessed_tokens: int
    """Number of draft tokens that were computed, accepted or not."""
    num_kept_tokens: int
    """Number of draft tokens that were accepted."""

    num_blocks: int
    num_used_blocks: int
    """Number of blocks referenced after the last step."""
    max_used_blocks: int

    prefill_tokens_per_s: float
    """Throughput in tokens per second over the last RATE_WINDOW_S seconds, idle time included."""
    decode_tokens_per_s: float

    @property
    def hit_rate(self) -> float:
        """Cached prompt tokens / prompt tokens, over all requests; 0 before the first request.
        Source: Zheng et al. 2024, section 3."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def cache_utilisation(self) -> float:
        """Share of the KV blocks that requests use, 0 to 1."""
        return self.num_used_blocks / self.num_blocks


@dataclass(frozen=True)
class EngineStats:
    """The engine's present levels, and counts since start. A frozen value for any thread."""

    num_reserved: int
    num_waiting: int
    num_running: int
    num_holding: int

    num_blocks: int
    num_free_blocks: int
    """Number of blocks that were never used or are evicted, that are free once the pending step is
    over, or that only hold draft tokens of a step that can be given up."""
    num_cached_blocks: int
    """Number of cached blocks that no request references."""
    num_referenced_blocks: int
    """Number of all other blocks that requests have."""
    num_quarantined_blocks: int

    num_steps: int
    num_computed_tokens: int
    """Number of tokens that the model computed."""
    num_output_tokens: int
    num_local_prefix_tokens: int
    """Number of prompt tokens found in the device cache."""
    num_evicted_blocks: int

    num_preempted: int = 0
    """Number of requests with a sample that is PREEMPTED, PARKED or SWAPPING; counted as waiting,
    too, unless another sample runs."""
    num_preemptions: tuple[tuple[str, int], ...] = ()
    """(cause, number of preemptions) since start (engine/preemption.py)."""
    num_computing_steps: int = 0
    """Number of steps that ran the model; other steps only returned outputs."""
    num_decode_tokens: int = 0
    """Number of computed tokens that were computed for output tokens after the first."""
    step_s: float = field(default=0.0, compare=False)
    """Seconds in steps that ran the model. Not compared, because no two runs take the same."""


_RUNNING = (RequestState.RUNNING, RequestState.PREFILLING)
_WAITING = (
    RequestState.QUEUED,
    RequestState.WAITING_FOR_GRAMMAR,
    RequestState.WAITING,
    RequestState.PREEMPTED,
    RequestState.PARKED,
    RequestState.SWAPPING,
)
_PREEMPTED = frozenset({RequestState.PREEMPTED, RequestState.PARKED, RequestState.SWAPPING})


@dataclass
class EngineTotals:
    """The counts since start that EngineStats reports."""

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_computing_steps: int = 0
    num_decode_tokens: int = 0
    num_output_tokens: int = 0
    step_s: float = 0.0


def count_running_and_waiting(groups: Mapping[str, Group]) -> tuple[int, int]:
    """Return the numbers of running and of waiting requests, as in `compute_stats`, at less
    cost."""
    num_running = num_waiting = 0
    for group in groups.values():
        state = group.state
        if state in _RUNNING:
            num_running += 1
        elif state in _WAITING:
            num_waiting += 1
    return num_running, num_waiting


def compute_stats(
    groups: Mapping[str, Group],
    cache_manager: KVCacheManager,
    totals: EngineTotals,
    num_preemptions: Mapping[str, int],
) -> EngineStats:
    """Compute the present levels and the counts since start."""
    states = Counter([group.state for group in groups.values()])
    pool, num_idle_blocks = cache_manager.pool, cache_manager.in_flight.num_idle_blocks
    num_preempted = sum(
        any(sequence.state in _PREEMPTED for sequence in group.samples.values())
        for group in (groups.values() if num_preemptions else ())
    )
    return EngineStats(
        num_reserved=states[RequestState.RESERVED],
        num_waiting=sum(states[state] for state in _WAITING),
        num_running=sum(states[state] for state in _RUNNING),
        num_holding=states[RequestState.HOLDING],
        num_blocks=pool.num_blocks,
        num_free_blocks=pool.num_free + num_idle_blocks + cache_manager.num_draft_blocks,
        num_cached_blocks=pool.num_evictable,
        num_referenced_blocks=cache_manager.num_used,
        num_quarantined_blocks=pool.num_quarantined - num_idle_blocks,
        num_steps=totals.num_steps,
        num_computed_tokens=totals.num_computed_tokens,
        num_output_tokens=totals.num_output_tokens,
        num_local_prefix_tokens=cache_manager.num_local_prefix_tokens,
        num_evicted_blocks=pool.num_evicted,
        num_preempted=num_preempted,
        num_preemptions=tuple(sorted(num_preemptions.items())),
        num_computing_steps=totals.num_computing_steps,
        num_decode_tokens=totals.num_decode_tokens,
        step_s=totals.step_s,
    )


@dataclass(slots=True)
class _Drawn:
    """The tokens of one sample so far: the times of the first and the last, and their number."""

    first_s: float
    last_s: float
    num_first_tokens: int
    num_tokens: int


@dataclass(slots=True)
class _Record:
    """The record of one live request."""

    reserved_s: float
    started_s: float | None = None
    is_first_scheduled: bool = False
    is_ttft_wanted: bool = True
    samples: dict[int, _Drawn] = field(default_factory=dict)


class EngineMetrics:
    """The engine's own counts and histograms.

    Args:
        clock: returns seconds that never decrease, such as time.monotonic.
        num_blocks: number of blocks of the device cache.
    """

    def __init__(self, clock: Callable[[], float], num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks: {num_blocks} is below 1")
        self._clock = clock
        self._began_s = clock()
        self._num_blocks = num_blocks
        self._queue, self._ttft = Histogram(REQUEST_BOUNDS_S), Histogram(REQUEST_BOUNDS_S)
        self._itl, self._tpot = Histogram(STEP_BOUNDS_S), Histogram(STEP_BOUNDS_S)
        self._step = Histogram(STEP_BOUNDS_S)
        self._live: dict[str, _Record] = {}
        self._num_requests = 0
        self._ended: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._preemptions: Counter[str] = Counter()
        self._num_prompt_tokens = self._num_cached_tokens = self._num_loaded_tokens = 0
        self._num_prefill_tokens = self._num_decode_tokens = self._num_output_tokens = 0
        self._num_guessed_tokens = self._num_kept_tokens = 0
        self._num_used_blocks = self._max_used_blocks = 0
        self._steps: deque[tuple[float, int, int]] = deque()  # (when, prefill, decode tokens)
        # What check_integrity compares the above with.
        self._num_first_draws = self._num_draws = 0
        self._num_output_tokens_of_ended = 0
        self._num_finished_without_tpot = 0

    # -- a request's life

    def on_reserve(self, request_id: str, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Record a request that was reserved, with the number of its prompt tokens found in the
        device cache."""
        self._live[request_id] = _Record(self._clock())
        self._num_requests += 1
        self._num_prompt_tokens += num_prompt_tokens
        self._num_cached_tokens += num_cached_tokens

    def on_prefix(self, num_cached_tokens: int) -> None:
        """Record that a request that had no blocks when it was queued got its first ones, with the
        number of prompt tokens found in the device cache."""
        self._num_cached_tokens += num_cached_tokens

    def on_start(
        self, request_id: str, *, num_loaded_tokens: int = 0, num_earlier_tokens: int = 0
    ) -> None:
        """Record that a request may take part in steps.

        Args:
            num_loaded_tokens: tokens whose KV the caller loaded, without those found in the device
                cache.
            num_earlier_tokens: output tokens that another engine has sampled; if there are any,
                there is no TTFT.
        """
        record = self._live[request_id]
        record.started_s = self._clock()
        record.is_ttft_wanted = num_earlier_tokens == 0
        self._num_loaded_tokens += num_loaded_tokens

    def on_first_scheduled(self, request_id: str) -> None:
        """Record that a step computes tokens of a request. Later calls for the same request (after
        a preemption) have no effect."""
        record = self._live[request_id]
        if not record.is_first_scheduled and record.started_s is not None:
            record.is_first_scheduled = True
            self._queue.observe(self._clock() - record.started_s)

    def on_tokens(
        self,
        request_id: str,
        num_tokens: int = 1,
        *,
        sample_index: int = 0,
        now: float | None = None,
    ) -> None:
        """Record new output tokens of one sample in one step.

        Args: now: the clock's time, if the caller has read it for the whole step; None: it is read
            now.
        """
        if now is None:
            now = self._clock()
        record = self._live[request_id]
        self._num_output_tokens += num_tokens
        self._num_draws += 1
        drawn = record.samples.get(sample_index)
        if drawn is None:
            self._num_first_draws += 1
            record.samples[sample_index] = _Drawn(now, now, num_tokens, num_tokens)
            if record.is_ttft_wanted:
                record.is_ttft_wanted = False
                self._ttft.observe(now - record.reserved_s)
            return
        self._itl.observe(now - drawn.last_s)
        drawn.last_s = now
        drawn.num_tokens += num_tokens

    def on_finish(self, request_id: str, reason: FinishReason, *, sample_index: int = 0) -> None:
        """Record that one sample has its last token."""
        self._finished[reason.value] += 1
        drawn = self._live[request_id].samples.get(sample_index)
        if drawn is None or drawn.num_tokens == drawn.num_first_tokens:
            self._num_finished_without_tpot += 1
            return
        num_later = drawn.num_tokens - drawn.num_first_tokens
        self._tpot.observe((drawn.last_s - drawn.first_s) / num_later)

    def on_end(self, request_id: str, outcome: str) -> None:
        """Record the end of a request: finished and released, moved to another engine, aborted, or
        ended by the error of this name."""
        record = self._live.pop(request_id)
        self._ended[outcome] += 1
        self._num_output_tokens_of_ended += sum(d.num_tokens for d in record.samples.values())

    def on_preempt(self, cause: str) -> None:
        """Record that a running request lost its blocks."""
        self._preemptions[cause] += 1

    # -- a step

    def on_step(
        self, num_prefill_tokens: int, num_decode_tokens: int, seconds: float, num_used_blocks: int
    ) -> None:
        """Record the end of one step.

        Args:
            seconds: the duration of the step.
            num_used_blocks: number of blocks that requests have after it
                (EngineStats.num_referenced_blocks).
        """
        now = self._clock()
        self._step.observe(seconds)
        self._num_prefill_tokens += num_prefill_tokens
        self._num_decode_tokens += num_decode_tokens
        self._num_used_blocks = num_used_blocks
        self._max_used_blocks = max(self._max_used_blocks, num_used_blocks)
        self._steps.append((now, num_prefill_tokens, num_decode_tokens))
        self._forget_steps(now)

    def on_guesses(self, num_guessed_tokens: int, num_kept_tokens: int) -> None:
        """Record the numbers of draft tokens that a step computed and accepted."""
        self._num_guessed_tokens += num_guessed_tokens
        self._num_kept_tokens += num_kept_tokens

    def _forget_steps(self, now: float) -> None:
        while self._steps and self._steps[0][0] <= now - RATE_WINDOW_S:
            self._steps.popleft()

    # -- accounts

    def snapshot(self) -> MetricsSnapshot:
        """Return all counts and histograms as one value."""
        now = self._clock()
        self._forget_steps(now)
        window_s = min(RATE_WINDOW_S, now - self._began_s) or RATE_WINDOW_S
        return MetricsSnapshot(
            queue_s=self._queue.snapshot(),
            ttft_s=self._ttft.snapshot(),
            itl_s=self._itl.snapshot(),
            tpot_s=self._tpot.snapshot(),
            step_s=self._step.snapshot(),
            num_requests=self._num_requests,
            num_live_requests=len(self._live),
            ended=tuple(sorted(self._ended.items())),
            finished=tuple(sorted(self._finished.items())),
            preemptions=tuple(sorted(self._preemptions.items())),
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_loaded_tokens=self._num_loaded_tokens,
            num_prefill_tokens=self._num_prefill_tokens,
            num_decode_tokens=self._num_decode_tokens,
            num_output_tokens=self._num_output_tokens,
            num_guessed_tokens=self._num_guessed_tokens,
            num_kept_tokens=self._num_kept_tokens,
            num_blocks=self._num_blocks,
            num_used_blocks=self._num_used_blocks,
            max_used_blocks=self._max_used_blocks,
            prefill_tokens_per_s=sum(step[1] for step in self._steps) / window_s,
            decode_tokens_per_s=sum(step[2] for step in self._steps) / window_s,
        )

    def check_integrity(self) -> None:
        """Check that the buckets of every histogram, and the counts of requests, samples and
        tokens, add up. Raises: IntegrityError."""
        histograms = (self._queue, self._ttft, self._itl, self._tpot, self._step)
        num_live_tokens = sum(
            drawn.num_tokens for record in self._live.values() for drawn in record.samples.values()
        )
        num_samples = sum(self._finished.values())
        laws = {
            "buckets": (sum(sum(h.counts) for h in histograms), sum(h.count for h in histograms)),
            "requests": (self._num_requests, len(self._live) + sum(self._ended.values())),
            "output tokens": (
                self._num_output_tokens,
                num_live_tokens + self._num_output_tokens_of_ended,
            ),
            "draws": (self._num_draws, self._num_first_draws + self._itl.count),
            "samples": (num_samples, self._tpot.count + self._num_finished_without_tpot),
        }
        for name, (counted, added) in laws.items():
            if counted != added:
                raise IntegrityError(f"metrics: {counted} {name} counted, {added} by their parts")
        if self._num_cached_tokens > self._num_prompt_tokens:
            raise IntegrityError("metrics: more prompt tokens were cached than there were")
