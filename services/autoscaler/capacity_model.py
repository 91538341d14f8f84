"""The capacity model: how much work the pools can do, and how much they must be ready for. Pure
functions and frozen values.

**Capacity** of one worker of each role, and what requests are like, learned from the steps that
were observed (`learn`). A mean is a ratio of two sums that forgets by evidence, not by time: what
was learned before a quiet night still holds in the morning. It begins with the prior, which counts
as little evidence. A decode step takes a + b * batch seconds, a line fitted through the observed
steps; while only one batch size was observed, the prior gives the slope. Both include the current
context lengths, which are forgotten slowly.

**Rates**: the requests per second that a number of workers carries within the targets, and the
number of workers that a rate needs. Prefill is a queue: N workers share one line, and the wait at
the target's quantile is Sakasegawa's approximation of M/G/N; it may be as long as the target of the
time to the first token leaves beside the prompt's computation. Decode is a batch: by Little's law
so many streams run at once, a step takes a + b * batch, and a worker may have as many as keep a
step within the time per token, as its blocks hold, and as its limit allows. Both tables ascend, so
more load never needs fewer workers.

**Pairs** (prefill, decode) of worker counts: which are within limits and budget, which of them
carries most, and to which role one worker should go.

**Predicted load**: the requests per second that the pools must be ready for: those that arrive,
where their rate clearly rises what it will be when a worker that is started now is ready, and the
backlog, to be served within CLEAR_S. One rate for both pools, as every request passes through both;
at most what the best pair within the budget carries.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

from services.autoscaler.config import Pace, Priors, ScaleLimits, Targets
from services.autoscaler.signals import ByRole, Observations, Role, Traffic, Worker

# ---- capacity of a worker, learned

MOST_SHARE_CACHED = 0.95
"""Of a prompt, whatever was measured: one conversation that hits all must not end prefill."""

CLIP = 3.0
"""One look counts as at most so many times off what was believed: a machine that stood still for a
moment is no new machine. A real change is believed after a few looks."""

OWN_SPREAD = 0.15
"""When batch sizes differ by so much of their mean, what was seen decides on the line's slope as
much as the prior does."""


MOST_POINT_S = 60.0
"""Seconds of steps of one batch size that are remembered."""

FADE_S = 36_000.0
"""Seconds of steps, of any size, in which what is known of the others fades to half."""


@dataclass(frozen=True)
class Mean:
    """amount / per, of the latest evidence."""

    amount: float
    per: float
    """Evidence that is remembered, the prior's among it."""
    most: float
    """Never more: beyond it old evidence fades."""
    seen: float = 0.0
    """Evidence that came in, ever."""

    @staticmethod
    def believed(value: float, worth: float, most: float) -> Mean:
        """As if `worth` of evidence had shown `value`."""
        return Mean(value * worth, worth, most)

    @property
    def value(self) -> float:
        """What is expected."""
        return self.amount / self.per

    @property
    def is_seen(self) -> bool:
        """Whether half of it is evidence."""
        return self.seen >= self.per / 2

    def add(self, amount: float, per: float) -> Mean:
        """More evidence; nothing where `per` is not above 0."""
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
    """Steps of about one batch size."""

    batch: float
    step_s: float
    weight_s: float
    """Seconds of steps that are remembered."""


