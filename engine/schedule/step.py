"""plan_step: a step is {request: number of tokens}. Prefill, a chunk of it, and decode differ in
that number only.

Decodes first: a request that has drawn needs one token for its next draw, and gets it in every
step. What is left of the budget goes to prompts, first come first served within a priority, the
last one cut to a chunk. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A started request as the scheduler sees it."""

    request_id: str
    num_pending_tokens: int
    """Tokens known but not computed; the last of them gives the next draw. At least 1."""
    has_drawn: bool
    is_admitted: bool
    """It took part in a step already, so it holds one of the `max_num_running` places."""
    priority: int
    order: int
    """Of `start` calls."""


def plan_step(
    candidates: Iterable[Candidate], *, num_tokens_budget: int, max_num_running: int
) -> dict[str, int]:
    """Tokens per request for one step, in the order in which they lie in the batch.

    Every value is at least 1 and at most the candidate's pending tokens; their sum is at most the
    budget. With max_num_running <= num_tokens_budget every request that has drawn is in the plan.
    """
    ranked = sorted(candidates, key=lambda c: (not c.has_drawn, -c.priority, c.order))
    num_places = max_num_running - sum(1 for candidate in ranked if candidate.is_admitted)
    num_tokens_left = num_tokens_budget
    plan: dict[str, int] = {}
    for candidate in ranked:
        if num_tokens_left == 0:
            break
        if not candidate.is_admitted:
            if num_places <= 0:
                continue
            num_places -= 1
        num_tokens = min(candidate.num_pending_tokens, num_tokens_left)
        plan[candidate.request_id] = num_tokens
        num_tokens_left -= num_tokens
    return plan
