"""Rejection sampling over a token tree: which path is kept, so that what comes out is distributed
as if the model had sampled every token by itself; and draws of children as the rule wants them.

`accept` is one node of SpecInfer's multi-step speculative sampling (arXiv 2305.09781, algorithm 2):
each draw x from a proposer's distribution q is accepted with min(1, p(x) / q(x)); a rejected one
leaves the residual norm(max(0, p - q)) in p's place for the next. It keeps p whatever q is, as long
as the draws are independent of one another and of the order in which they are tried, and none is
left out for its value. A token that was certain to be proposed, or whose q is not known, has q = 1:
it is accepted with p(x), which is right for any token however it was chosen, as long as the choice
did not see the numbers that judge it. Several such tokens, one after the other, are one draw from
p, taken apart.

So a tree may be cut after it was drawn, but not its draws: a node that is not computed is tried all
the same, and if it is accepted the path ends with it (`proposals_at_nodes`). Whether a node is
computed must not depend on what was drawn below it.

`naive` samples from p alone and follows the tree while it has the token: the paper's baseline, and,
with plain decoding's noise, the rule of the exact mode, where children may be chosen in any way.

Children are drawn from what plain decoding would sample from, if the draft model were the target,
without what depends on the text before: penalties, n-gram bans, grammars (`proposal_sampling`). Any
distribution is right; one nearer to the target's is accepted more often. Their random numbers are a
function of the task's seed and of the path to the parent, so that no two parents draw with the same
ones: what is drawn below one node says nothing about another.

Pure; float64; any thread.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.request import Sampling
from engine.sampling.token_history import needs_history
from engine.speculation.token_tree import ROOT, TokenTree

if TYPE_CHECKING:
    from engine.speculation.proposer import Draft, DraftTask, DraftTokens

Distribution = NDArray[np.float64]
"""A probability distribution over the vocabulary: [V], sums to 1."""

DistributionKey = tuple[tuple[int, ...], int]
"""(tokens from the root's child down to a parent, index of a proposer): the key of the proposer's
distribution after that parent. It names tokens, so that it stays valid when trees are merged."""

Target = Callable[[int], Distribution]
"""Returns the model's own distribution after a node, or after ROOT."""

Uniform = Callable[[], float]
"""Returns the next of a series of independent random numbers from [0, 1)."""

_TRY_KEY, _DRAFT_KEY = range(2)
"""The uses of a key of random numbers: to verify tries, or to draw drafts."""


class Proposal(NamedTuple):
    """One draw of a token after a node."""

    token_id: int
    probability: float
    """Probability of the token in the distribution that it was drawn from."""
    drawn_from: Distribution | None
    """The distribution that the token was drawn from; None: it was proposed with certainty."""


class Proposals(NamedTuple):
    """All draws after one node."""

    tries: tuple[Proposal, ...]
    key: int
    """Key of the random numbers that verify them."""


class AcceptedPath(NamedTuple):
    """The accepted path of a tree, and the token sampled after it."""

    nodes: tuple[int, ...]
    """Accepted nodes, from the root's child down."""
    token_id: int
    """The token that the model sampled after the last accepted node."""


def naive(tree: TokenTree, target: Target, uniform: Uniform) -> AcceptedPath:
    """Sample tokens from the target and return the path of the tree that they follow, with the
    first token that leaves it."""
    return _follow(tree, lambda node, _: pick(target(node), uniform()))


def multi_step(
    tree: TokenTree,
    distributions: Mapping[DistributionKey, Distribution],
    target: Target,
    uniform: Uniform,
) -> AcceptedPath:
    """Return the path of the tree that multi-step speculative sampling (`accept` at each node)
    keeps.

    Args: distributions: the distributions that the tries were drawn from (Draft.distributions).
    """
    return _follow(
        tree,
        lambda node, path: accept(target(node), _tries(tree, node, path, distributions), uniform),
    )


def _follow(tree: TokenTree, sample: Callable[[int, tuple[int, ...]], int]) -> AcceptedPath:
    nodes: list[int] = []
    path: tuple[int, ...] = ()
    while True:
        node = nodes[-1] if nodes else ROOT
        token_id = sample(node, path)
        child = tree.child(node, token_id)
        if child is None:
            return AcceptedPath(tuple(nodes), token_id)
        nodes.append(child)
        path = (*path, token_id)


def accept(wanted: Distribution, tries: Sequence[Proposal], uniform: Uniform) -> int:
    """Return the token that follows a node, distributed as `wanted`: the first of the tries that is
    accepted, or else one sampled from the residual distribution."""
    drawn = [one for one in tries if one.drawn_from is not None]
    # Last: then it makes no difference that a certain token is no try of its own where a draw
    # proposed it, too.
    certain = [one for one in tries if one.drawn_from is None]
    while drawn or certain:
        one = drawn.pop(int(uniform() * len(drawn))) if drawn else certain.pop()
        if uniform() * one.probability < wanted[one.token_id]:
            return one.token_id
        wanted = _residual(wanted, one)
    return pick(wanted, uniform())


def judge(wanted: Distribution, proposals: Proposals) -> int:
    """Apply `accept` to proposals, with the random numbers of their key."""
    return accept(wanted, proposals.tries, random.Random(proposals.key).random)


def proposals_at_nodes(
    computed: TokenTree,
    drafted: TokenTree,
    distributions: Mapping[DistributionKey, Distribution],
    key: Callable[[int], int],
) -> tuple[Proposals | None, ...]:
    """Collect the draws to verify after the newest token, and after each computed node; None where
    nothing was drawn.

    Args:
        computed: the part of `drafted` that the step computes.
        key: returns the key of the random numbers at a depth; 0 is after the newest token.
    Returns: one entry more than there are computed nodes; an empty tuple if nothing was drafted.
    """
    if not len(drafted):
        return ()
    paths: list[tuple[int, ...]] = [()]
    places = [ROOT]
    for token_id, parent in zip(computed.token_ids, computed.parents, strict=True):
        place = drafted.child(places[1 + parent], token_id)
        assert place is not None, "a node is computed that was not drafted"
        places.append(place)
        paths.append((*paths[1 + parent], token_id))
    found: list[Proposals | None] = []
    for place, path in zip(places, paths, strict=True):
        tries = _tries(drafted, place, path, distributions)
        found.append(Proposals(tries, key(len(path))) if tries else None)
    return tuple(found)


def with_proposals(tokens: DraftTokens, task: DraftTask, drafted: Draft) -> DraftTokens:
    """Add to draft tokens the draws to verify at their nodes, with the keys of this step's random
    numbers."""

    def key(depth: int) -> int:
        position = len(task.token_ids) + depth
        return random_key(task.sampling.seed, task.sample_index, position, _TRY_KEY)

    return tokens._replace(
        proposals=proposals_at_nodes(tokens.tree, drafted.tree, drafted.distributions, key)
    )


def _tries(
    tree: TokenTree,
    node: int,
    path: tuple[int, ...],
    distributions: Mapping[DistributionKey, Distribution],
) -> tuple[Proposal, ...]:
    """Return every draw that proposed a child of `node`; a child without draws counts as one of
    certainty."""
    tries: list[Proposal] = []
    for token_id, child in tree.children.get(node, {}).items():
        if not tree.tries[child]:
            tries.append(Proposal(token_id, 1.0, None))
        for one in tree.tries[child]:
            drawn_from = distributions.get((path, one.proposer))
            tries.append(
                Proposal(token_id, 1.0 if drawn_from is None else one.probability, drawn_from)
            )
    return tuple(tries)


def _residual(wanted: Distribution, rejected: Proposal) -> Distribution:
    if rejected.drawn_from is None:
        left = wanted.copy()
        left[rejected.token_id] = 0.0
    else:
        left = np.maximum(wanted - rejected.drawn_from, 0.0)
    total = left.sum()
    # Nothing is left only where rounding rejected what p and q agree on.
    return left / total if total > 0.0 else wanted


def pick(distribution: Distribution, uniform: float) -> int:
    """Return the token whose interval of the cumulative distribution contains `uniform`; never one
    of probability 0."""
    sums = np.cumsum(distribution)
    token_id = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    return min(token_id, int(np.flatnonzero(distribution)[-1]))


class DrawnChildren(NamedTuple):
    """The draws of one parent's children."""

    counts: Counter[int]
    """Number of draws of each token, in the order of their first draws."""
    distribution: Distribution


def proposal_sampling(sampling: Sampling) -> Sampling:
    """Return the sampling parameters with which a draft model draws for a request with
    `sampling`."""
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
    distributions: NDArray[np.float64], keys: Sequence[int], width: int
) -> list[DrawnChildren | None]:
    """Draw `width` children for each parent. An entry is None where no token may be drawn, or the
    draft model's logits are not finite.

    Args:
        distributions: [P, V], the distribution after each parent.
        keys: the key of each parent's random numbers.
    """
    found: list[DrawnChildren | None] = []
    for key, own in zip(keys, distributions, strict=True):
        if np.isnan(own[0]):
            found.append(None)
            continue
        uniform = random.Random(key).random
        sums = np.cumsum(own)
        places = sums.searchsorted([uniform() * sums[-1] for _ in range(width)], side="right")
        # By rounding the last sum may be reached beyond the last token that can be drawn.
        last = int(sums.searchsorted(sums[-1]))
        found.append(DrawnChildren(Counter(min(int(place), last) for place in places), own))
    return found


def random_key(*words: int) -> int:
    """Return a 64-bit hash of integers; only the low 64 bits of each count."""
    digest = hashlib.blake2b(digest_size=8)
    for word in words:
        digest.update((word & (2**64 - 1)).to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")


def seeded(task: DraftTask, proposer: int) -> DraftTask:
    """Return the task with a seed that depends on the proposer and the step if it `is_drawn`, so
    that draws of two proposers, and of two steps, are independent; else the task itself."""
    if not task.is_drawn:
        return task
    one = task.sampling
    seed = random_key(one.seed, task.sample_index, len(task.token_ids), _DRAFT_KEY, proposer)
    return task._replace(sampling=replace(one, seed=seed))
