"""build: from a plan to the model's input, and what to draw from its logits. Knows no scheduling
and no states. Engine thread only.

A sample with a token tree has a row of logits for its last token and one for each node: what would
be drawn if the path to that node were its text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Values
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.batch import Batch, Span
from engine.constraints import end_token_ids
from engine.kv.memory import KvMemory
from engine.request import State
from engine.sampling.row import Draw
from engine.schedule.order import Key
from engine.sequence import Sequence
from engine.speculation.acceptance import Proposals
from engine.speculation.drafter import Guess
from engine.speculation.heads.hidden import Wants
from engine.speculation.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from engine.grammar.state import GrammarState
    from engine.sampling.history import TokenHistory


@dataclass(frozen=True)
class Step:
    """One step's input."""

    batch: Batch

    draws: tuple[Draw, ...]
    """What to draw, in the order of the batch; a prompt that forks has one for each sample."""

    rows: tuple[int, ...]
    """The row of logits of each draw."""

    samples: tuple[Sequence, ...]
    """Whose each row of logits is; of a prompt that forks, its first sample's. Beams have rows, but
    no draws."""

    grammars: tuple[GrammarState | None, ...]
    """Where each row of logits is in its sample's grammar."""

    num_decode_tokens: int
    """Tokens of samples that have drawn before; guesses are not counted."""

    has_beams: bool

    @property
    def is_plain(self) -> bool:
        """Row i of the logits is draw i's."""
        return self.rows == tuple(range(len(self.samples)))


def build(
    planned: Iterable[tuple[Sequence, int]],
    kv: KvMemory,
    eos_token_ids: frozenset[int],
    guesses: Mapping[Key, Guess] | None = None,
    *,
    clears_entered: bool = True,
    wants_hidden: Wants = Wants.NONE,
    wants_layers: tuple[int, ...] = (),
) -> Step:
    """Lay out the planned tokens.

    Args:
        planned: (sequence, number of its pending tokens) in the order of the batch. Its blocks are
            there. Those that are entered and not filled are cleared here.
        guesses: what hangs on a sequence's last token, which is in its plan; its blocks are there,
            too.
        clears_entered: also of samples that have drawn (LoadedModel.reads_unwritten); as
            engine/decode_rows.py.
        wants_hidden: what drafters can use.
        wants_layers: whose inputs they can use, too.
    """
    size = kv.layout.block_size
    all_token_ids: list[int] = []
    spans: list[Span] = []
    draw_indices: list[int] = []
    draws: list[Draw] = []
    rows: list[int] = []
    samples: list[Sequence] = []
    grammars: list[GrammarState | None] = []
    num_decode_tokens = 0
    has_beams = False
    for sequence, num_tokens in planned:
        group, token_ids = sequence.group, sequence.token_ids
        guess = guesses.get(sequence.key) if guesses else None
        tree = None if guess is None else guess.tree
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
            spans.append(_tree_span(start, num_tokens, sequence, tree))
        if end == len(token_ids) and (has_drawn or not group.is_continued):
            if sequence.request.beam is None:
                sampling = sequence.request.sampling
                ends = end_token_ids(sampling, eos_token_ids)
                first = sampling.sample_index + sequence.sample_index
                num_drawn = end - sequence.num_prompt_tokens
                for index in range(first, first + group.num_places):
                    rows.append(len(samples))
                    draws.append(Draw(sampling, end, index, num_drawn, ends, sequence.history))
            else:
                has_beams = True
            samples.append(sequence)
            grammars.append(sequence.grammar)
            draw_indices.append(len(all_token_ids) - (1 if tree is None else 1 + len(tree)))
            if guess is not None and tree is not None:
                first_row, first_place = len(samples), draw_indices[-1] + 1
                rows += range(first_row, first_row + len(tree))
                proposals = guess.proposals or (None,) * (1 + len(tree))
                draws[-1] = draws[-1]._replace(proposals=proposals[0])
                draws += _tree_draws(draws[-1], tree, proposals[1:])
                samples += [sequence] * len(tree)
                grammars += guess.grammars
                draw_indices += range(first_place, first_place + len(tree))
    batch = Batch(
        tuple(all_token_ids),
        tuple(spans),
        tuple(draw_indices),
        wants_hidden=bool(wants_hidden) or any(sample.gives_embedding for sample in samples),
        wants_every_hidden=wants_hidden is Wants.EVERY,
        wants_layers=wants_layers,
    )
    return Step(
        batch,
        tuple(draws),
        tuple(rows),
        tuple(samples),
        tuple(grammars),
        num_decode_tokens,
        has_beams,
    )


def _tree_span(start: int, num_tokens: int, sequence: Sequence, tree: TokenTree) -> Span:
    span = Span(
        start,
        num_tokens + len(tree),
        sequence.block_table,
        sequence.group.adapter_slot,
        tree.parents,
    )
    # One path is a text like any other, which every model computes.
    return span if span.is_tree else span._replace(branches=())


def _tree_draws(root: Draw, tree: TokenTree, proposals: Values[Proposals | None]) -> list[Draw]:
    """What would be drawn after each node."""
    histories: dict[int, TokenHistory] = {}
    if root.history is not None:
        histories[ROOT] = root.history
    draws: list[Draw] = []
    nodes = zip(tree.token_ids, tree.parents, tree.depths, proposals, strict=True)
    for node, (token_id, parent, depth, proposed) in enumerate(nodes):
        if histories:
            histories[node] = histories[parent].fork()
            histories[node].append(token_id)
        # Positional, as it is made for every node while the device waits: a third of the price.
        draws.append(
            Draw(
                root.sampling,
                root.position + depth,
                root.sample_index,
                root.num_output_tokens + depth,
                root.end_token_ids,
                histories.get(node),
                root.bitmask,
                proposed,
            )
        )
    return draws
