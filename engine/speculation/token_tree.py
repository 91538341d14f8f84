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
"""The parent of the tree's first level: the sequence's newest token."""


class Try(NamedTuple):
    """One random draw that proposed a node."""

    proposer: int
    """Index of the proposer that drew the token."""
    probability: float
    """Probability of the token in the distribution that it was drawn from."""


class _Shape:
    """Depths and children of a tree's nodes, computed from tokens and parents on first use."""

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
    """A tree of draft tokens; all tuples have one entry per node, in depth-first order.

    Raises: ValueError if the tuples differ in length, nodes are not depth-first, siblings repeat a
        token, or a node has a greater chance than its parent.
    """

    token_ids: tuple[int, ...]

    parents: tuple[int, ...]
    """Index of each node's parent, or ROOT."""

    chances: tuple[float, ...]
    """The proposer's probability that the model samples the whole path to each node; at most its
    parent's."""

    tries: tuple[tuple[Try, ...], ...]
    """The random draws that proposed each node; empty for a node that was not drawn."""

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
        """The depth of each node; 1 for the root's children."""
        return self._shape.depths

    @property
    def children(self) -> dict[int, dict[int, int]]:
        """The children of ROOT and of each node that has some: {token id: node}, in order."""
        return self._shape.children

    def prepare(self) -> None:
        """Compute and keep `children`. Called while the device is busy, so that later use costs no
        time."""
        _ = self._shape.children

    def child(self, node: int, token_id: int) -> int | None:
        """Return the child of `node` (or ROOT) with this token; None if it has none."""
        return self.children.get(node, {}).get(token_id)

    def num_followed(self, token_ids: Iterable[int]) -> int:
        """Return the length of the longest prefix of `token_ids` that is a path from the root."""
        node, num_followed = ROOT, 0
        for token_id in token_ids:
            child = self.child(node, token_id)
            if child is None:
                break
            node, num_followed = child, num_followed + 1
        return num_followed

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes from the root's child down to `node`; none for ROOT."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def with_chances(self, chances: tuple[float, ...]) -> TokenTree:
        """Return a tree of the same nodes with other chances, which must not exceed those of their
        parents (not checked). Raises: ValueError for a wrong number of them."""
        if len(chances) != len(self):
            raise ValueError("a tree's tuples have one entry per node")
        return _trusted(self.token_ids, self.parents, chances, self.tries, self._shape)

    def with_tries(self, tries: tuple[tuple[Try, ...], ...]) -> TokenTree:
        """Return a tree of the same nodes with other tries. Raises: ValueError for a wrong number
        of them."""
        if len(tries) != len(self):
            raise ValueError("a tree's tuples have one entry per node")
        return _trusted(self.token_ids, self.parents, self.chances, tries, self._shape)

    def best(self, num_nodes: int) -> TokenTree:
        """Return the tree of the `num_nodes` nodes with the greatest chances, the first ones among
        equals. Parents of its nodes are in it, since no node has a greater chance than its
        parent."""
        if num_nodes >= len(self):
            return self
        order = sorted(range(len(self)), key=lambda node: (-self.chances[node], node))
        return self._only(sorted(order[: max(num_nodes, 0)]))

    def without(self, dropped: Iterable[int]) -> TokenTree:
        """Return the tree without the nodes in `dropped` and their descendants."""
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
    """Create a tree from parts of checked trees without checking it, which saves time while the
    device waits.

    Args: shape: the shape of another tree of the same nodes; None: computed when needed.
    """
    tree = object.__new__(TokenTree)
    known = tree.__dict__
    known["token_ids"], known["parents"] = token_ids, parents
    known["chances"], known["tries"] = chances, tries
    known["_shape"] = shape or _Shape(token_ids, parents)
    return tree


EMPTY = TokenTree((), (), (), ())


def chain(token_ids: Sequence[int], chances: Sequence[float]) -> TokenTree:
    """Return a tree that is a single path of these tokens. Args: chances: that of each node, as in
    TokenTree."""
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
    """Sort nodes, given with parents before their children, into a depth-first tree.

    Args: tries: the draws of each node; empty: no node has any.
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
    """Return the tree with `proposer` as the proposer of all its tries. A node without tries gets
    one of probability 1."""
    certain = (Try(proposer, 1.0),)
    return tree.with_tries(
        tuple(
            tuple(one._replace(proposer=proposer) for one in own) or certain for own in tree.tries
        )
    )


def merge(trees: Sequence[TokenTree]) -> TokenTree:
    """Return the tree with exactly the paths of these trees (SpecInfer, definition 3.2). A node of
    several trees has the `tries` of each, and the greatest of their chances."""
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
    """Return the tree without nodes deeper than `max_depth` or below an end token."""
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
    """Return the path from the root to a node with the greatest sum of chances, which is the
    expected number of accepted tokens."""
    if not len(tree):
        return EMPTY
    gains: list[float] = []
    for parent, chance in zip(tree.parents, tree.chances, strict=True):
        gains.append(chance + (0.0 if parent == ROOT else gains[parent]))
    best = tree.path(max(range(len(tree)), key=gains.__getitem__))
    return tree.without(set(range(len(tree))) - set(best))


def greedy_path(tree: TokenTree) -> TokenTree:
    """Return the path that follows the child with the greatest chance at each node, down to a
    leaf."""
    path: list[int] = []
    below = tree.children.get(ROOT)
    while below:
        path.append(max(below.values(), key=lambda node: (tree.chances[node], -node)))
        below = tree.children.get(path[-1])
    return tree.without(set(range(len(tree))) - set(path))
