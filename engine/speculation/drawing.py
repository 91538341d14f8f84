"""Children that are draws from a draft model's own distribution, as the multi-step rule wants them
(acceptance.py): each with what it was drawn from, none chosen for its value.

What it is drawn from is what plain decoding would draw from, if the draft model were the target
(engine/sampling/sampler.py), without what depends on the text before: penalties, n-gram bans,
grammars. Any distribution is right; one nearer to the target's is accepted more often.

The random numbers are a function of the task's seed and of the path to the parent, by which no two
parents draw with the same ones: what is drawn below one node says nothing about another. Pure.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from engine.request import Sampling
from engine.sampling.metadata import SamplingRequest
from engine.sampling.sampler import Sampler
from engine.sampling.token_history import needs_history
from engine.speculation.acceptance import Distribution, at_nodes
from engine.speculation.drafter import Draft, Guess, Task

_TRIED, _DRAFTED = range(2)
"""What random numbers are for."""


class Parent(NamedTuple):
    """Whose children are drawn."""

    sampling: Sampling
    """As of `proposing`."""
    path: tuple[int, ...]
    """Tokens from the root's child down to it; none: the newest token."""


class Children(NamedTuple):
    """Those of one parent."""

    counts: Counter[int]
    """How often each token was drawn, in the order in which they were first."""
    distribution: Distribution


def proposing(sampling: Sampling) -> Sampling:
    """What of it a draft model draws by."""
    if not needs_history(sampling):
        return sampling
    return replace(
        sampling,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        no_repeat_ngram=0,
        bad_words=(),
    )


def draw_children(
    logits: torch.Tensor, parents: Sequence[Parent], width: int
) -> list[Children | None]:
    """`width` draws for each parent. None: its logits are no numbers, or nothing may be drawn.

    Args:
        logits: [P, V], after each.
    """
    # The position is of no account: no noise is drawn.
    requests = [SamplingRequest(one.sampling, 0) for one in parents]
    distributions = Sampler().distributions(logits, requests)
    found: list[Children | None] = []
    for parent, own in zip(parents, distributions, strict=True):
        if np.isnan(own[0]):
            found.append(None)
            continue
        uniform = random.Random(random_key(parent.sampling.seed, *parent.path)).random
        sums = np.cumsum(own)
        places = sums.searchsorted([uniform() * sums[-1] for _ in range(width)], side="right")
        # By rounding the last sum may be reached beyond the last token that can be drawn.
        last = int(sums.searchsorted(sums[-1]))
        found.append(Children(Counter(min(int(place), last) for place in places), own))
    return found


def random_key(*words: int) -> int:
    """64 bits that look random, of whole numbers; only the low 64 bits of each count."""
    digest = hashlib.blake2b(digest_size=8)
    for word in words:
        digest.update((word & (2**64 - 1)).to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")


def seeded(task: Task, drafter: int) -> Task:
    """With a seed of this drafter's and this step's own, if it is drawn: draws of two drafters are
    independent, and of what was drawn before."""
    if not task.is_drawn:
        return task
    one = task.sampling
    seed = random_key(one.seed, task.sample_index, len(task.token_ids), _DRAFTED, drafter)
    return task._replace(sampling=replace(one, seed=seed))


def with_proposals(guess: Guess, task: Task, drafted: Draft) -> Guess:
    """The guess with what is tried at its nodes, by random numbers of this step's own."""

    def key(depth: int) -> int:
        position = len(task.token_ids) + depth
        return random_key(task.sampling.seed, task.sample_index, position, _TRIED)

    return guess._replace(proposals=at_nodes(guess.tree, drafted.tree, drafted.distributions, key))
