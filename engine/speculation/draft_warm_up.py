"""warm_up: a drafter's first guesses, so that no request pays for what they compile or allocate,
and no trial (exploration.py) takes that for the price of guessing. Engine thread only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from engine.request import Sampling
from engine.sequence import Key
from engine.speculation.drafter import Drafter, Task

_NUM_TOKENS = 4
_MOST_ROWS = 20
"""Numbers of tokens that are tried: what a few sequences with a few kept tokens each come with. On
a CPU a matrix product of a new number of rows is compiled when it is first met."""
_NOBODY: Key = ("", -1)
"""No sample has a number below 0."""
_WAYS = (
    (Sampling(max_tokens=1), False),
    (Sampling(max_tokens=1, temperature=1.0), False),
    (Sampling(max_tokens=1, temperature=1.0), True),
)
"""How children are chosen; whether they are draws."""


def warm_up(drafter: Drafter, num_nodes: int) -> None:
    """Guess for a sequence that nobody has, in each way, when it is new and when it has grown by a
    token; and one token each when it has grown by more. It is forgotten.

    Args:
        num_nodes: most nodes of a tree.
    """
    for sampling, is_drawn in _WAYS:
        task = _task((0,) * _NUM_TOKENS, sampling, num_nodes, is_drawn=is_drawn)
        drafter.propose([task])
        drafter.propose([task._replace(token_ids=(0,) * (_NUM_TOKENS + 1))])
        drafter.forget(_NOBODY)
    num_tokens = 0
    for num_rows in range(1, _MOST_ROWS + 1):
        num_tokens += num_rows
        task = _task((0,) * num_tokens, _WAYS[0][0], num_nodes, max_depth=1)
        drafter.propose([task])
    drafter.forget(_NOBODY)


def _task(
    token_ids: Sequence[int],
    sampling: Sampling,
    num_nodes: int,
    *,
    max_depth: int = sys.maxsize,
    is_drawn: bool = False,
) -> Task:
    return Task(
        _NOBODY,
        token_ids,
        num_prompt_tokens=_NUM_TOKENS,
        sampling=sampling,
        sample_index=0,
        num_nodes=num_nodes,
        max_depth=max_depth,
        is_drawn=is_drawn,
    )
