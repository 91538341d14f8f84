"""plan_step: a step is {sample: number of tokens}. Prefill, a chunk of it, and decode differ in
that number only.

A prompt whose log probabilities are wanted takes a row of logits for each token; all rows of a step
together are bounded, since one of a large vocabulary takes as much as the hidden states of a
hundred tokens.

Decodes first: a sample that has drawn gets a token in every step, and the rest of what it has (text
that its grammar forced) if the budget allows. What is left goes to prompts in the order of the
policy, each at most its bound, the last one cut to a chunk. Who takes part at all is decided before
(engine/schedule/admit.py). Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from engine.schedule.order import Key, Policy

MAX_PROMPT_ROWS = 256
"""Tokens of prompts whose log probabilities are wanted in one step: 67 MB of bfloat16 logits at a
vocabulary of 131,072. Guessed: from here on a GPU's step takes as long as it has tokens."""


class Candidate(NamedTuple):
    """A sample that takes part in steps, as the scheduler sees it."""

    key: Key
    num_pending_tokens: int
    """Tokens known but not computed; the last of them gives the next draw. At least 1."""
    has_drawn: bool
    priority: int
    order: int
    """Of `start` or `submit` calls."""
    is_scored: bool = False
    """Log probabilities of its prompt are wanted."""


def plan_step(
    candidates: Iterable[Candidate],
    *,
    num_tokens_budget: int,
    max_num_tokens_each: int = 0,
    policy: Policy = "priority",
) -> dict[Key, int]:
    """Tokens per sample for one step, in the order in which they lie in the batch.

    Every value is at least 1 and at most the candidate's pending tokens; a prompt's at most
    `max_num_tokens_each` (0: no bound), and those of all that are scored at most MAX_PROMPT_ROWS;
    the sum is at most the budget. With no more candidates than budget, every one that has drawn is
    in the plan.
    """
    decodes: list[Candidate] = []
    prompts: list[Candidate] = []
    for candidate in candidates:
        (decodes if candidate.has_drawn else prompts).append(candidate)
    plan = {candidate.key: 1 for candidate in decodes[:num_tokens_budget]}
    num_tokens_left = num_tokens_budget - len(plan)
    for candidate in decodes:
        if candidate.num_pending_tokens > 1 and candidate.key in plan:
            num_more = min(candidate.num_pending_tokens - 1, num_tokens_left)
            plan[candidate.key] += num_more
            num_tokens_left -= num_more
    if policy == "fcfs":
        prompts.sort(key=lambda one: one.order)
    else:
        prompts.sort(key=lambda one: (-one.priority, one.order))
    bound = max_num_tokens_each or num_tokens_budget
    num_rows_left = MAX_PROMPT_ROWS
    for candidate in prompts:
        if num_tokens_left == 0:
            break
        num_tokens = min(candidate.num_pending_tokens, num_tokens_left, bound)
        if candidate.is_scored:
            num_tokens = min(num_tokens, num_rows_left)
            num_rows_left -= num_tokens
            if num_tokens == 0:
                continue
        plan[candidate.key] = num_tokens
        num_tokens_left -= num_tokens
    return plan
