"""What of guesses can be computed: for whom, how deep, in which grammar, and on a model that takes
one path, which.

Pure functions over values; states of grammars are forked.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from engine.request import State
from engine.sequence import Sequence as Sample
from engine.speculation.drafter import Guess
from engine.speculation.tree import EMPTY, ROOT, TokenTree

if TYPE_CHECKING:
    from engine.grammar.state import GrammarState

MAX_HISTORY = 8192
"""Tokens up to which a sample with penalties on its own text, or bans in it, is guessed for: each
node has a copy of what is known of them (1.8 ms at this length for 16 nodes)."""


def takes_guesses(sample: Sample, num_tokens: int) -> bool:
    """It draws in a step that computes so many of its tokens, and drew before."""
    request = sample.request
    return (
        sample.state is State.RUNNING
        and num_tokens == sample.num_pending_tokens
        and sample.takes_guesses
        and (sample.grammar is None or not sample.grammar.is_busy)
        and request.beam is None
        and request.hold_after is None
        and (sample.history is None or len(sample.token_ids) <= MAX_HISTORY)
        and not sample.group.is_continued
    )


def num_levels(sample: Sample) -> int:
    """How deep a tree may be: the last token that the sample may have is never computed, and so
    nothing is guessed after it."""
    return max(0, sample.group.max_output_tokens - sample.num_output_tokens - 1)


def within(tree: TokenTree, max_depth: int, ends: AbstractSet[int]) -> TokenTree:
    """The tree without what is deeper, or follows an end."""
    # Most are so, and the device waits meanwhile.
    is_flat = len(tree) <= max_depth or max(tree.depths, default=0) <= max_depth
    if is_flat and ends.isdisjoint(tree.token_ids):
        return tree
    dropped = {
        node
        for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True))
        if depth > max_depth or (parent != ROOT and tree.token_ids[parent] in ends)
    }
    return tree.without(dropped)


def in_grammar(tree: TokenTree, grammar: GrammarState | None) -> Guess:
    """The tree without what its grammar does not allow, and where each node is in it."""
    if grammar is None:
        return Guess(tree, (None,) * len(tree))
    states = {ROOT: grammar}
    dropped: set[int] = set()
    for node, (parent, token_id) in enumerate(zip(tree.parents, tree.token_ids, strict=True)):
        state = None if parent in dropped else states[parent].fork()
        if state is not None and state.accept(token_id) and not state.is_complete:
            states[node] = state
        else:
            dropped.add(node)
    kept = [states[node] for node in range(len(tree)) if node not in dropped]
    return Guess(tree.without(dropped), tuple(kept))


def likeliest_path(tree: TokenTree) -> TokenTree:
    """The path to the node with the most to gain: the sum of chances along it."""
    if not len(tree):
        return EMPTY
    gains: list[float] = []
    for parent, chance in zip(tree.parents, tree.chances, strict=True):
        gains.append(chance + (0.0 if parent == ROOT else gains[parent]))
    best = tree.path(max(range(len(tree)), key=gains.__getitem__))
    return tree.without(set(range(len(tree))) - set(best))


def likeliest_way_down(tree: TokenTree) -> TokenTree:
    """The path to a leaf by the likeliest child of each node, whatever is below it."""
    path: list[int] = []
    below = tree.children.get(ROOT)
    while below:
        path.append(max(below.values(), key=lambda node: (tree.chances[node], -node)))
        below = tree.children.get(path[-1])
    return tree.without(set(range(len(tree))) - set(path))
