"""build: lays out the model's input for a plan, and the sampling requests of its logits. It knows
no scheduling and no states. Engine thread only.

A sample with a token tree has a row of logits for its last token and one for each node, sampled as
if the path to that node were part of its text. Sampling requests are created on first use, so that
the device computes meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Values
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from engine.batch import Batch, TokenSpan
from engine.grammar_constraints import end_token_ids
from engine.kv.memory import KvMemory
from engine.request import RequestState
from engine.sampling.host_device_copies import bring
from engine.sampling.metadata import SamplingRequest
from engine.sequence import Key, Sequence
from engine.speculation.proposer import DraftTokens, HiddenStateScope
from engine.speculation.rejection_sampler import Proposals
from engine.speculation.token_tree import ROOT, TokenTree

if TYPE_CHECKING:
    from engine.grammar.state import GrammarState
    from engine.sampling.token_history import TokenHistory


class _Drawing(NamedTuple):
    """A sequence that has rows of logits."""

    sequence: Sequence
    num_tokens: int
    """Number of its tokens, draft tokens not counted."""
    draft: DraftTokens | None


class _Laid(NamedTuple):
    """The values of the properties of Step that are created on first use."""

    draws: list[SamplingRequest]
    rows: list[int]
    samples: list[Sequence]
    grammars: list[GrammarState | None]


@dataclass(frozen=True)
class Step:
    """One step's input, and the sampling of its logits, which must be read before the step's
    results are applied.

    Some rows of the model's logits may belong to `scored` prompts and are not sampled: `rows`,
    `samples` and `grammars` refer to the others, which `drawn_of` returns.
    """

    batch: Batch

    drawing: tuple[_Drawing, ...]
    """The sequences with rows of logits, in the order of the batch."""

    eos_token_ids: frozenset[int]

    num_decode_tokens: int
    """Number of tokens of samples that have sampled a token before; draft tokens are not
    counted."""

    has_beams: bool

    has_grammars: bool

    scored: Mapping[Key, range]
    """The rows of the model's logits that give log probabilities of prompt tokens, by sequence."""

    def drawn_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Select the rows that are sampled, given one row for each of the batch's
        `draw_indices`."""
        if not self.scored:
            return rows
        return rows.index_select(0, bring(np.array(self._drawn, dtype=np.int64), rows.device))

    @property
    def draw_indices(self) -> Values[int]:
        """The batch's `draw_indices` without those of scored prompts."""
        return [self.batch.draw_indices[row] for row in self._drawn]

    @cached_property
    def _drawn(self) -> Values[int]:
        scored = {row for rows in self.scored.values() for row in rows}
        return [row for row in range(len(self.batch.draw_indices)) if row not in scored]

    @cached_property
    def _laid(self) -> _Laid:
        return _lay_out(self.drawing, self.eos_token_ids)

    @property
    def draws(self) -> Values[SamplingRequest]:
        """The sampling requests, in the order of the batch; a prompt that forks has one for each
        sample."""
        return self._laid.draws

    @property
    def rows(self) -> Values[int]:
        """The row of logits of each sampling request."""
        return self._laid.rows

    @property
    def samples(self) -> Values[Sequence]:
        """The sequence of each row of logits; for a prompt that forks, its first sample. Beams have
        rows, but no sampling requests."""
        return self._laid.samples

    @property
    def grammars(self) -> Values[GrammarState | None]:
        """The grammar state of each row of logits; None without grammar."""
        return self._laid.grammars

    @property
    def is_plain(self) -> bool:
        """Whether row i of the logits belongs to sampling request i, for all rows."""
        return self._laid.rows == list(range(len(self._laid.samples)))