@dataclass(frozen=True)
class StepLine:
    """Seconds of a decode step by its batch: what was seen, by sizes half an octave apart, so that
    what two workers show does not make one forget what one alone did."""

    prior_s: float
    prior_stream_s: float
    points: tuple[tuple[int, _Point], ...] = ()
    """By size, ascending."""

    @property
    def weight_s(self) -> float:
        """Seconds of steps that are remembered, of all sizes."""
        return sum(point.weight_s for _, point in self.points)

    @property
    def is_seen(self) -> bool:
        """Whether there is evidence: some seconds of steps."""
        return self.weight_s >= 2.0

    @property
    def line(self) -> tuple[float, float]:
        """a and b of a + b * batch; both above 0."""
        weight_s = self.weight_s
        if not weight_s:
            return self.prior_s, self.prior_stream_s

        def mean(of: Callable[[_Point], float]) -> float:
            return sum(point.weight_s * of(point) for _, point in self.points) / weight_s

        batch, step_s = mean(lambda p: p.batch), mean(lambda p: p.step_s)
        variance = mean(lambda p: (p.batch - batch) ** 2)
        covariance = mean(lambda p: (p.batch - batch) * (p.step_s - step_s))
        # The prior's shape, as high as what was seen.
        scale = step_s / (self.prior_s + self.prior_stream_s * batch)
        ridge = (OWN_SPREAD * batch) ** 2
        slope = (covariance + ridge * scale * self.prior_stream_s) / (variance + ridge)
        steepest = step_s / batch
        slope = min(max(slope, 1e-3 * steepest), 0.99 * steepest)
        return step_s - slope * batch, slope

    def step_s(self, batch: float) -> float:
        """Of so many streams at once."""
        a, b = self.line
        return a + b * batch

    def add(self, batch: float, step_s: float, weight_s: float) -> StepLine:
        """Steps of `weight_s` seconds together, of this mean batch, that took so long each."""
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
    """All that was learned."""

    token_s: Mean
    """Seconds that a busy prefill worker takes for one prompt token, steps' own cost included."""
    decode: StepLine
    prompt_tokens: Mean
    output_tokens: Mean
    """Of one request."""
    cached: Mean
    """Share of prompt tokens that nobody had to compute."""
    stream_blocks: Mean = field(default_factory=lambda: Mean(0.0, 1e-9, 400.0))
    """Blocks that one stream holds at a decode worker."""
    num_blocks: int = 0
    """Of the smallest decode worker seen; 0: none was."""

    @staticmethod
    def believed(priors: Priors) -> Capacity:
        """Before anything was seen."""
        return Capacity(
            token_s=Mean.believed(1 / priors.prefill_tokens_per_s, 1000.0, 400_000.0),
            decode=StepLine(priors.decode_step_s, priors.decode_stream_s),
            prompt_tokens=Mean.believed(priors.num_prompt_tokens, 5.0, 200.0),
            output_tokens=Mean.believed(priors.num_output_tokens, 5.0, 200.0),
            cached=Mean.believed(0.0, 2.0 * priors.num_prompt_tokens, 2e5),
        )

    @property
    def uncached_tokens(self) -> float:
        """Prompt tokens of a request that must be computed."""
        computed = 1 - min(self.cached.value, MOST_SHARE_CACHED)
        return max(1.0, self.prompt_tokens.value * computed)

    @property
    def prefill_s(self) -> float:
        """That a prefill worker is busy with one request."""
        return self.uncached_tokens * self.token_s.value

    @property
    def missing(self) -> tuple[str, ...]:
        """What is still believed rather than seen, in words."""
        known = {
            "prefill speed": self.token_s.is_seen,
            "decode step time": self.decode.is_seen,
            "prompt length": self.prompt_tokens.is_seen,
            "output length": self.output_tokens.is_seen,
            "blocks of a stream": self.num_blocks > 0 and self.stream_blocks.seen > 0,
        }
        return tuple(name for name, is_seen in known.items() if not is_seen)


def learn(before: Capacity, seen: Observations, *, stale_s: float) -> Capacity:
    """`before` and what this look adds to it. Workers whose beat is older than `stale_s` add
    nothing."""
    after = before
    for role in Role:
        for worker in seen.pools.of(role).workers:
            if worker.age_s <= stale_s:
                after = _of_worker(after, role, worker)
    blocks = [w.num_blocks for w in seen.pools.decode.workers if w.num_blocks and not w.is_draining]
    if blocks:
        after = replace(after, num_blocks=min(blocks))
    return after if seen.traffic is None else _of_traffic(after, seen.traffic)


def _of_worker(before: Capacity, role: Role, worker: Worker) -> Capacity:
    work = worker.work
    num_prompt = max(0, work.num_computed_tokens - work.num_decode_tokens)
    if role is Role.PREFILL:
        return replace(before, token_s=before.token_s.add(work.step_s, num_prompt))
    after = before
    if work.num_steps and work.num_decode_tokens:
        # A short prompt may be computed here: its time is no decoding.
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


def _of_traffic(before: Capacity, traffic: Traffic) -> Capacity:
    num, num_prompt = traffic.num_finished, traffic.num_prompt_tokens
    return replace(
        before,
        prompt_tokens=before.prompt_tokens.add(num_prompt, num),
        output_tokens=before.output_tokens.add(traffic.num_output_tokens, num),
        cached=_shares(before.cached, min(traffic.num_cached_tokens, num_prompt), num_prompt),
    )


