"""TokenTree: merging (definition 3.2), cutting, and what is no tree."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.controller import AcceptanceRates
from engine.speculation.token_tree import EMPTY, ROOT, TokenTree, Try, chain, merge, numbered, prune

_paths = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=0, max_size=6)


def _merged(paths: list[list[int]]) -> TokenTree:
    trees = [
        TokenTree(
            tuple(path),
            tuple(range(-1, len(path) - 1)),
            tuple(0.5 ** (i + 1) for i in range(len(path))),
            tuple((Try(index, 0.5),) for _ in path),
        )
        for index, path in enumerate(paths)
    ]
    return merge(trees) if trees else EMPTY


def _all_paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.token_ids[one] for one in tree.path(node)) for node in range(len(tree))}


@given(_paths)
def test_a_merged_tree_has_every_path_and_no_other(paths: list[list[int]]) -> None:
    tree = _merged(paths)
    assert _all_paths(tree) == {
        tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)
    }
    # A folded node keeps each draw.
    for node in range(len(tree)):
        path = tuple(tree.token_ids[one] for one in tree.path(node))
        holders = [index for index, one in enumerate(paths) if tuple(one[: len(path)]) == path]
        assert [one.proposer for one in tree.tries[node]] == holders


@given(_paths, st.integers(0, 12), st.randoms(use_true_random=False))
def test_cutting_leaves_whole_paths(
    paths: list[list[int]], num_nodes: int, rng: random.Random
) -> None:
    tree = _merged(paths)
    best = tree.best(num_nodes)
    assert len(best) == min(num_nodes, len(tree))
    assert _all_paths(best) <= _all_paths(tree)
    if best and len(best) < len(tree):
        left = sorted(tree.chances, reverse=True)[: len(best)]
        assert sorted(best.chances, reverse=True) == left
    dropped = {node for node in range(len(tree)) if rng.random() < 0.3}
    kept = tree.without(dropped)
    assert _all_paths(kept) == {
        tuple(tree.token_ids[one] for one in tree.path(node))
        for node in range(len(tree))
        if not dropped.intersection(tree.path(node))
    }


@given(_paths)
def test_order_depths_and_children(paths: list[list[int]]) -> None:
    tree = _merged(paths)
    for node in range(len(tree)):
        path = tree.path(node)
        assert path[-1] == node
        assert tree.depths[node] == len(path)
        assert tree.child(tree.parents[node], tree.token_ids[node]) == node
        # A subtree is one run of nodes.
        below = [other for other in range(len(tree)) if node in tree.path(other)]
        assert below == list(range(node, node + len(below)))
    assert tree.child(ROOT, 99) is None


@given(_paths)
def test_with_other_chances_it_is_the_tree_that_has_them(paths: list[list[int]]) -> None:
    tree = _merged(paths)
    chances = tuple(0.5 * chance for chance in tree.chances)
    found = tree.with_chances(chances)
    expected = TokenTree(tree.token_ids, tree.parents, chances, tree.tries)
    assert found == expected and tree == _merged(paths)
    assert (found.depths, found.children) == (expected.depths, expected.children)
    assert found.best(2) == expected.best(2)
    with pytest.raises(ValueError, match="one entry per node"):
        tree.with_chances((*chances, 0.1))


@given(_paths, st.integers(0, 12), st.randoms(use_true_random=False))
def test_what_is_made_of_trees_is_a_tree(
    paths: list[list[int]], num_nodes: int, rng: random.Random
) -> None:
    """Nobody looks at it again: a constructor that does takes it, and knows the same of it."""
    tree = _merged(paths)
    dropped = [node for node in range(len(tree)) if rng.random() < 0.3]
    made = [tree, tree.best(num_nodes), tree.without(dropped), numbered(tree, 3)]
    made.append(AcceptanceRates().calibrate(tree))
    made.append(merge([numbered(one, 1) for one in made]))
    for one in made:
        one.prepare()
        again = TokenTree(one.token_ids, one.parents, one.chances, one.tries)
        assert again == one
        assert (again.depths, again.children) == (one.depths, one.children)


@given(_paths, st.integers(0, 6), st.sets(st.integers(0, 3), max_size=2))
def test_nothing_is_guessed_too_deep_or_behind_an_end(
    paths: list[list[int]], max_depth: int, ends: set[int]
) -> None:
    tree = _merged(paths)
    assert _all_paths(prune(tree, max_depth, ends)) == {
        path for path in _all_paths(tree) if len(path) <= max_depth and not ends & set(path[:-1])
    }


@pytest.mark.parametrize(
    ("token_ids", "parents", "chances", "problem"),
    [
        ((1, 2), (-1,), (1.0, 1.0), "one entry per node"),
        ((1,), (0,), (1.0,), "depth-first"),
        ((1, 2, 3), (-1, -1, 0), (1.0, 1.0, 1.0), "depth-first"),
        ((1, 1), (-1, -1), (1.0, 1.0), "repeats its sibling's"),
        ((1, 2), (-1, 0), (0.2, 0.3), "likelier than its parent"),
    ],
)
def test_what_is_no_tree_is_refused(
    token_ids: tuple[int, ...], parents: tuple[int, ...], chances: tuple[float, ...], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        TokenTree(token_ids, parents, chances, ((),) * len(token_ids))


def test_a_chain() -> None:
    tree = chain([5, 6, 7], [0.9, 0.8, 0.7])
    assert tree.path(2) == (0, 1, 2)
    assert tree.best(2) == chain([5, 6], [0.9, 0.8])
