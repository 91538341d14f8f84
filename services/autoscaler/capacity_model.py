"""Capacity model: the load that prefill and decode pools of given sizes can serve within the
latency targets, and the load that they must be ready for. Pure functions and frozen values.

**Capacity** (`Capacity`, `learn`): the speed of one worker of each role and the typical request,
learned from observed engine steps and traffic. A mean is a ratio of two sums in which old evidence
fades as new evidence comes, not with time: what was learned before a quiet night still holds in the
morning. It starts from a prior, which counts as little evidence. A decode step takes a + b * batch
seconds, a line fitted through the observed steps; while only one batch size was observed, the prior
gives the slope. Both speeds include the effect of the context lengths of the time.

**Rates** (`Rates`, `rates_of`): the requests per second that a number of workers carries within the
targets, and the number of workers that a rate needs. Prefill is a queue: N workers share one line,
and the wait at the target's quantile is Sakasegawa's approximation for M/G/N. The wait may take the
part of the TTFT target that the prompt's computation leaves. Decode is a batch: Little's law gives
the number of streams, and a worker takes as many as the TPOT target, its blocks and
`max_num_running` allow. Both tables ascend, so more load never needs fewer workers.

**Pairs** (prefill, decode) of worker counts: which are within limits and budget, which of them
carries most, and to which role one worker should move.

**Predicted load** (`PredictedLoad`, `predict_load`): the requests per second that both pools must
be ready for, as every request passes through both. It is the sum of the arrivals, their expected
growth until a worker that is started now is ready, and the backlog, which shall be served within
CLEAR_S. What the best pair within the budget carries is an upper bound.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

from services.autoscaler.config import Pace, Priors, ScaleLimits, Targets
from services.autoscaler.signals import ByRole, Observations, ObservedTraffic, ObservedWorker, Role

# ---- capacity of a worker, learned

MOST_SHARE_CACHED = 0.95
"""Upper bound of the cached share of a prompt, whatever was measured: one conversation that hits
the cache completely must not make prefill seem free."""

CLIP = 3.0
"""Largest factor by which one observation counts as different from the present estimate: a machine
that stalled for a moment is not a slower machine. A real change is learned after a few
observations."""

OWN_SPREAD = 0.15
"""Spread of the observed batch sizes, as a share of their mean, at which the observations and the
prior have equal weight in the slope of the line."""


MOST_POINT_S = 60.0
"""Most seconds of steps that are remembered of one batch size."""

FADE_S = 36_000.0
"""Seconds of steps, of any batch size, in which the evidence of the other sizes fades to half."""


@dataclass(frozen=True)
class Mean:
    """Running mean of a ratio, amount / per, over the latest evidence and a prior."""

    amount: float
    per: float
    """Remembered evidence, including the prior's, in the unit of the denominator."""
    most: float
    """Upper bound of `per`: beyond it old evidence fades."""
    seen: float = 0.0
    """All evidence ever added, without the prior."""

    @staticmethod
    def believed(value: float, worth: float, most: float) -> Mean:
        """Return a mean with the prior `value`, which counts as `worth` of evidence."""
        return Mean(value * worth, worth, most)

    @property
    def value(self) -> float:
        """The present estimate."""
        return self.amount / self.per

    @property
    def is_seen(self) -> bool:
        """Whether the evidence added so far is at least half of the remembered `per`."""
        return self.seen >= self.per / 2

    def add(self, amount: float, per: float) -> Mean:
        """Return the mean with more evidence, clipped to CLIP times the estimate; unchanged unless
        `per` is above 0 and both are finite."""
        if not (per > 0 and math.isfinite(amount) and math.isfinite(per)):
            return self
        if self.is_seen and self.value > 0:
            shown = amount / per
            amount = per * min(max(shown, self.value / CLIP), self.value * CLIP)
        keep = min(1.0, max(0.0, self.most - per) / self.per)
        return replace(
            self,
            amount=self.amount * keep + amount,
            per=self.per * keep + per,
            seen=self.seen + per,
        )