def _shares(before: Mean, amount: float, per: float) -> Mean:
    """A share may jump from nothing to all, so that nothing is clipped."""
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
"""Of a request's own prefill time: what a wait may always be. A target below what computing takes
cannot be met by more workers; then the wait is kept short beside it."""

OVER_ONE_STREAM = 1.25
"""A decode step may take so much longer than one stream's, for the same reason."""

SQUARED_VARIATION = 1.0
"""Of the time that prompts take: as spread as an exponential."""

_HALVINGS = 30


@dataclass(frozen=True)
class Bounds:
    """What limits one worker, for the record."""

    wait_s: float
    """That a prompt may wait for a prefill worker, at the quantile."""
    max_batch: float
    """Streams of one decode worker."""
    batch_by: str
    """What bounds them: "tpot", "blocks" or "max_num_running"."""
    problems: tuple[str, ...] = ()
    """Targets that no number of workers meets."""


@dataclass(frozen=True)
class Rates:
    """Requests per second that 0, 1, 2 ... workers of each role carry; ascending."""

    table: ByRole[tuple[float, ...]]
    bounds: Bounds

    def carried(self, workers: ByRole[int]) -> float:
        """By both pools: what the smaller one carries."""
        return min(self.of(role, workers.of(role)) for role in Role)

    def of(self, role: Role, num: int) -> float:
        """By `num` workers of one role, at most as many as there may be."""
        table = self.table.of(role)
        return table[min(num, len(table) - 1)]

    def needed(self, role: Role, rate: float) -> int:
        """Fewest workers of one role that carry `rate`. Beyond what there may be: thought on in a
        straight line, so that the record says how much is lacking."""
        table = self.table.of(role)
        index = bisect.bisect_left(table, rate)
        if index < len(table):
            return index
        each = table[-1] / (len(table) - 1)
        return len(table) - 1 + math.ceil((rate - table[-1]) / each)

    def strained(self, strain: ByRole[float]) -> Rates:
        """With each pool believed to carry less, by its factor."""
        return Rates(
            self.table.map(lambda role, table: tuple(r / strain.of(role) for r in table)),
            self.bounds,
        )


def rates_of(capacity: Capacity, targets: Targets, limits: ScaleLimits, priors: Priors) -> Rates:
    """The tables, up to each pool's maximum."""
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
    """Seconds that `share` of the prompts wait at most, for `num` workers busy for so much of their
    time (below 1); ascends with it."""
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
    # The mean batch m, of which `share` of the time m + z * sqrt(m / num) is not exceeded.
    z = max(0.0, NormalDist().inv_cdf(share))
    root = (math.sqrt(z * z / num + 4 * max_batch) - z / math.sqrt(num)) / 2
    batch = root * root
    return num * batch / (capacity.output_tokens.value * capacity.decode.step_s(batch))


# ---- pairs of worker counts

_PART_OF_RATE = 1e-9
"""Rates that differ by less are equal."""


def num_pairs(limits: ScaleLimits) -> tuple[int, int]:
    """Pairs within the limits of both pools, and those of them that the budget allows."""
    num_decode = limits.decode.max_workers - limits.least.decode + 1
    num_affordable = sum(
        max(0, _most_decode(num, limits) - limits.least.decode + 1) for num in _prefills(limits)
    )
    return len(_prefills(limits)) * num_decode, num_affordable


def most_carried(rates: Rates, limits: ScaleLimits) -> float:
    """Requests a second that the best pair within limits and budget carries."""
    return max(
        rates.carried(ByRole(num, _most_decode(num, limits)))
        for num in _prefills(limits)
        if _most_decode(num, limits) >= limits.least.decode
    )


