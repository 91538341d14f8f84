"""Who goes first among those that wait, and who may pass whom: pure functions over values.

| policy      | order                                                                    |
|-------------|--------------------------------------------------------------------------|
| fcfs        | who came first                                                           |
| priority    | the higher priority, then who came first                                 |
| cache_aware | the higher priority, then who was passed too often, then the longest     |
|             | cached prefix, then who came first                                       |

Passing is letting a later one of no higher priority go first: because its prefix is cached, or
because it fits where an earlier one does not. Each pass is counted, and after `max_passes` there
are no more: nobody starves behind requests of its own priority. Source of the cache-aware order:
Zheng et al. 2024 (SGLang), section 3; the ageing is ours.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, cast

Policy = Literal["fcfs", "priority", "cache_aware"]
Key = tuple[str, int]
"""(request id, sample index)."""


class Waiting(NamedTuple):
    """A sample that wants a place in steps, and maybe blocks, as the scheduler sees it."""

    key: Key
    priority: int
    order: int
    """Of `start` or `submit` calls."""

    num_tokens: int
    """Left to compute before its next draw."""

    num_blocks: int = 0
    """Free or evictable blocks that it takes; 0 if it has its own already."""

    num_places: int = 1
    """Rows that it will have in a batch: more than one once its samples or beams part."""

    num_matched_tokens: int = 0
    """Of its tokens, those whose KV is cached or computed."""

    num_passes: int = 0
    is_preempted: bool = False
    """It had its turn and lost its blocks: nobody of its priority goes before it again."""

    adapter: str = ""


def policy_of(name: str) -> Policy:
    """A name that EngineConfig has checked."""
    return cast(Policy, name)


def is_aged(waiting: Waiting, max_passes: int) -> bool:
    """It was passed as often as may be."""
    return waiting.is_preempted or waiting.num_passes >= max_passes


def rank(waiting: Waiting, policy: Policy, max_passes: int) -> tuple[int, int, int, int, int]:
    """Sorts those that wait, first come first."""
    priority = 0 if policy == "fcfs" else -waiting.priority
    aged = is_aged(waiting, max_passes)
    num_matched = waiting.num_matched_tokens if policy == "cache_aware" and not aged else 0
    is_last = policy == "cache_aware" and not aged
    return (
        priority,
        0 if waiting.is_preempted else 1,
        1 if is_last else 0,
        -num_matched,
        waiting.order,
    )


def is_pass(waiting: Waiting, first: Waiting, policy: Policy) -> bool:
    """Whether `waiting` is passed if `first` goes first."""
    if policy != "fcfs" and first.priority > waiting.priority:
        return False
    if waiting.is_preempted != first.is_preempted:
        return waiting.is_preempted
    return first.order > waiting.order