@dataclass(frozen=True)
class _Point:
    """Mean batch and step time of the observed decode steps of about one batch size."""

    batch: float
    step_s: float
    weight_s: float
    """Seconds of steps that are remembered."""


@dataclass(frozen=True)
class StepLine:
    """Duration of a decode step as a line over the batch size, a + b * batch seconds. Observations
    are kept by batch size in classes half an octave apart, so that new ones of one size do not
    displace those of another."""

    prior_s: float
    prior_stream_s: float
    points: tuple[tuple[int, _Point], ...] = ()
    """One point for each class of batch sizes, ascending: (round(2 * log2(batch)), point)."""

    @property
    def weight_s(self) -> float:
        """Seconds of steps that are remembered, of all batch sizes together."""
        return sum(point.weight_s for _, point in self.points)

    @property
    def is_seen(self) -> bool:
        """Whether there is evidence: at least 2 seconds of steps."""
        return self.weight_s >= 2.0

    @property
    def line(self) -> tuple[float, float]:
        """(a, b) of a + b * batch, in seconds; both above 0."""
        weight_s = self.weight_s
        if not weight_s:
            return self.prior_s, self.prior_stream_s

        def mean(of: Callable[[_Point], float]) -> float:
            return sum(point.weight_s * of(point) for _, point in self.points) / weight_s

        batch, step_s = mean(lambda p: p.batch), mean(lambda p: p.step_s)
        variance = mean(lambda p: (p.batch - batch) ** 2)
        covariance = mean(lambda p: (p.batch - batch) * (p.step_s - step_s))
        # The prior's line, scaled to the height of the observed mean.
        scale = step_s / (self.prior_s + self.prior_stream_s * batch)
        ridge = (OWN_SPREAD * batch) ** 2
        slope = (covariance + ridge * scale * self.prior_stream_s) / (variance + ridge)
        steepest = step_s / batch
        slope = min(max(slope, 1e-3 * steepest), 0.99 * steepest)
        return step_s - slope * batch, slope

    def step_s(self, batch: float) -> float:
        """Return the seconds of a step with `batch` streams."""
        a, b = self.line
        return a + b * batch

    def add(self, batch: float, step_s: float, weight_s: float) -> StepLine:
        """Return the line with more observed steps.

        Args:
            batch: mean number of streams of the steps.
            step_s: mean seconds of one step.
            weight_s: seconds of all of these steps together.
        """
        if not (batch > 0 and step_s > 0 and weight_s > 0):
            return self
        if self.is_seen:
            expected = self.step_s(batch)
            step_s = min(max(step_s, expected / CLIP), expected * CLIP)
        weight_s = min(weight_s, MOST_POINT_S / 4)
        size, fade = round(2 * math.log2(batch)), 0.5 ** (weight_s / FADE_S)
        points = {key: replace(point, weight_s=point.weight_s * fade) for key, point in self.points}
        old = points.get(size, _Point(batch, step_s, 0.0))
        kept_s = min(old.weight_s, MOST_POINT_S - weight_s)
        share = weight_s / (kept_s + weight_s)
        points[size] = _Point(
            old.batch + share * (batch - old.batch),
            old.step_s + share * (step_s - old.step_s),
            kept_s + weight_s,
        )
        return replace(self, points=tuple(sorted(points.items(), key=lambda entry: entry[0])))


