"""Which path of a token tree is kept, so that what comes out is distributed as if the model had
drawn every token by itself.

`multi_step` is SpecInfer's multi-step speculative sampling (arXiv 2305.09781, algorithm 2): each
draw x from a drafter's distribution q is accepted with min(1, p(x) / q(x)); a rejected one leaves
the residual norm(max(0, p - q)) in p's place for the next. It keeps p whatever q is, as long as the
draws are independent of one another and of the order in which they are tried, and none is left out
for its value: children chosen as a distribution's best, or a tree pruned after it was drawn, do
not keep it. A token that was certain to be proposed has q = 1: it is accepted with p(x).

`naive` draws from p alone and follows the tree while it has the token: the paper's baseline, and
with the noise of plain decoding (engine/noise.py) the rule of the exact mode, where children may be
chosen in any way.

Pure; float64; any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from engine.speculation.drafter import Distribution, Place
from engine.speculation.tree import ROOT, TokenTree, Try

Target = Callable[[int], Distribution]
"""The model's own distribution after a node, or after ROOT."""

Uniform = Callable[[], float]
"""The next of a row of independent numbers from [0, 1)."""


class Accepted(NamedTuple):
    """What a step gives."""

    nodes: tuple[int, ...]
    """Kept, from the root's child down."""
    token_id: int
    """Drawn by the model after the last of them."""


def naive(tree: TokenTree, target: Target, uniform: Uniform) -> Accepted:
    """See the module."""
    nodes: list[int] = []
    node = ROOT
    while True:
        token_id = pick(target(node), uniform())
        child = tree.child(node, token_id)
        if child is None:
            return Accepted(tuple(nodes), token_id)
        nodes.append(child)
        node = child


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
    nodes: list[int] = []
    node = ROOT
    path: tuple[int, ...] = ()
    while True:
        wanted = target(node)
        tries = _tries(tree, node)
        accepted = None
        while tries and accepted is None:
            token_id, one = tries.pop(int(uniform() * len(tries)))
            drawn_from = distributions.get((path, one.drafter))
            if uniform() * one.probability < wanted[token_id]:
                accepted = token_id
            else:
                wanted = _residual(wanted, drawn_from, token_id)
        if accepted is None:
            return Accepted(tuple(nodes), pick(wanted, uniform()))
        node = tree.children[node][accepted]
        nodes.append(node)
        path = (*path, accepted)


def _tries(tree: TokenTree, node: int) -> list[tuple[int, Try]]:
    """Every draw that proposed a child of `node`; a child without any was certain to come."""
    return [
        (token_id, one)
        for token_id, child in tree.children.get(node, {}).items()
        for one in tree.tries[child] or (_CERTAIN,)
    ]


_CERTAIN = Try(-1, 1.0)


def _residual(wanted: Distribution, drawn_from: Distribution | None, token_id: int) -> Distribution:
    if drawn_from is None:
        left = wanted.copy()
        left[token_id] = 0.0
    else:
        left = np.maximum(wanted - drawn_from, 0.0)
    total = left.sum()
    # Nothing is left only where rounding rejected what p and q agree on.
    return left / total if total > 0.0 else wanted


def pick(distribution: Distribution, uniform: float) -> int:
    """The token at `uniform` of the running sum; never one of probability 0."""
    sums = np.cumsum(distribution)
    token_id = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    return min(token_id, int(np.flatnonzero(distribution)[-1]))
