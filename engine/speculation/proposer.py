"""Proposer: the Protocol of n-gram lookup, draft models, draft workers and draft heads. Each
proposes draft tokens for a sequence as a token tree (token_tree.py); the trees of several
proposers are merged. Engine thread only."""

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
    """One sequence to propose tokens for, and the limits of its draft."""

    key: Key
    token_ids: Sequence[int]
    """All tokens of the sequence, the newest included. The caller appends to the list later: a
    proposer that keeps tokens copies them."""
    num_prompt_tokens: int
    sampling: Sampling
    sample_index: int
    """Index of the sample in its request; a part of the key of its sampling noise."""
    num_nodes: int
    """Largest number of nodes that the step can use."""
    max_depth: int = sys.maxsize
    """Largest depth of a node that the step can use: the text ends before deeper ones."""
    is_drawn: bool = False
    """Whether children must be random draws, each with a `Try`, none of which may be left out.
    Their random numbers depend on the sampling's seed, which differs from step to step, and on
    the path to their parent, and differ from those of the target's sampling. A proposer that
    cannot draw may choose children without tries."""


class Draft(NamedTuple):
    """One proposer's draft tokens for one task."""

    tree: TokenTree
    distributions: Mapping[DistributionKey, Distribution]
    """The distribution that each `Try` was drawn from, for the proposer that the try names. A token
    without an entry was proposed with certainty."""


class DraftTokens(NamedTuple):
    """The draft tokens that one step verifies for one sequence, from all proposers."""

    tree: TokenTree
    """The draft tokens; empty only where there are `proposals`."""
    grammars: tuple[GrammarState | None, ...]
    """The grammar state after each node, if the sequence has a grammar."""
    proposals: tuple[Proposals | None, ...] = ()
    """With multi-step acceptance (rejection_sampler.py): the draws to verify after the newest
    token, and after each node."""


class Proposer(Protocol):
    """Protocol of a proposer of draft tokens. ClosableProposer and HiddenStateProposer extend
    it."""

    @property
    def name(self) -> str:
        """Name of the proposer in metrics and errors."""
        ...

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """Propose draft tokens for several sequences. Returns: a draft for each task, which may be
        empty; one of a task that is not `is_drawn` has at most `num_nodes` nodes."""
        ...

    def forget(self, key: Key) -> None:
        """Drop the state of a sequence that has ended or lost its blocks. Does nothing for an
        unknown one."""
        ...

    def check_integrity(self) -> None:
        """Check the state that is kept for sequences. Raises: IntegrityError where it is
        inconsistent."""
        ...


@runtime_checkable
class ClosableProposer(Protocol):
    """A Proposer with resources that Python does not free by itself; the engine closes it when it
    closes."""

    def close(self) -> None:
        """Free the resources; no other call follows. Idempotent."""
        ...


def close_proposers(proposers: Iterable[Proposer]) -> None:
    """Close each ClosableProposer, even if closing another one fails."""
    with ExitStack() as stack:
        for proposer in proposers:
            if isinstance(proposer, ClosableProposer):
                stack.callback(proposer.close)


class HiddenStateScope(enum.IntEnum):
    """The tokens of a step whose hidden states are kept; a greater scope includes the smaller
    ones."""

    NONE = 0
    SAMPLED = 1
    """Tokens whose logits were sampled from: the last one of each sequence, and its draft
    tokens."""
    ALL = 2
    """All tokens, those of prompts included where the model supports it
    (LoadedModel.every_hidden)."""


class HiddenStates(NamedTuple):
    """Hidden states of consecutive tokens of one sequence that a step computed, without rejected
    draft tokens."""

    key: Key
    token_ids: Sequence[int]
    """All tokens of the sequence, those sampled in the step included. The caller appends to the
    list later: a proposer that keeps tokens copies them."""
    start: int
    """Position of the first of the computed tokens."""
    hidden: torch.Tensor
    """Hidden states [n, hidden], n >= 1: the input of the target's LM head, after the final
    norm."""
    layers: Mapping[int, torch.Tensor] = MappingProxyType({})
    """Inputs [n, hidden] of single layers, by layer (LoadedModel.layer_inputs): of each layer in
    some proposer's `aux_layers`."""


@runtime_checkable
class HiddenStateProposer(Proposer, Protocol):
    """A Proposer that computes its drafts from the target's hidden states."""

    @property
    def hidden_state_scope(self) -> HiddenStateScope:
        """The hidden states that the proposer needs."""
        ...

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Indices of the target's layers whose inputs the proposer needs; not empty only with
        HiddenStateScope.ALL."""
        ...

    def feed_hidden_states(self, computed: Sequence[HiddenStates]) -> None:
        """Pass the hidden states of a step to the proposer; called after each step, whether
        `propose` was called for it or not. Where hidden states of a sequence do not begin at the
        end of the previous ones, the tokens between were computed elsewhere or found in the
        prefix cache."""
        ...
