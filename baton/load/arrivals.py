"""When requests arrive, whatever becomes of those before: an open loop. Pure functions of a seed.

Rates come in phases, so that a load may step, burst or ramp: "4" is 4 requests a second throughout,
"2:30,8:10,2:30" is 30 s at 2, 10 s at 8, then 30 s at 2, "0..8:60" climbs from 0 to 8 in 60 s.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from process.errors import InvalidArgument

Kind = Literal["poisson", "constant"]

MAX_REQUESTS = 1_000_000
"""More than any machine that sends them can hold the outcomes of."""


@dataclass(frozen=True)
class Phase:
    """A rate, or a way from one to another, for a while."""

    rate_per_s: float
    end_rate_per_s: float
    seconds: float
    """Infinite: to the end."""

    @property
    def num_expected(self) -> float:
        return (self.rate_per_s + self.end_rate_per_s) / 2 * self.seconds

    def when(self, num: float) -> float:
        """Seconds into the phase until `num` requests are expected: the inverse of the rate's
        integral."""
        if math.isinf(self.seconds) or self.rate_per_s == self.end_rate_per_s:
            return num / self.rate_per_s
        slope = (self.end_rate_per_s - self.rate_per_s) / self.seconds
        root = math.sqrt(max(0.0, self.rate_per_s**2 + 2 * slope * num))
        return (root - self.rate_per_s) / slope


def parse_rates(text: str) -> list[Phase]:
    """Phases out of "R", or "R:SECONDS,R..R:SECONDS,...".

    Raises: InvalidArgument naming the part that is not so.
    """
    parts = text.split(",")
    if len(parts) == 1 and ":" not in text:
        rate = _number(text, text)
        if rate <= 0:
            raise InvalidArgument("--rate", f"{text}: must be more than 0")
        return [Phase(rate, rate, math.inf)]
    phases = []
    for part in parts:
        rates, colon, seconds_text = part.partition(":")
        if not colon:
            raise InvalidArgument("--rate", f"{part!r}: of several phases each is RATE:SECONDS")
        first, dots, last = rates.partition("..")
        rate, seconds = _number(first, part), _number(seconds_text, part)
        if seconds <= 0:
            raise InvalidArgument("--rate", f"{part!r}: seconds must be more than 0")
        phases.append(Phase(rate, _number(last, part) if dots else rate, seconds))
    if not any(phase.num_expected for phase in phases):
        raise InvalidArgument("--rate", f"{text!r} sends nothing")
    return phases


def arrivals(
    phases: Sequence[Phase],
    *,
    num_requests: int | None,
    kind: Kind = "poisson",
    burstiness: float = 1.0,
    seed: int = 0,
) -> list[float]:
    """Seconds after the beginning, in order.

    Args:
        num_requests: at most so many; None: until the phases end.
        kind: "constant" spaces them evenly; "poisson" draws the gaps, of a gamma distribution whose
            shape is `burstiness` (as vLLM's benchmark): 1 is Poisson, less comes in bursts.
    Raises: InvalidArgument when nothing ends the load, or a number is out of range.
    """
    if num_requests is None and math.isinf(phases[-1].seconds):
        raise InvalidArgument("--requests", "needed where --rate has no end")
    if num_requests is not None and num_requests < 1:
        raise InvalidArgument("--requests", f"{num_requests} is less than 1")
    if not (math.isfinite(burstiness) and burstiness > 0):
        raise InvalidArgument("--burstiness", f"{burstiness} is not above 0")
    times: list[float] = []
    for at_s in _times(phases, _gaps(kind, burstiness, random.Random(f"arrivals {seed}"))):
        if num_requests is not None and len(times) >= num_requests:
            break
        if len(times) >= MAX_REQUESTS:
            raise InvalidArgument("--rate", f"more than {MAX_REQUESTS} requests; shorten the load")
        times.append(at_s)
    return times


def _gaps(kind: Kind, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Gaps of mean 1; the first request of an even load comes at once."""
    if kind == "constant":
        yield 0.0
        yield from itertools.repeat(1.0)
    while True:
        yield rng.gammavariate(burstiness, 1 / burstiness)


def _times(phases: Sequence[Phase], gaps: Iterator[float]) -> Iterator[float]:
    """Arrivals of rate 1, stretched so that the rate is each phase's."""
    begin_s = num_before = num_now = 0.0
    num_now = next(gaps)
    for phase in phases:
        while num_now - num_before < phase.num_expected:
            yield begin_s + phase.when(num_now - num_before)
            num_now += next(gaps)
        begin_s, num_before = begin_s + phase.seconds, num_before + phase.num_expected


def _number(text: str, part: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InvalidArgument("--rate", f"{part!r}: {text!r} is no number") from None
    if not (math.isfinite(value) and value >= 0):
        raise InvalidArgument("--rate", f"{part!r}: {text!r} is not 0 or more")
    return value
