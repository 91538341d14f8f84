"""What a load's outcomes come to, in the words of vLLM's benchmark:

    TTFT   from sending to the first token that is read
    TPOT   (E2E - TTFT) / (output tokens - 1), one a request
    ITL    the gap between what is read and what is read next, all gaps of all requests together
    E2E    from sending to the end

of requests that were served. Two things are ours: goodput is given as a share of *all* requests,
failed and refused ones included, beside requests a second; and a chunk that carried several tokens
is told of (`tokens_per_chunk`), since it makes ITL look coarse and TPOT not. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from baton.load.outcome import Outcome
from process.errors import InvalidArgument
from process.spread import Spread


@dataclass(frozen=True)
class Limits:
    """What a request must keep to be good; None: no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Limits:
        """Out of "ttft:500", "tpot:50", "e2e:10000". Raises: InvalidArgument naming the wrong
        one."""
        names = {field.name.removesuffix("_ms"): field.name for field in fields(cls)}
        limits: dict[str, float] = {}
        for text in texts:
            name, _, number = text.partition(":")
            try:
                value = float(number)
            except ValueError:
                value = 0.0
            if name not in names or not value > 0:
                raise InvalidArgument(
                    "--goodput", f"{text!r}: write one of {', '.join(names)} as NAME:MILLISECONDS"
                )
            limits[names[name]] = value
        return cls(**limits)

    def keeps(self, outcome: Outcome) -> bool:
        """Whether a request was served within all of them."""
        bounds = (
            (self.ttft_ms, outcome.ttft_s),
            (self.tpot_ms, outcome.tpot_s),
            (self.e2e_ms, outcome.e2e_s),
        )
        return outcome.is_served and all(
            bound is None or seconds is None or seconds * 1e3 <= bound for bound, seconds in bounds
        )


@dataclass(frozen=True)
class Failure:
    """Requests that failed alike."""

    kind: str
    num: int
    example: str
    """What the first of them was told."""


@dataclass(frozen=True)
class Report:
    """See the module. Rates are over `seconds`, from the beginning to the last end."""

    num_requests: int
    num_served: int
    failures: tuple[Failure, ...]
    """Requests that were not served, by kind of error, the most frequent first."""
    seconds: float
    requests_per_s: float
    offered_requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    hit_rate: float | None
    """Prompt tokens that nobody computed, of those asked by served requests."""
    tokens_per_chunk: float | None
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2e: Spread | None
    lag: Spread | None
    """How much later than planned requests were sent: large, and the sender was the bottleneck."""
    num_good: int
    good_requests_per_s: float
    good_share: float
    """Of all requests, failed ones included."""
    stages_ms: Mapping[str, float]
    """Mean time by stage of served requests, where the router tells."""


def report(outcomes: Sequence[Outcome], limits: Limits) -> Report:
    """Of at least one outcome."""
    served = [outcome for outcome in outcomes if outcome.is_served]
    seconds = max(max(outcome.end_s for outcome in outcomes), 1e-9)
    planned_s = max(outcome.planned_s for outcome in outcomes)
    num_input = sum(outcome.num_input_tokens for outcome in served)
    num_output = sum(outcome.num_output_tokens for outcome in served)
    num_chunks = sum(len(outcome.arrivals) for outcome in served)
    num_good = sum(limits.keeps(outcome) for outcome in outcomes)
    return Report(
        num_requests=len(outcomes),
        num_served=len(served),
        failures=_failures([outcome for outcome in outcomes if not outcome.is_served]),
        seconds=round(seconds, 3),
        requests_per_s=_rate(len(served), seconds),
        offered_requests_per_s=_rate(len(outcomes), planned_s) if planned_s > 0 else 0.0,
        input_tokens_per_s=_rate(num_input, seconds),
        output_tokens_per_s=_rate(num_output, seconds),
        hit_rate=_share(sum(outcome.num_cached_tokens for outcome in served), num_input),
        tokens_per_chunk=_share(num_output, num_chunks),
        ttft=_spread([o.ttft_s for o in served if o.ttft_s is not None]),
        tpot=_spread([o.tpot_s for o in served if o.tpot_s is not None]),
        itl=_spread([gap for o in served for gap in o.gaps_s]),
        e2e=_spread([o.e2e_s for o in served]),
        lag=_spread([o.lag_s for o in outcomes]),
        num_good=num_good,
        good_requests_per_s=_rate(num_good, seconds),
        good_share=_share(num_good, len(outcomes)) or 0.0,
        stages_ms=_stages(served),
    )


def as_json(result: Report) -> dict[str, Any]:
    """The report as JSON values."""
    return asdict(result)


def _failures(failed: Sequence[Outcome]) -> tuple[Failure, ...]:
    examples: dict[str, str] = {}
    for outcome in failed:
        examples.setdefault(outcome.error, outcome.error_text)
    nums = Counter(outcome.error for outcome in failed)
    return tuple(Failure(kind, num, examples[kind]) for kind, num in nums.most_common())


def _stages(served: Sequence[Outcome]) -> dict[str, float]:
    sums: dict[str, float] = {}
    told = [outcome for outcome in served if outcome.stages]
    for outcome in told:
        for stage, seconds in outcome.stages:
            sums[stage] = sums.get(stage, 0.0) + seconds
    return {stage: round(total / len(told) * 1e3, 3) for stage, total in sums.items()}


def _rate(num: int, seconds: float) -> float:
    return round(num / seconds, 3)


def _share(num: int, of: int) -> float | None:
    return round(num / of, 4) if of else None


def _spread(seconds: Sequence[float]) -> Spread | None:
    """None of nothing."""
    return Spread.of(seconds) if seconds else None
