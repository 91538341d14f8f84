"""Which path of a token tree is kept, so that what comes out is distributed as if the model had
drawn every token by itself.

`accept` is one node of SpecInfer's multi-step speculative sampling (arXiv 2305.09781, algorithm 2):
each draw x from a drafter's distribution q is accepted with min(1, p(x) / q(x)); a rejected one
leaves the residual norm(max(0, p - q)) in p's place for the next. It keeps p whatever q is, as long
as the draws are independent of one another and of the order in which they are tried, and none is
left out for its value. A token that was certain to be proposed, or of which nobody knows what it
was drawn from, has q = 1: it is accepted with p(x), which is right for any token, whoever chose it
and how, as long as the numbers that judge it had no say in that. Several of them, one after the
other, are one draw from p, taken apart.

So a tree may be cut after it was drawn, but not its draws: a node that is not computed is tried all
the same, and if it is accepted the path ends with it (`at_nodes`). Whether a node is computed must
not depend on what was drawn below it.

`naive` draws from p alone and follows the tree while it has the token: the paper's baseline, and
with the noise of plain decoding (baton_kernels/noise.py) the rule of the exact mode, where children
may be chosen in any way.

Pure; float64; any thread.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.speculation.tree import ROOT, TokenTree

Distribution = NDArray[np.float64]
"""[V], sums to 1."""

Place = tuple[tuple[int, ...], int]
"""(tokens from the root's child down to a parent, index of a drafter): whose distribution after
which guesses. By tokens, so that it stays when trees are merged."""

Target = Callable[[int], Distribution]
"""The model's own distribution after a node, or after ROOT."""

Uniform = Callable[[], float]
"""The next of a row of independent numbers from [0, 1)."""


class Proposal(NamedTuple):
    """One draw of what may follow a node."""

    token_id: int
    probability: float
    """In what it was drawn from."""
    drawn_from: Distribution | None
    """None: it was certain to come."""


class Proposals(NamedTuple):
    """All draws of what may follow one node."""

    tries: tuple[Proposal, ...]
    key: int
    """Of the random numbers by which they are judged."""


class Accepted(NamedTuple):
    """What a step gives."""

    nodes: tuple[int, ...]
    """Kept, from the root's child down."""
    token_id: int
    """Drawn by the model after the last of them."""


def naive(tree: TokenTree, target: Target, uniform: Uniform) -> Accepted:
    """See the module."""
    return _follow(tree, lambda node, _: pick(target(node), uniform()))


def multi_step(
    tree: TokenTree,
    distributions: Mapping[Place, Distribution],
    target: Target,
    uniform: Uniform,
) -> Accepted:
    """See the module.

    Args:
        distributions: what each try was drawn from (Draft.distributions).
    """
    return _follow(
        tree,
        lambda node, path: accept(target(node), _tries(tree, node, path, distributions), uniform),
    )


def _follow(tree: TokenTree, draw: Callable[[int, tuple[int, ...]], int]) -> Accepted:
    nodes: list[int] = []
    path: tuple[int, ...] = ()
    while True:
        node = nodes[-1] if nodes else ROOT
        token_id = draw(node, path)
        child = tree.child(node, token_id)
        if child is None:
            return Accepted(tuple(nodes), token_id)
        nodes.append(child)
        path = (*path, token_id)


def accept(wanted: Distribution, tries: Sequence[Proposal], uniform: Uniform) -> int:
    """The token that follows a node, distributed as `wanted`: an accepted one of the tries, or one
    drawn from what they leave."""
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


def at_nodes(
    computed: TokenTree,
    drafted: TokenTree,
    distributions: Mapping[Place, Distribution],
    key: Callable[[int], int],
) -> tuple[Proposals | None, ...]:
    """What is tried after the newest token, and after each computed node. None: nothing was drawn
    there.

    Args:
        computed: what is left of `drafted`.
        key: of the random numbers at a depth; 0: after the newest token.
    Returns: one entry more than there are nodes; none at all where nothing was drafted.
    """
    if not len(drafted):
        return ()
    paths: list[tuple[int, ...]] = [()]
    places = [ROOT]
    for token_id, parent in zip(computed.token_ids, computed.parents, strict=True):
        place = drafted.child(places[1 + parent], token_id)
        assert place is not None, "a node was computed that nobody drafted"
        places.append(place)
        paths.append((*paths[1 + parent], token_id))
    found: list[Proposals | None] = []
    for place, path in zip(places, paths, strict=True):
        tries = _tries(drafted, place, path, distributions)
        found.append(Proposals(tries, key(len(path))) if tries else None)
    return tuple(found)


def judge(wanted: Distribution, proposals: Proposals) -> int:
    """`accept`, by the random numbers of the key."""
    return accept(wanted, proposals.tries, random.Random(proposals.key).random)


def _tries(
    tree: TokenTree, node: int, path: tuple[int, ...], distributions: Mapping[Place, Distribution]
) -> tuple[Proposal, ...]:
    """Every draw that proposed a child of `node`; a child without any was certain to come."""
    tries: list[Proposal] = []
    for token_id, child in tree.children.get(node, {}).items():
        if not tree.tries[child]:
            tries.append(Proposal(token_id, 1.0, None))
        for one in tree.tries[child]:
            drawn_from = distributions.get((path, one.drafter))
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
    """The token at `uniform` of the running sum; never one of probability 0."""
    sums = np.cumsum(distribution)
    token_id = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    return min(token_id, int(np.flatnonzero(distribution)[-1]))
