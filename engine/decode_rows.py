"""DecodeRows: builds the rows of a launch (engine/in_flight.py). Each sample of a launch computes
some tokens and, if those are its last, samples the next with parameters that the model supports
in launches; for any other step the result is None, and a plain step is run. Prompts are launched
if the model `takes_prompts`.

A step is planned before the tokens of the previous one are known, for all sequences that are not
known to end. An end by length is known (engine/scheduler.py:predict); a row of a sequence that ends
by its token is left over (engine/in_flight.py). It allocates blocks for the planned tokens,
evicting cached ones, but preempts no sequence. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from engine.grammar_constraints import end_token_ids
from engine.in_flight import Planned
from engine.kv.cache_manager import KVCacheManager
from engine.models.interface import DRAWN_BEFORE, DecodeRow, DecodesAhead, LaunchRow, MixedRow
from engine.request import RequestState
from engine.sampling.metadata import SamplingRequest
from engine.scheduler import NextPlan, samples_last_token
from engine.sequence import Key, Sequence


class _Part(NamedTuple):
    """One sequence's part of a launch."""

    sequence: Sequence
    start: int
    num_tokens: int
    draw: SamplingRequest | None
    has_drawn: bool
    """Whether the sequence has sampled a token before this launch."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class DecodeRows:
    """Builds the rows of launches.

    Args:
        ahead: the model's launches; None: every step is a plain one.
        clears_blocks: whether blocks are zeroed before they are written, for a model that reads
            slots that were not written.
        takes_prompts: False: never launch a prompt, even if the model supports it.
    """

    def __init__(
        self,
        ahead: DecodesAhead | None,
        cache_manager: KVCacheManager,
        eos_token_ids: frozenset[int],
        *,
        clears_blocks: bool = True,
        takes_prompts: bool = True,
    ) -> None:
        self._ahead = ahead
        self._clears_blocks = clears_blocks
        self._cache_manager = cache_manager
        self._eos_token_ids = eos_token_ids
        self.takes_prompts = takes_prompts and ahead is not None and ahead.takes_prompts

    def of_plan(self, planned: Iterable[tuple[Sequence, int]]) -> list[Planned] | None:
        """Build the rows of a step whose tokens are all known; None: only a plain step can run it.

        Args: planned: (sequence, number of its pending tokens), which have their blocks.
        """
        parts = self._parts(list(planned), {})
        return None if parts is None else self._rows(parts)

    def after(
        self,
        live: Mapping[Key, Planned],
        following: NextPlan,
        *,
        has_prompts: Callable[[], bool],
    ) -> list[Planned] | None:
        """Build the rows of the step after one that is in flight; None: only a plain step can run
        it.

        Args:
            live: the sequences in flight, with their rows.
            following: the planned sequences, maybe without blocks. Those that are known to end by
                then are left out.
            has_prompts: whether a sequence with a prompt to compute waits. If so, and a sequence is
                known to end, the result is None, so that the waiting one gets the place and the
                blocks.
        """
        if following.is_decoding:
            return self._decodes_after(live, following.planned, has_prompts)
        ending = {key for key, (sequence, row) in live.items() if samples_last_token(sequence, row)}
        if ending and has_prompts():
            return None
        parts = self._parts([one for one in following.planned if one[0].key not in ending], live)
        if parts is None:
            return None
        growing: list[tuple[Sequence, int]] = []
        size = self._cache_manager.block_size
        for part in parts:
            sequence = part.sequence
            if sequence.is_tail_shared and sequence.key in live:
                return None
            if sequence.is_tail_shared or part.end > len(sequence.block_ids) * size:
                growing.append((sequence, part.end))
        return self._rows(parts) if self._grow(growing) else None

    def _decodes_after(
        self,
        live: Mapping[Key, Planned],
        planned: Iterable[tuple[Sequence, int]],
        has_prompts: Callable[[], bool],
    ) -> list[Planned] | None:
        """Build the rows of `after` for a step in which all sequences decode: in one loop, instead
        of the three of `_parts` and `_rows`, since it runs for each row of each step."""
        ahead, size = self._ahead, self._cache_manager.block_size
        if ahead is None:
            return None
        rows: list[Planned] = []
        entering: list[int] = []
        growing: list[tuple[Sequence, int]] = []
        for sequence, _ in planned:
            group, position = sequence.group, len(sequence.token_ids)
            is_live = sequence.key in live
            if is_live:
                position += 1  # of what the row draws: the one before is being drawn
                if position - sequence.num_prompt_tokens >= group.max_output_tokens:
                    if has_prompts():
                        return None
                    continue
            if not group.may_be_ahead or not group.is_forked or group.is_continued:
                return None
            sampling = sequence.request.sampling
            draw = SamplingRequest(
                sampling,
                position,
                sampling.sample_index + sequence.sample_index,
                position - sequence.num_prompt_tokens,
                end_token_ids(sampling, self._eos_token_ids),
            )
            if not ahead.takes(draw):
                return None
            is_tail_shared, num_blocks = sequence.is_tail_shared, len(sequence.block_ids)
            if is_tail_shared or position > num_blocks * size:
                if is_tail_shared and is_live:
                    return None
                growing.append((sequence, position))
            start = position - 1
            if is_tail_shared or not start % size or len(sequence.block_table) != num_blocks:
                entering.append(len(rows))
            token_id = DRAWN_BEFORE if is_live else sequence.token_ids[start]
            table, adapter = sequence.block_table, group.adapter_slot
            row = DecodeRow(sequence.key, token_id, start, table, draw, adapter)
            rows.append((sequence, row))
        if not 0 < len(rows) <= ahead.max_rows or not self._grow(growing):
            return None
        for at in entering:
            sequence, made = rows[at]
            table = self._entered(sequence, made.position, made.position + 1, self._clears_blocks)
            rows[at] = (sequence, made._replace(block_ids=table))
        return rows

    def _parts(
        self, planned: list[tuple[Sequence, int]], live: Mapping[Key, Planned]
    ) -> list[_Part] | None:
        """Return the parts of a launch; None if only a plain step can run the plan."""
        ahead = self._ahead
        # Nothing is made before it is known of all of them: such steps are often of many.
        if ahead is None or not 0 < len(planned) <= ahead.max_rows:
            return None
        if not all(sequence.group.may_be_ahead for sequence, _ in planned):
            return None
        if not self.takes_prompts and any(num_tokens > 1 for _, num_tokens in planned):
            return None
        parts: list[_Part] = []
        for sequence, num_tokens in planned:
            found = live.get(sequence.key)
            part = self._part(ahead, sequence, num_tokens, None if found is None else found[1])
            if part is None:
                return None
            parts.append(part)
        if _is_mixed(parts) and any(one.sequence.group.adapter_slot for one in parts):
            return None  # no graph takes it, and the host would launch it while the device waits
        return parts

    def _part(
        self, ahead: DecodesAhead, sequence: Sequence, num_tokens: int, row: LaunchRow | None
    ) -> _Part | None:
        """Return one sequence's part; None if only a plain step can run it. Args: row: its row in
        the launch before."""
        group = sequence.group
        start, num_all = sequence.num_computed_tokens, len(sequence.token_ids)
        has_drawn = sequence.state is RequestState.RUNNING
        if row is not None:
            start += row.num_tokens
            if row.draw is not None:
                num_all += 1
                has_drawn = True
        if start + num_tokens < num_all:
            return (
                _Part(sequence, start, num_tokens, None, has_drawn) if self.takes_prompts else None
            )
        if not group.is_forked or group.is_continued:
            return None
        sampling = sequence.request.sampling
        draw = SamplingRequest(
            sampling,
            num_all,
            sampling.sample_index + sequence.sample_index,
            num_all - sequence.num_prompt_tokens,
            end_token_ids(sampling, self._eos_token_ids),
        )
        return _Part(sequence, start, num_tokens, draw, has_drawn) if ahead.takes(draw) else None

    def grow_by_one(self, sequences: Iterable[Sequence]) -> bool:
        """Allocate the blocks that these sequences lack for their only pending token. Returns:
        False if there are too few; none is allocated then."""
        size = self._cache_manager.block_size
        growing = [
            (one, len(one.token_ids))
            for one in sequences
            if one.is_tail_shared or len(one.token_ids) > len(one.block_ids) * size
        ]
        return not growing or self._grow(growing)

    def _grow(self, growing: list[tuple[Sequence, int]]) -> bool:
        """Allocate missing blocks. Returns: False if there are too few; none is allocated then.

        Args: growing: sequences that lack blocks, or share their tail block, with the end of their
            tokens in the step.
        """
        num_missing = 0
        for sequence, end in growing:
            if not sequence.group.is_whole:
                num_missing += self._cache_manager.num_missing(sequence, end)
        if num_missing > self._cache_manager.pool.num_available:
            return False
        for sequence, end in growing:
            self._cache_manager.allocate_slots(sequence, end)
        return True

    def _rows(self, parts: list[_Part]) -> list[Planned]:
        is_mixed = _is_mixed(parts)
        return [(part.sequence, self._row(part, is_mixed)) for part in parts]

    def _row(self, part: _Part, is_mixed: bool) -> LaunchRow:
        sequence, start, num_tokens, draw, has_drawn = part
        end = start + num_tokens
        clears = self._clears_blocks or (is_mixed and not has_drawn)
        table = self._entered(sequence, start, end, clears)
        known = sequence.token_ids
        if draw is not None and not is_mixed:
            token_id = known[start] if start < len(known) else DRAWN_BEFORE
            adapter = sequence.group.adapter_slot
            return DecodeRow(sequence.key, token_id, start, table, draw, adapter)
        token_ids = tuple(known[start:end]) if start < len(known) else (DRAWN_BEFORE,)
        num_blocks = -(-end // self._cache_manager.block_size)
        return MixedRow(sequence.key, token_ids, start, table[:num_blocks], draw)

    def _entered(self, sequence: Sequence, start: int, end: int, clears: bool) -> tuple[int, ...]:
        """Return the sequence's blocks, before its tokens [start, end) are written to them. Args:
        clears: zero the last block, if the tokens are the first in it and do not fill it."""
        size = self._cache_manager.block_size
        last_block_start = (end - 1) // size * size
        if clears and start <= last_block_start and end < last_block_start + size:
            # As engine/step_builder.py: a plain step may come upon what it does not write.
            self._cache_manager.kv.clear(sequence.block_ids[last_block_start // size])
        if len(sequence.block_table) != len(sequence.block_ids):
            sequence.block_table = tuple(sequence.block_ids)
        return sequence.block_table


def _is_mixed(parts: Iterable[_Part]) -> bool:
    """Return whether some part is not a single decode token."""
    return any(part.draw is None or part.num_tokens > 1 for part in parts)
