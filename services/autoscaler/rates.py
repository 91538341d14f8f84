"""Rates: how many requests a second so many workers of a role carry within the targets; and from
that, how many a rate needs.

Prefill is a queue: prompts come as they like, N workers share one line, and the wait at the
target's quantile is Sakasegawa's approximation of M/G/N. What the wait may be is what the time to
the first token leaves beside computing the prompt. Decode is a batch: by Little's law so many
streams run at once, a step takes a + b * batch, and a worker may have as many as keep a step within
the time per token, as its blocks hold, and as it takes at all; at the quantile, for streams come by
chance as well.

Both tables ascend, so more load never needs fewer workers. Pure; knows no time.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from statistics import NormalDist

from services.autoscaler.capacity import Capacity
from services.autoscaler.limits import Priors, ScaleLimits, Targets
from services.autoscaler.signals import ByRole, Role

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