@dataclass(frozen=True)
class Capacity:
    """Learned speeds of one worker of each role, and the typical request."""

    token_s: Mean
    """Seconds that a busy prefill worker takes for one prompt token, fixed costs of the steps
    included."""
    decode: StepLine
    prompt_tokens: Mean
    output_tokens: Mean
    """Output tokens of one request."""
    cached: Mean
    """Share of prompt tokens found in a cache."""
    stream_blocks: Mean = field(default_factory=lambda: Mean(0.0, 1e-9, 400.0))
    """KV blocks that one stream holds at a decode worker."""
    num_blocks: int = 0
    """KV blocks of the smallest decode worker in the last observation with any; 0: unknown."""

    @staticmethod
    def believed(priors: Priors) -> Capacity:
        """Return the capacity before any observation: the priors."""
        return Capacity(
            token_s=Mean.believed(1 / priors.prefill_tokens_per_s, 1000.0, 400_000.0),
            decode=StepLine(priors.decode_step_s, priors.decode_stream_s),
            prompt_tokens=Mean.believed(priors.num_prompt_tokens, 5.0, 200.0),
            output_tokens=Mean.believed(priors.num_output_tokens, 5.0, 200.0),
            cached=Mean.believed(0.0, 2.0 * priors.num_prompt_tokens, 2e5),
        )

    @property
    def uncached_tokens(self) -> float:
        """Mean number of prompt tokens of a request that prefill must compute; at least 1."""
        computed = 1 - min(self.cached.value, MOST_SHARE_CACHED)
        return max(1.0, self.prompt_tokens.value * computed)

    @property
    def prefill_s(self) -> float:
        """Seconds for which one request keeps a prefill worker busy."""
        return self.uncached_tokens * self.token_s.value

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the figures that are still priors, in words."""
        known = {
            "prefill speed": self.token_s.is_seen,
            "decode step time": self.decode.is_seen,
            "prompt length": self.prompt_tokens.is_seen,
            "output length": self.output_tokens.is_seen,
            "blocks of a stream": self.num_blocks > 0 and self.stream_blocks.seen > 0,
        }
        return tuple(name for name, is_seen in known.items() if not is_seen)


def learn(before: Capacity, seen: Observations, *, stale_s: float) -> Capacity:
    """Return `before` updated with one observation. Workers whose heartbeat is older than `stale_s`
    seconds are ignored."""
    after = before
    for role in Role:
        for worker in seen.pools.of(role).workers:
            if worker.age_s <= stale_s:
                after = _of_worker(after, role, worker)
    blocks = [w.num_blocks for w in seen.pools.decode.workers if w.num_blocks and not w.is_draining]
    if blocks:
        after = replace(after, num_blocks=min(blocks))
    return after if seen.traffic is None else _of_traffic(after, seen.traffic)


def _of_worker(before: Capacity, role: Role, worker: ObservedWorker) -> Capacity:
    work = worker.work
    num_prompt = max(0, work.num_computed_tokens - work.num_decode_tokens)
    if role is Role.PREFILL:
        return replace(before, token_s=before.token_s.add(work.step_s, num_prompt))
    after = before
    if work.num_steps and work.num_decode_tokens:
        # A decode worker may compute a short prompt; that time is not decoding.
        step_s = max(0.2 * work.step_s, work.step_s - num_prompt * before.token_s.value)
        after = replace(
            after,
            decode=before.decode.add(
                work.num_decode_tokens / work.num_steps, step_s / work.num_steps, step_s
            ),
        )
    num_streams = worker.num_running + worker.num_waiting
    if num_streams and worker.num_blocks and not worker.is_draining:
        used = max(0, worker.num_blocks - worker.num_free_blocks)
        after = replace(after, stream_blocks=after.stream_blocks.add(used, num_streams))
    return after


def _of_traffic(before: Capacity, traffic: ObservedTraffic) -> Capacity:
    num, num_prompt = traffic.num_finished, traffic.num_prompt_tokens
    return replace(
        before,
        prompt_tokens=before.prompt_tokens.add(num_prompt, num),
        output_tokens=before.output_tokens.add(traffic.num_output_tokens, num),
        cached=_shares(before.cached, min(traffic.num_cached_tokens, num_prompt), num_prompt),
    )


def _shares(before: Mean, amount: float, per: float) -> Mean:
    """Return the mean of a share with more evidence, without clipping: a share may jump from 0
    to 1."""
    if per <= 0:
        return before
    keep = min(1.0, max(0.0, before.most - per) / before.per)
    return replace(
        before,
        amount=before.amount * keep + amount,
        per=before.per * keep + per,
        seen=before.seen + per,
    )


# ---- requests a second that workers carry

LEAST_SLACK = 0.25
"""Shortest wait that is allowed for, as a share of a request's own prefill time. More workers
cannot meet a target below the computing time; the wait is then kept short in comparison."""

OVER_ONE_STREAM = 1.25
"""Factor by which a decode step may always exceed the step of a single stream, for the same
reason as LEAST_SLACK."""

SQUARED_VARIATION = 1.0
"""Squared coefficient of variation of the prefill time of prompts; 1: as of an exponential
distribution."""

_HALVINGS = 30


@dataclass(frozen=True)
class Bounds:
    """Limits of one worker that the rates were computed from, for a decision's terms."""

    wait_s: float
    """Seconds that a prompt may wait for a prefill worker, at the target's quantile."""
    max_batch: float
    """Most streams of one decode worker."""
    batch_by: str
    """The constraint that bounds `max_batch`: "tpot", "blocks" or "max_num_running"."""
    problems: tuple[str, ...] = ()
    """Targets that no number of workers meets."""


