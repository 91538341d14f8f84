"""Capacity: what a worker of each role does, learned from the steps that were seen, and what
requests are like. Frozen values; `learn` makes the next one of an observation.

A mean is a ratio of two sums that forgets by evidence, not by time: what was learned before a quiet
night still holds in the morning. It begins with the prior, worth a little evidence, so that what is
seen soon outweighs it. A decode step takes a + b * batch seconds; the line is fitted through what
was seen, and as long as one batch size alone was seen, the prior says how steep it is. How long the
contexts are is in both, as they are now: that is forgotten, too, slowly.

Pure. Knows no targets, limits or windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from services.autoscaler.limits import Priors
from services.autoscaler.signals import Observations, Role, Traffic, Worker

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
