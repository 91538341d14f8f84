"""TokenTree: draft tokens after a sequence, as a tree whose nodes are tokens (SpecInfer,
definitions 3.1 and 3.2). The root is the sequence's newest token and is no node.

Nodes lie depth-first: a node comes after its parent and right after its last sibling's subtree.
Siblings have different tokens; a token that was drawn several times is one node with several
`Try`s, each of which the stochastic rules try by itself. Pure values and functions; any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

ROOT = -1
"""Stands for the sequence's newest token where a parent is named."""


class Try(NamedTuple):
    """One draw that proposed a node."""

    proposer: int
    """Index of the proposer that drew it."""
    probability: float
    """Probability of the token in the distribution that it was drawn from."""


class _Shape:
    """What follows from a tree's tokens and parents, computed when it is first asked for."""

    __slots__ = ("_children", "_depths", "_parents", "_token_ids")

    def __init__(self, token_ids: tuple[int, ...], parents: tuple[int, ...]) -> None:
        self._token_ids = token_ids
        self._parents = parents
        self._depths: tuple[int, ...] | None = None
        self._children: dict[int, dict[int, int]] | None = None

    @property
    def depths(self) -> tuple[int, ...]:
        if self._depths is None:
            depths: list[int] = []
            for parent in self._parents:
                depths.append(1 if parent == ROOT else depths[parent] + 1)
            self._depths = tuple(depths)
        return self._depths

    @property
    def children(self) -> dict[int, dict[int, int]]:
        if self._children is None:
            children: dict[int, dict[int, int]] = {}
            nodes = zip(self._token_ids, self._parents, strict=True)
            for node, (token_id, parent) in enumerate(nodes):
                children.setdefault(parent, {})[token_id] = node
            self._children = children
        return self._children