def is_allowed_pair(pair: ByRole[int], rates: Rates, limits: ScaleLimits) -> ByRole[int]:
    """`pair`, or if a limit forbids it the next one to it; never more of one role and fewer of the
    other at once: what is too much goes first."""
    least = limits.least

    def raised(some: ByRole[int]) -> ByRole[int]:
        return some.map(lambda role, num: max(num, least.of(role)))

    capped = pair.map(lambda role, num: min(num, limits.of(role).max_workers))
    if limits.devices(raised(capped)) > limits.budget:
        # A pool below its minimum must find room, too.
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
    """The limit that `pair` breaks, for the record; one of them."""
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
    """`before` with at most `most` workers more, towards `needed`, as far as devices are free: each
    one where it lets most requests through."""
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
    """`before` with at most `most` workers fewer, towards `towards`: each one where what is left
    carries most."""
    pair = before
    for _ in range(most):
        fewer = [
            pair.but(role, pair.of(role) - 1) for role in Role if pair.of(role) > towards.of(role)
        ]
        if not fewer:
            break
        pair = max(fewer, key=lambda some: (rates.carried(some), some.prefill))
    return pair


def is_helped_by_move(
    before: ByRole[int], rates: Rates, limits: ScaleLimits, *, slack: float
) -> tuple[Role, ByRole[int]] | None:
    """The pool that holds the other up, and the pair in which it has one worker more and the other
    as many fewer as that takes, if that pair carries more by more than `slack`; else None."""
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
"""What waits shall be served within so long. Guessed: half of what a worker takes to start."""

MOST_TREND = 1.0
"""A rising load is thought on to at most so much more than it is now, as a share."""

SURE = 2.0
"""Standard deviations of chance by which a load must have risen."""


@dataclass(frozen=True)
class PredictedLoad:
    """In requests per second, and the workers that they need."""

    arriving: float
    trend: float
    """More that will come, as it seems."""
    backlog: float
    """More to serve, to clear what waits within CLEAR_S."""
    most: float
    """That the best pair within limits and budget carries."""
    waiting: float
    """Requests that wait for a worker, or at one."""
    wished: ByRole[int]
    """Workers that all of it would need."""
    needed: ByRole[int]
    """Fewest workers for what can be carried."""
    enough: ByRole[int]
    """The same with the slack, and for the streams that run."""

    @property
    def rate(self) -> float:
        """All of it."""
        return self.arriving + self.trend + self.backlog


def predict_load(
    seen: Observations,
    traffic: Traffic,
    before: Sequence[tuple[float, Traffic]],
    capacity: Capacity,
    rates: Rates,
    limits: ScaleLimits,
    pace: Pace,
) -> PredictedLoad:
    """
    Args:
        traffic: that of `seen`.
        before: earlier traffic with its moment, oldest first, without a gap.
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
    history: Sequence[tuple[float, Traffic]], now_s: float, from_s: float, to_s: float
) -> tuple[float, float]:
    """Arrivals a second of what was seen between two ages, and the seconds that were."""
    seen = [traffic for at_s, traffic in history if from_s <= now_s - at_s < to_s]
    seconds = sum(traffic.elapsed_s for traffic in seen)
    return (sum(traffic.num_arrived for traffic in seen) / seconds if seen else 0.0), seconds


def _trend(now: tuple[float, float], earlier: tuple[float, float], pace: Pace) -> float:
    """0 unless it rose by more than chance and more than the slack does."""
    rise = now[0] - earlier[0]
    if earlier[0] <= 0:
        return 0.0
    chance = SURE * math.sqrt(now[0] / now[1] + earlier[0] / earlier[1])
    if rise <= max(chance, pace.slack * earlier[0]):
        return 0.0
    return min(rise / pace.window_s * pace.lead_s, MOST_TREND * now[0])


def num_waiting(seen: Observations, traffic: Traffic, capacity: Capacity) -> float:
    """Requests that wait: in routers, and at prefill workers, as their tokens tell it; less those
    that are being computed."""
    pool = seen.pools.prefill
    num_tokens = sum(w.num_queued_tokens for w in pool.workers if not w.is_draining)
    at_workers = max(0.0, num_tokens / capacity.uncached_tokens - pool.num_ready)
    return traffic.num_waiting + traffic.num_queued + at_workers


def _backlog(seen: Observations, waiting: float, capacity: Capacity, rates: Rates) -> float:
    """Of the requests that wait, those that the workers that serve do not take up in the time that
    they may wait anyway."""
    serving = seen.pools.map(lambda _, pool: pool.num_ready)
    taken = rates.carried(serving) * (rates.bounds.wait_s + capacity.prefill_s)
    return max(0.0, waiting - taken)