@dataclass(frozen=True)
class Rates:
    """Requests per second that 0, 1, 2 ... workers of each role carry within the targets, up to the
    pool's maximum; ascending."""

    table: ByRole[tuple[float, ...]]
    bounds: Bounds

    def carried(self, workers: ByRole[int]) -> float:
        """Return the requests per second that both pools carry: the lower rate of the two."""
        return min(self.of(role, workers.of(role)) for role in Role)

    def of(self, role: Role, num: int) -> float:
        """Return the requests per second that `num` workers of one role carry; beyond the pool's
        maximum: what the maximum carries."""
        table = self.table.of(role)
        return table[min(num, len(table) - 1)]

    def needed(self, role: Role, rate: float) -> int:
        """Return the fewest workers of one role that carry `rate`. Beyond the pool's maximum the
        number is extrapolated linearly, so that the decision's terms show how many are lacking."""
        table = self.table.of(role)
        index = bisect.bisect_left(table, rate)
        if index < len(table):
            return index
        each = table[-1] / (len(table) - 1)
        return len(table) - 1 + math.ceil((rate - table[-1]) / each)

    def strained(self, strain: ByRole[float]) -> Rates:
        """Return the rates with each pool's divided by its strain."""
        return Rates(
            self.table.map(lambda role, table: tuple(r / strain.of(role) for r in table)),
            self.bounds,
        )


def rates_of(capacity: Capacity, targets: Targets, limits: ScaleLimits, priors: Priors) -> Rates:
    """Return the rates of up to each pool's maximum of workers."""
    prefill_s, step = capacity.prefill_s, capacity.decode
    problems = []
    wait_s = targets.ttft_s - prefill_s * math.log(1 / (1 - targets.quantile))
    if wait_s < LEAST_SLACK * prefill_s:
        wait_s = LEAST_SLACK * prefill_s
        if prefill_s > targets.ttft_s:
            problems.append(
                f"ttft_s {targets.ttft_s:g} cannot be met: a prompt alone takes {prefill_s:.3g} s"
            )
    one_s = step.step_s(1)
    if one_s > targets.tpot_s:
        problems.append(f"tpot_s {targets.tpot_s:g} cannot be met: one stream takes {one_s:.3g} s")
    max_batch, batch_by = _max_batch(capacity, targets, priors)
    share = targets.quantile
    return Rates(
        ByRole(
            tuple(
                _prefill_rate(num, prefill_s, wait_s, share, priors.max_utilisation)
                for num in range(limits.prefill.max_workers + 1)
            ),
            tuple(
                _decode_rate(num, capacity, max_batch, share)
                for num in range(limits.decode.max_workers + 1)
            ),
        ),
        Bounds(wait_s, max_batch, batch_by, tuple(problems)),
    )


