"""The figures of a load, in the words of vLLM's benchmark:

    TTFT   from the sending to the first token
    TPOT   (E2E - TTFT) / (output tokens - 1), one figure a request
    ITL    from one message with tokens to the next; all gaps of all requests
    E2E    from the sending to the end

They are of the requests that were served. Two figures are Baton's own. Goodput is given in requests
a second and as a share of *all* requests, failed and refused ones included. `tokens_per_chunk`
tells when chunks carry several tokens, which raises ITL and not TPOT. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from baton.load.runner import RequestOutcome
from process.latency_summary import LatencySummary
from process.rpc_errors import InvalidArgument


@dataclass(frozen=True)
class Limits:
    """Service-level objectives of a load: a request that keeps all of them is good. None: no
    limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Limits:
        """Parse limits from texts such as "ttft:500", "tpot:50", "e2e:10000" (milliseconds).
        Raises: InvalidArgument."""
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

    def keeps(self, outcome: RequestOutcome) -> bool:
        """Whether the request was served within all limits."""
        bounds = (
            (self.ttft_ms, outcome.ttft_s),
            (self.tpot_ms, outcome.tpot_s),
            (self.e2e_ms, outcome.e2e_s),
        )
        return outcome.is_served and all(
            bound is None or seconds is None or seconds * 1e3 <= bound for bound, seconds in bounds
        )


@dataclass(frozen=True)
class FailedRequests:
    """The requests that failed with one kind of error."""

    kind: str
    num: int
    example: str
    """Error message of the first of these requests."""


@dataclass(frozen=True)
class Report:
    """The figures of a load. Rates are over `seconds`, from the load's beginning to the end of the
    last request."""

    num_requests: int
    num_served: int
    failures: tuple[FailedRequests, ...]
    """Failed requests by kind of error, the most frequent first."""
    seconds: float
    requests_per_s: float
    offered_requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    hit_rate: float | None
    """Share of the prompt tokens of served requests that came from a cache."""
    tokens_per_chunk: float | None
    ttft: LatencySummary | None
    tpot: LatencySummary | None
    itl: LatencySummary | None
    e2e: LatencySummary | None
    lag: LatencySummary | None
    """Summary of how much later than planned requests were sent. Large values mean that the load
    generator was the bottleneck."""
    num_good: int
    good_requests_per_s: float
    good_share: float
    """Share of the requests that kept all limits, of all requests, failed ones included."""
    stages_ms: Mapping[str, float]
    """Mean time by stage of served requests, as the router accounts for it."""


def report(outcomes: Sequence[RequestOutcome], limits: Limits) -> Report:
    """Compute the figures of a load with at least one outcome."""
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
        ttft=_summary([o.ttft_s for o in served if o.ttft_s is not None]),
        tpot=_summary([o.tpot_s for o in served if o.tpot_s is not None]),
        itl=_summary([gap for o in served for gap in o.gaps_s]),
        e2e=_summary([o.e2e_s for o in served]),
        lag=_summary([o.lag_s for o in outcomes]),
        num_good=num_good,
        good_requests_per_s=_rate(num_good, seconds),
        good_share=_share(num_good, len(outcomes)) or 0.0,
        stages_ms=_stages(served),
    )


def _failures(failed: Sequence[RequestOutcome]) -> tuple[FailedRequests, ...]:
    examples: dict[str, str] = {}
    for outcome in failed:
        examples.setdefault(outcome.error, outcome.error_text)
    nums = Counter(outcome.error for outcome in failed)
    return tuple(FailedRequests(kind, num, examples[kind]) for kind, num in nums.most_common())


def _stages(served: Sequence[RequestOutcome]) -> dict[str, float]:
    sums: dict[str, float] = {}
    accounted = [outcome for outcome in served if outcome.stages]
    for outcome in accounted:
        for stage, seconds in outcome.stages:
            sums[stage] = sums.get(stage, 0.0) + seconds
    return {stage: round(total / len(accounted) * 1e3, 3) for stage, total in sums.items()}


def _rate(num: int, seconds: float) -> float:
    return round(num / seconds, 3)


def _share(num: int, of: int) -> float | None:
    return round(num / of, 4) if of else None


def _summary(seconds: Sequence[float]) -> LatencySummary | None:
    """The summary of some durations; None where there is none."""
    return LatencySummary.of(seconds) if seconds else None