@dataclass(frozen=True)
class TokenTree:
    """A tree of draft tokens. All tuples have one entry per node.

    Raises: ValueError for what is no such tree.
    """

    token_ids: tuple[int, ...]

    parents: tuple[int, ...]
    """Parent of each node, or ROOT."""

    chances: tuple[float, ...]
    """The proposer's probability that the model samples the whole path to this node; at most its
    parent's."""

    tries: tuple[tuple[Try, ...], ...]
    """Draws that proposed each node; none where it was chosen otherwise."""

    _shape: _Shape = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_shape", _Shape(self.token_ids, self.parents))
        num_nodes = len(self.token_ids)
        if any(len(one) != num_nodes for one in (self.parents, self.chances, self.tries)):
            raise ValueError("a tree's tuples have one entry per node")
        open_path: list[int] = [ROOT]
        seen: set[tuple[int, int]] = set()
        for node, (token_id, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            while open_path and open_path[-1] != parent:
                open_path.pop()
            if not open_path:
                raise ValueError(f"node {node} hangs on {parent}: the order is not depth-first")
            open_path.append(node)
            if (parent, token_id) in seen:
                raise ValueError(f"node {node} repeats its sibling's token {token_id}")
            seen.add((parent, token_id))
            above = 1.0 if parent == ROOT else self.chances[parent]
            if not 0.0 <= self.chances[node] <= above:
                raise ValueError(f"node {node} is likelier than its parent, or no chance at all")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def depths(self) -> tuple[int, ...]:
        """1 for the root's children."""
        return self._shape.depths

    @property
    def children(self) -> dict[int, dict[int, int]]:
        """Children of each node that has some, and of ROOT: {token id: node}, in order."""
        return self._shape.children

    def prepare(self) -> None:
        """Compute `children` now, while the device computes."""
        _ = self._shape.children

    def child(self, node: int, token_id: int) -> int | None:
        """The child of `node` (or ROOT) with this token."""
        return self.children.get(node, {}).get(token_id)

    def num_followed(self, token_ids: Iterable[int]) -> int:
        """Number of these tokens, from the first on, that are a path from the root."""
        node, num_followed = ROOT, 0
        for token_id in token_ids:
            child = self.child(node, token_id)
            if child is None:
                break
            node, num_followed = child, num_followed + 1
        return num_followed

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root's child down to `node`; none for ROOT."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def with_chances(self, chances: tuple[float, ...]) -> TokenTree:
        """The same nodes with other chances, none greater than its parent's, which is not checked.
        Both trees share what is computed of their nodes."""
        if len(chances) != len(self):
            raise ValueError("a tree's tuples have one entry per node")
        return _trusted(self.token_ids, self.parents, chances, self.tries, self._shape)

    def with_tries(self, tries: tuple[tuple[Try, ...], ...]) -> TokenTree:
        """The same nodes with other tries."""
        if len(tries) != len(self):
            raise ValueError("a tree's tuples have one entry per node")
        return _trusted(self.token_ids, self.parents, self.chances, tries, self._shape)

    def best(self, num_nodes: int) -> TokenTree:
        """The likeliest `num_nodes` of the nodes; among equals, those that come first. Whole paths,
        as no node is likelier than its parent."""
        if num_nodes >= len(self):
            return self
        order = sorted(range(len(self)), key=lambda node: (-self.chances[node], node))
        return self._only(sorted(order[: max(num_nodes, 0)]))

    def without(self, dropped: Iterable[int]) -> TokenTree:
        """The tree without these nodes and what is below them."""
        gone = set(dropped)
        kept: list[int] = []
        for node, parent in enumerate(self.parents):
            if node in gone or parent in gone:
                gone.add(node)
            else:
                kept.append(node)
        return self._only(kept) if gone else self

    def _only(self, kept: Sequence[int]) -> TokenTree:
        places = {node: place for place, node in enumerate(kept)}
        places[ROOT] = ROOT
        return _trusted(
            tuple([self.token_ids[node] for node in kept]),
            tuple([places[self.parents[node]] for node in kept]),
            tuple([self.chances[node] for node in kept]),
            tuple([self.tries[node] for node in kept]),
        )


def _trusted(
    token_ids: tuple[int, ...],
    parents: tuple[int, ...],
    chances: tuple[float, ...],
    tries: tuple[tuple[Try, ...], ...],
    shape: _Shape | None = None,
) -> TokenTree:
    """A tree made of checked trees: it is not checked again, since the device waits meanwhile.

    Args:
        shape: that of another tree of the same nodes.
    """
    tree = object.__new__(TokenTree)
    known = tree.__dict__
    known["token_ids"], known["parents"] = token_ids, parents
    known["chances"], known["tries"] = chances, tries
    known["_shape"] = shape or _Shape(token_ids, parents)
    return tree


EMPTY = TokenTree((), (), (), ())


def chain(token_ids: Sequence[int], chances: Sequence[float]) -> TokenTree:
    """A tree of one path."""
    num_nodes = len(token_ids)
    return TokenTree(
        tuple(token_ids), tuple(range(-1, num_nodes - 1)), tuple(chances), ((),) * num_nodes
    )


def ordered(
    token_ids: Sequence[int],
    parents: Sequence[int],
    chances: Sequence[float],
    tries: Sequence[tuple[Try, ...]] = (),
) -> TokenTree:
    """The tree of nodes in any order that has parents before their children.

    Args:
        tries: those of each node; or none at all.
    """
    below: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        below.setdefault(parent, []).append(node)
    order: list[int] = []
    waiting = list(reversed(below.get(ROOT, [])))
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting += reversed(below.get(node, []))
    places = {ROOT: ROOT, **{node: place for place, node in enumerate(order)}}
    return TokenTree(
        tuple(token_ids[node] for node in order),
        tuple(places[parents[node]] for node in order),
        tuple(chances[node] for node in order),
        tuple(tries[node] for node in order) if tries else ((),) * len(order),
    )


def numbered(tree: TokenTree, proposer: int) -> TokenTree:
    """The tree with this proposer in all its tries; a node without tries gets one that was certain
    to come."""
    certain = (Try(proposer, 1.0),)
    return tree.with_tries(
        tuple(
            tuple(one._replace(proposer=proposer) for one in own) or certain for own in tree.tries
        )
    )


def merge(trees: Sequence[TokenTree]) -> TokenTree:
    """The tree with every path of these trees and no other (definition 3.2). A node of several
    trees has the `tries` of each, and the best of their chances."""
    if len(trees) == 1:
        return trees[0]
    root = _Node(ROOT, 1.0)
    for tree in trees:
        made: list[_Node] = []
        for token_id, parent, chance, tries in zip(
            tree.token_ids, tree.parents, tree.chances, tree.tries, strict=True
        ):
            above = root if parent == ROOT else made[parent]
            node = above.children.setdefault(token_id, _Node(token_id, 0.0))
            node.chance = max(node.chance, chance)
            node.tries += tries
            made.append(node)
    token_ids: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    all_tries: list[tuple[Try, ...]] = []
    waiting = [(node, ROOT) for node in reversed(root.children.values())]
    while waiting:
        node, parent = waiting.pop()
        place = len(token_ids)
        token_ids.append(node.token_id)
        parents.append(parent)
        chances.append(node.chance)
        all_tries.append(node.tries)
        waiting += [(child, place) for child in reversed(node.children.values())]
    return _trusted(tuple(token_ids), tuple(parents), tuple(chances), tuple(all_tries))


class _Node:
    """A node of a tree that is being merged."""

    __slots__ = ("chance", "children", "token_id", "tries")

    def __init__(self, token_id: int, chance: float) -> None:
        self.token_id = token_id
        self.chance = chance
        self.tries: tuple[Try, ...] = ()
        self.children: dict[int, _Node] = {}


def prune(tree: TokenTree, max_depth: int, end_token_ids: AbstractSet[int]) -> TokenTree:
    """The tree without nodes that are deeper than `max_depth` or below an end token."""
    # Most trees have none, and the device waits meanwhile.
    is_flat = len(tree) <= max_depth or max(tree.depths, default=0) <= max_depth
    if is_flat and end_token_ids.isdisjoint(tree.token_ids):
        return tree
    dropped = {
        node
        for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True))
        if depth > max_depth or (parent != ROOT and tree.token_ids[parent] in end_token_ids)
    }
    return tree.without(dropped)


def best_path(tree: TokenTree) -> TokenTree:
    """The path to the node with the most to gain, which is the sum of chances along its path."""
    if not len(tree):
        return EMPTY
    gains: list[float] = []
    for parent, chance in zip(tree.parents, tree.chances, strict=True):
        gains.append(chance + (0.0 if parent == ROOT else gains[parent]))
    best = tree.path(max(range(len(tree)), key=gains.__getitem__))
    return tree.without(set(range(len(tree))) - set(best))


def greedy_path(tree: TokenTree) -> TokenTree:
    """The path to a leaf by the likeliest child of each node, whatever is below that child."""
    path: list[int] = []
    below = tree.children.get(ROOT)
    while below:
        path.append(max(below.values(), key=lambda node: (tree.chances[node], -node)))
        below = tree.children.get(path[-1])
    return tree.without(set(range(len(tree))) - set(path))