def build(
    planned: Iterable[tuple[Sequence, int]],
    kv: KvMemory,
    eos_token_ids: frozenset[int],
    drafts: Mapping[Key, DraftTokens] | None = None,
    *,
    clears_entered: bool = True,
    wants_hidden: HiddenStateScope = HiddenStateScope.NONE,
    wants_layers: tuple[int, ...] = (),
) -> Step:
    """Lay out the planned tokens.

    Args:
        planned: (sequence, number of its pending tokens) in the order of the batch. The sequences
            have their blocks. Blocks that the step begins to write and does not fill are zeroed.
        drafts: draft tokens after a sequence's last token, which is in the plan; their blocks are
            allocated.
        clears_entered: zero such blocks of samples that have sampled a token, too
            (LoadedModel.reads_unwritten); otherwise only those of prompts.
        wants_hidden: the tokens whose hidden states proposers need.
        wants_layers: the layers whose inputs they need.
    """
    size = kv.layout.block_size
    all_token_ids: list[int] = []
    spans: list[TokenSpan] = []
    draw_indices: list[int] = []
    scored: dict[Key, range] = {}
    drawing: list[_Drawing] = []
    num_decode_tokens = 0
    has_beams = has_grammars = gives_embedding = False
    for sequence, num_tokens in planned:
        group, token_ids = sequence.group, sequence.token_ids
        draft = drafts.get(sequence.key) if drafts else None
        tree = None if draft is None else draft.tree
        has_drawn = sequence.state is RequestState.RUNNING
        if has_drawn:
            num_decode_tokens += num_tokens
        start = sequence.num_computed_tokens
        end = start + num_tokens
        slots_end = end if tree is None else end + len(tree)
        num_blocks = -(-slots_end // size)
        last_block_start = (num_blocks - 1) * size
        is_entered = start <= last_block_start and slots_end < last_block_start + size
        if is_entered and (clears_entered or not has_drawn):
            # Entered and not filled: what an earlier user or a refused transfer left in the other
            # slots is read, with weight 0, and 0 times NaN is NaN.
            kv.clear(sequence.block_ids[num_blocks - 1])
        if len(sequence.block_table) != num_blocks:
            sequence.block_table = tuple(sequence.block_ids[:num_blocks])
        if num_tokens == 1:
            all_token_ids.append(token_ids[start])
        else:
            all_token_ids += token_ids[start:end]
        if tree is None:
            spans.append(TokenSpan(start, num_tokens, sequence.block_table, group.adapter_slot))
        else:
            all_token_ids += tree.token_ids
            span = _tree_span(start, num_tokens, sequence, tree)
            # One path is a text like any other, which every model computes; but a quantized cache
            # takes in for good what is no draft token.
            is_told = span.is_tree or kv.tails is not None
            spans.append(span if is_told else span._replace(branches=()))
        if sequence.is_scored:
            places, num_rows = sequence.scored_places(end), len(draw_indices)
            shift = len(all_token_ids) - slots_end  # of the batch from the sequence
            draw_indices += [place + shift for place in places]
            scored[sequence.key] = range(num_rows, len(draw_indices))
        if end == len(token_ids) and (has_drawn or not group.is_continued):
            drawing.append(_Drawing(sequence, end, draft))
            has_beams = has_beams or sequence.request.beam is not None
            has_grammars = has_grammars or sequence.grammar is not None
            gives_embedding = gives_embedding or sequence.gives_embedding
            num_rows = 1 if tree is None else 1 + len(tree)
            draw_indices += range(len(all_token_ids) - num_rows, len(all_token_ids))
    batch = Batch(
        tuple(all_token_ids),
        tuple(spans),
        tuple(draw_indices),
        wants_hidden=gives_embedding or bool(wants_hidden),
        wants_every_hidden=wants_hidden is HiddenStateScope.ALL,
        wants_layers=wants_layers,
    )
    return Step(
        batch, tuple(drawing), eos_token_ids, num_decode_tokens, has_beams, has_grammars, scored
    )


def _lay_out(drawing: Iterable[_Drawing], eos_token_ids: frozenset[int]) -> _Laid:
    draws: list[SamplingRequest] = []
    rows: list[int] = []
    samples: list[Sequence] = []
    grammars: list[GrammarState | None] = []
    for sequence, num_tokens, draft in drawing:
        if sequence.request.beam is None:
            sampling = sequence.request.sampling
            ends = end_token_ids(sampling, eos_token_ids)
            first = sampling.sample_index + sequence.sample_index
            num_drawn = num_tokens - sequence.num_prompt_tokens
            for index in range(first, first + sequence.group.num_places):
                rows.append(len(samples))
                draws.append(
                    SamplingRequest(sampling, num_tokens, index, num_drawn, ends, sequence.history)
                )
        samples.append(sequence)
        grammars.append(sequence.grammar)
        if draft is not None:
            num_nodes = len(draft.tree)
            rows += range(len(samples), len(samples) + num_nodes)
            if draft.proposals:
                draws[-1] = draws[-1]._replace(proposals=draft.proposals[0])
            draws += _tree_draws(draws[-1], draft.tree, draft.proposals[1:])
            samples += [sequence] * num_nodes
            grammars += draft.grammars
    return _Laid(draws, rows, samples, grammars)


def _tree_span(start: int, num_tokens: int, sequence: Sequence, tree: TokenTree) -> TokenSpan:
    return TokenSpan(
        start,
        num_tokens + len(tree),
        sequence.block_table,
        sequence.group.adapter_slot,
        tree.parents,
    )


def _tree_draws(
    root: SamplingRequest, tree: TokenTree, proposals: Values[Proposals | None]
) -> list[SamplingRequest]:
    """Create the sampling request of each node.

    Args: proposals: those of each node; empty: none.
    """
    if root.history is None and not any(proposals):
        # What is drawn depends on the place alone: nodes of one depth share it.
        levels = [_at_depth(root, depth) for depth in range(1 + max(tree.depths, default=0))]
        return [levels[depth] for depth in tree.depths]
    histories: dict[int, TokenHistory] = {}
    if root.history is not None:
        histories[ROOT] = root.history
    draws: list[SamplingRequest] = []
    proposals = proposals or (None,) * len(tree)
    nodes = zip(tree.token_ids, tree.parents, tree.depths, proposals, strict=True)
    for node, (token_id, parent, depth, proposed) in enumerate(nodes):
        if histories:
            histories[node] = histories[parent].fork()
            histories[node].append(token_id)
        draws.append(_at_depth(root, depth, histories.get(node), proposed))
    return draws


def _at_depth(
    root: SamplingRequest,
    depth: int,
    history: TokenHistory | None = None,
    proposed: Proposals | None = None,
) -> SamplingRequest:
    # Positional, as it is made while the device waits: a third of the price.
    return SamplingRequest(
        root.sampling,
        root.position + depth,
        root.sample_index,
        root.num_output_tokens + depth,
        root.end_token_ids,
        history,
        root.bitmask,
        proposed,
    )