def wait_s(num: int, utilisation: float, service_s: float, share: float) -> float:
    """Return the seconds that `share` of the prompts wait at most for a prefill worker; ascends
    with `utilisation`.

    Args:
        num: prefill workers.
        utilisation: share of time that they are busy; below 1.
        service_s: mean seconds of computation of one prompt.
        share: in (0, 1).
    """
    is_waiting = utilisation ** (math.sqrt(2 * (num + 1)) - 1)
    if is_waiting <= 1 - share:
        return 0.0
    mean_s = service_s * (1 + SQUARED_VARIATION) / 2 / (num * (1 - utilisation))
    return mean_s * math.log(is_waiting / (1 - share))


def _prefill_rate(
    num: int, service_s: float, max_wait_s: float, share: float, max_utilisation: float
) -> float:
    if num == 0:
        return 0.0
    low, high = 0.0, max_utilisation
    if wait_s(num, high, service_s, share) > max_wait_s:
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if wait_s(num, middle, service_s, share) <= max_wait_s:
                low = middle
            else:
                high = middle
        high = low
    return num * high / service_s


def _max_batch(capacity: Capacity, targets: Targets, priors: Priors) -> tuple[float, str]:
    a, b = capacity.decode.line
    by_time = (max(targets.tpot_s, OVER_ONE_STREAM * (a + b)) - a) / b
    found = [(by_time, "tpot"), (float(priors.max_num_running), "max_num_running")]
    each = capacity.stream_blocks.value
    if capacity.num_blocks and each > 0:
        found.append((max(1.0, priors.max_utilisation * capacity.num_blocks / each), "blocks"))
    return min(found)


def _decode_rate(num: int, capacity: Capacity, max_batch: float, share: float) -> float:
    if num == 0:
        return 0.0
    # The mean batch m with m + z * sqrt(m / num) = max_batch: the batch exceeds max_batch only in
    # 1 - share of the time.
    z = max(0.0, NormalDist().inv_cdf(share))
    root = (math.sqrt(z * z / num + 4 * max_batch) - z / math.sqrt(num)) / 2
    batch = root * root
    return num * batch / (capacity.output_tokens.value * capacity.decode.step_s(batch))


# ---- pairs of worker counts

_PART_OF_RATE = 1e-9
"""Relative difference up to which two rates count as equal."""


def num_pairs(limits: ScaleLimits) -> tuple[int, int]:
    """Return the number of pairs within the limits of both pools, and how many of them the budget
    allows."""
    num_decode = limits.decode.max_workers - limits.least.decode + 1
    num_affordable = sum(
        max(0, _most_decode(num, limits) - limits.least.decode + 1) for num in _prefills(limits)
    )
    return len(_prefills(limits)) * num_decode, num_affordable


def most_carried(rates: Rates, limits: ScaleLimits) -> float:
    """Return the requests per second that the best pair within limits and budget carries."""
    return max(
        rates.carried(ByRole(num, _most_decode(num, limits)))
        for num in _prefills(limits)
        if _most_decode(num, limits) >= limits.least.decode
    )


def nearest_allowed_pair(pair: ByRole[int], rates: Rates, limits: ScaleLimits) -> ByRole[int]:
    """Return `pair`, or a close pair within the limits if a limit forbids it. The result never has
    more workers of one role and fewer of the other than `pair`: excess is removed first."""
    least = limits.least

    def raised(some: ByRole[int]) -> ByRole[int]:
        return some.map(lambda role, num: max(num, least.of(role)))

    capped = pair.map(lambda role, num: min(num, limits.of(role).max_workers))
    if limits.devices(raised(capped)) > limits.budget:
        # The room that a pool below its minimum needs must be free, too.
        return max(
            (
                some
                for num_prefill in range(min(capped.prefill, least.prefill), capped.prefill + 1)
                for num_decode in range(min(capped.decode, least.decode), capped.decode + 1)
                if limits.devices(raised(some := ByRole(num_prefill, num_decode))) <= limits.budget
            ),
            key=lambda some: (rates.carried(some), limits.devices(some), some.prefill),
        )
    return capped if capped != pair else raised(pair)


