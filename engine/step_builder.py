"""build: from a plan to the model's input, and what to draw from its logits. Knows no scheduling
and no states. Engine thread only.

A sample with a token tree has a row of logits for its last token and one for each node: what would
be drawn if the path to that node were its text. What is drawn is laid out when somebody asks: the
device can compute meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Values
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from engine.batch import Batch, Span
from engine.constraints import end_token_ids
from engine.kv.memory import KvMemory
from engine.request import State
from engine.sampling.copies import bring
from engine.sampling.metadata import SamplingRequest
from engine.sequence import Key, Sequence
from engine.speculation.proposer import DraftTokens, HiddenStateScope
from engine.speculation.rejection_sampler import Proposals
from engine.speculation.token_tree import ROOT, TokenTree

if TYPE_CHECKING:
    from engine.grammar.state import GrammarState
    from engine.sampling.token_history import TokenHistory


class _Drawing(NamedTuple):
    """Who has rows of logits."""

    sequence: Sequence
    num_tokens: int
    """Tokens that it has, draft tokens not counted."""
    draft: DraftTokens | None


class _Laid(NamedTuple):
    """See the properties of Step."""

    draws: list[SamplingRequest]
    rows: list[int]
    samples: list[Sequence]
    grammars: list[GrammarState | None]


@dataclass(frozen=True)
class Step:
    """One step's input, and what is drawn of its logits: to be asked for before it is booked.

    Some rows of the model's logits may be of `scored` prompts, of which nothing is drawn: `rows`,
    `samples` and `grammars` are about the others, which `drawn_of` takes.
    """

    batch: Batch

    drawing: tuple[_Drawing, ...]
    """In the order of the batch."""

    eos_token_ids: frozenset[int]

    num_decode_tokens: int
    """Tokens of samples that have drawn before; draft tokens are not counted."""

    has_beams: bool

    has_grammars: bool

    scored: Mapping[Key, range]
    """Of prompts whose log probabilities are wanted: their rows of the model's logits."""

    def drawn_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Of one row for each of the batch's `draw_indices` those that are drawn from."""
        if not self.scored:
            return rows
        return rows.index_select(0, bring(np.array(self._drawn, dtype=np.int64), rows.device))

    @property
    def draw_indices(self) -> Values[int]:
        """The batch's, of those rows."""
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
        """What to draw, in the order of the batch; a prompt that forks has one for each sample."""
        return self._laid.draws

    @property
    def rows(self) -> Values[int]:
        """The row of logits of each draw."""
        return self._laid.rows

    @property
    def samples(self) -> Values[Sequence]:
        """Whose each row of logits is; of a prompt that forks, its first sample's. Beams have rows,
        but no draws."""
        return self._laid.samples

    @property
    def grammars(self) -> Values[GrammarState | None]:
        """Where each row of logits is in its sample's grammar."""
        return self._laid.grammars

    @property
    def is_plain(self) -> bool:
        """Row i of the logits is draw i's."""
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
        planned: (sequence, number of its pending tokens) in the order of the batch. Its blocks are
            there. Those that are entered and not filled are cleared here.
        drafts: draft tokens after a sequence's last token, which is in its plan; their blocks are
            there, too.
        clears_entered: also of samples that have drawn (LoadedModel.reads_unwritten); as
            engine/decode_rows.py.
        wants_hidden: tokens whose hidden states proposers need.
        wants_layers: layers whose inputs they need, too.
    """
    size = kv.layout.block_size
    all_token_ids: list[int] = []
    spans: list[Span] = []
    draw_indices: list[int] = []
    scored: dict[Key, range] = {}
    drawing: list[_Drawing] = []
    num_decode_tokens = 0
    has_beams = has_grammars = gives_embedding = False
    for sequence, num_tokens in planned:
        group, token_ids = sequence.group, sequence.token_ids
        draft = drafts.get(sequence.key) if drafts else None
        tree = None if draft is None else draft.tree
        has_drawn = sequence.state is State.RUNNING
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
            spans.append(Span(start, num_tokens, sequence.block_table, group.adapter_slot))
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


def _tree_span(start: int, num_tokens: int, sequence: Sequence, tree: TokenTree) -> Span:
    return Span(
        start,
        num_tokens + len(tree),
        sequence.block_table,
        sequence.group.adapter_slot,
        tree.parents,
    )


def _tree_draws(
    root: SamplingRequest, tree: TokenTree, proposals: Values[Proposals | None]
) -> list[SamplingRequest]:
    """What would be drawn after each node.

    Args:
        proposals: of each node, or none.
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
