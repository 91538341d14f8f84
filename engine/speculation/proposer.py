"""Proposer: the Protocol of n-gram lookup, draft models, draft workers and draft heads: each
proposes what a sequence goes on with, as a token tree (token_tree.py). The trees of several
proposers are merged.

Engine thread only.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from engine.request import Sampling
from engine.sequence import Key
from engine.speculation.rejection_sampler import Distribution, DistributionKey, Proposals
from engine.speculation.token_tree import TokenTree

if TYPE_CHECKING:
    import torch

    from engine.grammar.state import GrammarState


class DraftTask(NamedTuple):
    """One sequence to propose tokens for."""

    key: Key
    token_ids: Sequence[int]
    """All tokens of the sequence, the newest included. The list grows: a proposer keeps a copy."""
    num_prompt_tokens: int
    sampling: Sampling
    sample_index: int
    """Number of the sample in its request, which is part of the key of its noise."""
    num_nodes: int
    """Largest useful number of nodes."""
    max_depth: int = sys.maxsize
    """Largest useful depth of a node: the text ends before deeper ones."""
    is_drawn: bool = False
    """Children must be draws, each with a `Try`, and no draw may be left out. Their random numbers
    depend on the sampling's seed, which differs from step to step, and on the path to their parent.
    A proposer that cannot draw so may choose children, without tries. The target's noise has
    another seed."""


class Draft(NamedTuple):
    """What a proposer proposes for one task."""

    tree: TokenTree
    distributions: Mapping[DistributionKey, Distribution]
    """What each `Try` was drawn from, under the proposer that the try names. Without an entry, the
    token was certain to be proposed."""


class DraftTokens(NamedTuple):
    """Draft tokens that one step computes for one sequence, from the drafts of all proposers."""

    tree: TokenTree
    """Empty only where there are `proposals`."""
    grammars: tuple[GrammarState | None, ...]
    """State of the sequence's grammar after each node, if it has a grammar."""
    proposals: tuple[Proposals | None, ...] = ()
    """Under the multi-step rule (rejection_sampler.py): what is tried after the newest token, and
    after each node."""


class Proposer(Protocol):
    """Proposes draft tokens. See the protocols below for more that a proposer may be."""

    @property
    def name(self) -> str:
        """Name of the proposer in metrics and errors."""
        ...

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """Returns: a draft for each task, maybe an empty one. A draft of a task that is not
        `is_drawn` has at most `num_nodes` nodes."""
        ...

    def forget(self, key: Key) -> None:
        """The sequence has ended, or has lost its blocks. Does nothing for an unknown one."""
        ...

    def check_integrity(self) -> None:
        """Raises: IntegrityError where what is kept for sequences does not add up."""
        ...


@runtime_checkable
class ClosableProposer(Protocol):
    """A Proposer with resources that Python does not free by itself: closed with the engine."""

    def close(self) -> None:
        """Free them; no other call follows. Idempotent."""
        ...


def close_proposers(proposers: Iterable[Proposer]) -> None:
    """Close each ClosableProposer, whether closing another one fails or not."""
    with ExitStack() as stack:
        for proposer in proposers:
            if isinstance(proposer, ClosableProposer):
                stack.callback(proposer.close)


class HiddenStateScope(enum.IntEnum):
    """Tokens of a step whose hidden states are kept; a greater scope includes the smaller ones."""

    NONE = 0
    SAMPLED = 1
    """Tokens that were sampled after: the last one of each sequence, and its draft tokens."""
    ALL = 2
    """Tokens of prompts, too, where the model can (LoadedModel.every_hidden)."""


class HiddenStates(NamedTuple):
    """Hidden states of consecutive tokens of one sequence that a step computed and that stay."""

    key: Key
    token_ids: Sequence[int]
    """All tokens of the sequence, those sampled in the step included. The list grows: a proposer
    keeps a copy."""
    start: int
    """Position of the first of the computed tokens."""
    hidden: torch.Tensor
    """[n, hidden], n >= 1: the input of the target's head, after its last norm."""
    layers: Mapping[int, torch.Tensor] = MappingProxyType({})
    """[n, hidden] by layer: the input of the layer (LoadedModel.layer_inputs), of each layer that
    some proposer needs."""


@runtime_checkable
class HiddenStateProposer(Proposer, Protocol):
    """A Proposer that computes its drafts from the target's hidden states."""

    @property
    def hidden_state_scope(self) -> HiddenStateScope:
        """Hidden states that it can use."""
        ...

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs it can use, too; needs HiddenStateScope.ALL."""
        ...

    def feed_hidden_states(self, computed: Sequence[HiddenStates]) -> None:
        """Called after each step, whether the proposer was called in it or not. Hidden states that
        do not begin where the last ones of the same sequence ended follow a gap: tokens that were
        computed elsewhere, or found in the prefix cache."""
        ...