def broken_limit(pair: ByRole[int], limits: ScaleLimits) -> str:
    """Return the name and value of a limit that `pair` breaks; the first one found."""
    for role in Role:
        of_role = limits.of(role)
        if pair.of(role) > of_role.max_workers:
            return f"{role.value}.max_workers {of_role.max_workers}"
        if pair.of(role) < limits.least.of(role):
            return f"{role.value}.min_workers {of_role.min_workers}"
    return f"budget_devices {limits.budget}"


def grown_pair(
    before: ByRole[int],
    needed: ByRole[int],
    rates: Rates,
    limits: ScaleLimits,
    *,
    free_devices: int,
    most: int,
) -> ByRole[int]:
    """Return `before` grown towards `needed` by at most `most` workers, as far as devices are free.
    Each worker goes to the pool that carries the lower rate."""
    pair = before
    for _ in range(most):
        fits = [
            role
            for role in Role
            if pair.of(role) < min(needed.of(role), limits.of(role).max_workers)
            and limits.of(role).num_devices <= free_devices
        ]
        if not fits:
            break
        role = min(fits, key=lambda role: (rates.of(role, pair.of(role)), role.value))
        pair = pair.but(role, pair.of(role) + 1)
        free_devices -= limits.of(role).num_devices
    return pair


def shrunk_pair(
    before: ByRole[int], towards: ByRole[int], rates: Rates, *, most: int
) -> ByRole[int]:
    """Return `before` shrunk towards `towards` by at most `most` workers. Each step removes the
    worker without which the rest carries most."""
    pair = before
    for _ in range(most):
        fewer = [
            pair.but(role, pair.of(role) - 1) for role in Role if pair.of(role) > towards.of(role)
        ]
        if not fewer:
            break
        pair = max(fewer, key=lambda some: (rates.carried(some), some.prefill))
    return pair


def move_that_helps(
    before: ByRole[int], rates: Rates, limits: ScaleLimits, *, slack: float
) -> tuple[Role, ByRole[int]] | None:
    """Return the pool that is the bottleneck, and the pair in which it has one worker more and the
    other pool gives up as many as the budget requires. None: that pair does not carry more than now
    by more than `slack` (a share), or is not allowed."""
    role = min(Role, key=lambda role: (rates.of(role, before.of(role)), role.value))
    donor, pair = role.other, before.but(role, before.of(role) + 1)
    if pair.of(role) > limits.of(role).max_workers:
        return None
    while limits.devices(pair) > limits.budget and pair.of(donor) > limits.least.of(donor):
        pair = pair.but(donor, pair.of(donor) - 1)
    if not limits.allows(pair) or pair.of(donor) == before.of(donor):
        return None
    gains = rates.carried(pair) > rates.carried(before) * (1 + slack) * (1 + _PART_OF_RATE)
    return (role, pair) if gains else None


def _prefills(limits: ScaleLimits) -> range:
    return range(limits.least.prefill, limits.prefill.max_workers + 1)


