"""Advice: what a plan is told that somebody else acts upon, when he likes (KEDA, an HPA).

What is wanted is what was advised last, whether that has been done yet or not: else each look
before it is done would seem to be somebody's change, and the advice would swing. Nobody flips
workers then. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from services.autoscaler.decision import Decision
from services.autoscaler.signals import Observations


def as_advised(seen: Observations, last: Decision | None) -> Observations:
    """`seen`, with what `last` wanted; None: nothing was advised yet."""
    pools = seen.pools.map(
        lambda role, pool: replace(
            pool,
            wanted=pool.wanted if last is None else last.wanted.of(role),
            workers=tuple(replace(worker, can_flip=False) for worker in pool.workers),
        )
    )
    return replace(seen, pools=pools)
