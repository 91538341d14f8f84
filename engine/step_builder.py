"""build: from a plan to the model's input, and what to draw from its logits. Knows no scheduling
and no states. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.batch import Batch, Span
from engine.constraints import end_token_ids
from engine.kv.memory import KvMemory
from engine.request import State
from engine.sampling.row import Draw
from engine.sequence import Sequence


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

    num_decode_tokens: int
    """Tokens of samples that have drawn before."""

    has_beams: bool

    @property
    def is_plain(self) -> bool:
        """Row i of the logits is draw i's."""
        return self.rows == tuple(range(len(self.samples)))


def build(
    planned: Iterable[tuple[Sequence, int]], kv: KvMemory, eos_token_ids: frozenset[int]
) -> Step:
    """Lay out the planned tokens.

    Args:
        planned: (sequence, number of its pending tokens) in the order of the batch. Its blocks are
            there. Those that are entered and not filled are cleared here.
    """
    size = kv.layout.block_size
    all_token_ids: list[int] = []
    spans: list[Span] = []
    draw_indices: list[int] = []
    draws: list[Draw] = []
    rows: list[int] = []
    samples: list[Sequence] = []
    num_decode_tokens = 0
    has_beams = False
    for sequence, num_tokens in planned:
        group, token_ids = sequence.group, sequence.token_ids
        if sequence.state is State.RUNNING:
            num_decode_tokens += num_tokens
        start = sequence.num_computed_tokens
        end = start + num_tokens
        num_blocks = -(-end // size)
        last_block_start = (num_blocks - 1) * size
        if start <= last_block_start and end < last_block_start + size:
            # Entered and not filled: what an earlier user or a refused transfer left in the other
            # slots is read, with weight 0, and 0 times NaN is NaN.
            kv.clear(sequence.block_ids[num_blocks - 1])
        if len(sequence.block_table) != num_blocks:
            sequence.block_table = tuple(sequence.block_ids[:num_blocks])
        if num_tokens == 1:
            all_token_ids.append(token_ids[start])
        else:
            all_token_ids += token_ids[start:end]
        spans.append(Span(start, num_tokens, sequence.block_table, group.adapter_slot))
        if end == len(token_ids) and not group.is_continued:
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
            draw_indices.append(len(all_token_ids) - 1)
    batch = Batch(
        tuple(all_token_ids),
        tuple(spans),
        tuple(draw_indices),
        wants_hidden=any(sample.gives_embedding for sample in samples),
    )
    return Step(batch, tuple(draws), tuple(rows), tuple(samples), num_decode_tokens, has_beams)