def _most_decode(num_prefill: int, limits: ScaleLimits) -> int:
    left = limits.budget - num_prefill * limits.prefill.num_devices
    return min(limits.decode.max_workers, left // limits.decode.num_devices)


# ---- predicted load

CLEAR_S = 30.0
"""Seconds within which waiting requests shall be served. Guessed: half of a worker's start time."""

MOST_TREND = 1.0
"""Upper bound of the predicted growth, as a share of the present arrivals."""

SURE = 2.0
"""Standard deviations by which the arrivals must have risen to count as a trend."""


@dataclass(frozen=True)
class PredictedLoad:
    """Load that the pools must be ready for, in requests per second, and the workers for it."""

    arriving: float
    trend: float
    """Predicted growth of the arrivals."""
    backlog: float
    """Additional rate that serves the waiting requests within CLEAR_S."""
    most: float
    """Rate that the best pair within limits and budget carries."""
    waiting: float
    """Number of requests that wait for a worker, or at one."""
    wished: ByRole[int]
    """Fewest workers for the whole load, even beyond the limits."""
    needed: ByRole[int]
    """Fewest workers for the load, or for `most` if that is less."""
    enough: ByRole[int]
    """As `needed`, with the slack, and enough for the running streams."""

    @property
    def rate(self) -> float:
        """The whole load in requests per second."""
        return self.arriving + self.trend + self.backlog


def predict_load(
    seen: Observations,
    traffic: ObservedTraffic,
    before: Sequence[tuple[float, ObservedTraffic]],
    capacity: Capacity,
    rates: Rates,
    limits: ScaleLimits,
    pace: Pace,
) -> PredictedLoad:
    """Predict the load from an observation and the traffic before it.

    Args:
        traffic: the traffic of `seen`.
        before: earlier traffic with its time in seconds, oldest first, without a gap.
    """
    history = [*before, (seen.now_s, traffic)]
    now = _rate(history, seen.now_s, 0.0, pace.window_s)
    earlier = _rate(history, seen.now_s, pace.window_s, 2 * pace.window_s)
    arriving, trend = now[0], _trend(now, earlier, pace)
    waiting = num_waiting(seen, traffic, capacity)
    backlog = _backlog(seen, waiting, capacity, rates) / CLEAR_S
    most = most_carried(rates, limits)
    rate = arriving + trend + backlog

    def needed(role: Role, of_rate: float) -> int:
        return max(limits.least.of(role), rates.needed(role, of_rate))

    both = ByRole(Role.PREFILL, Role.DECODE)
    carried = min(rate, most)
    num_streams = sum(w.num_running for w in seen.pools.decode.workers if not w.is_draining)
    streams = math.ceil(num_streams / rates.bounds.max_batch)
    enough = both.map(lambda _, role: needed(role, carried * (1 + pace.slack)))
    return PredictedLoad(
        arriving,
        trend,
        backlog,
        most,
        waiting,
        wished=both.map(lambda _, role: needed(role, rate)),
        needed=both.map(lambda _, role: needed(role, carried)),
        enough=ByRole(enough.prefill, max(enough.decode, streams)),
    )


def _rate(
    history: Sequence[tuple[float, ObservedTraffic]], now_s: float, from_s: float, to_s: float
) -> tuple[float, float]:
    """Return the arrivals per second in the traffic aged `from_s` to `to_s` seconds, and the
    seconds that this traffic covers."""
    seen = [traffic for at_s, traffic in history if from_s <= now_s - at_s < to_s]
    seconds = sum(traffic.elapsed_s for traffic in seen)
    return (sum(traffic.num_arrived for traffic in seen) / seconds if seen else 0.0), seconds


def _trend(now: tuple[float, float], earlier: tuple[float, float], pace: Pace) -> float:
    """Return the predicted growth of the arrivals per second; 0 unless the rise exceeds both chance
    and the slack. `now` and `earlier`: (arrivals per second, seconds covered)."""
    rise = now[0] - earlier[0]
    if earlier[0] <= 0:
        return 0.0
    chance = SURE * math.sqrt(now[0] / now[1] + earlier[0] / earlier[1])
    if rise <= max(chance, pace.slack * earlier[0]):
        return 0.0
    return min(rise / pace.window_s * pace.lead_s, MOST_TREND * now[0])


def num_waiting(seen: Observations, traffic: ObservedTraffic, capacity: Capacity) -> float:
    """Return the number of waiting requests: those in routers, and those at prefill workers,
    estimated from their queued tokens, without one in computation at each worker."""
    pool = seen.pools.prefill
    num_tokens = sum(w.num_queued_tokens for w in pool.workers if not w.is_draining)
    at_workers = max(0.0, num_tokens / capacity.uncached_tokens - pool.num_ready)
    return traffic.num_waiting + traffic.num_queued + at_workers


def _backlog(seen: Observations, waiting: float, capacity: Capacity, rates: Rates) -> float:
    """Return the number of waiting requests that the present workers cannot serve within the
    allowed wait."""
    serving = seen.pools.map(lambda _, pool: pool.num_ready)
    taken = rates.carried(serving) * (rates.bounds.wait_s + capacity.prefill_s)
    return max(0.0, waiting - taken)
