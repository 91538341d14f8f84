"""DecodeRows: who takes part in a launch (engine/in_flight.py), and its rows. A launch is made of
samples that compute some tokens and, if those are their last, draw the next by draws that the model
makes by itself; for anything else the answer is None: a plain step. Prompts are launched where the
model `takes_prompts`.

A step is planned before the tokens of the one before are known: everybody goes on who is not known
to end. Known is the length (engine/outlook.py); a row too many of who ends by its token is
engine/in_flight.py's matter. Takes blocks for the tokens it plans, evicts for them, but never takes
them from anybody. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from engine.constraints import end_token_ids
from engine.holdings import Holdings
from engine.in_flight import Planned
from engine.models.interface import DRAWN_BEFORE, DecodeRow, DecodesAhead, LaunchRow, MixedRow
from engine.outlook import is_last
from engine.request import State
from engine.sampling.row import Draw
from engine.schedule.order import Key
from engine.sequence import Sequence


class _Part(NamedTuple):
    """One sequence's part of a launch."""

    sequence: Sequence
    start: int
    num_tokens: int
    draw: Draw | None
    has_drawn: bool
    """Before this launch."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class DecodeRows:
    """See the module.

    Args:
        ahead: None: always a plain step.
        clears_blocks: those that are entered; for a model that reads what was not written.
        takes_prompts: False: never with a prompt, whatever the model takes.
    """

    def __init__(
        self,
        ahead: DecodesAhead | None,
        holdings: Holdings,
        eos_token_ids: frozenset[int],
        *,
        clears_blocks: bool = True,
        takes_prompts: bool = True,
    ) -> None:
        self._ahead = ahead
        self._clears_blocks = clears_blocks
        self._holdings = holdings
        self._eos_token_ids = eos_token_ids
        self.takes_prompts = takes_prompts and ahead is not None and ahead.takes_prompts

    def of_plan(self, planned: Iterable[tuple[Sequence, int]]) -> list[Planned] | None:
        """Rows of a step whose tokens are all known.

        Args:
            planned: (sequence, number of its pending tokens), which has the blocks for them.
        """
        parts = self._parts(planned, {})
        return None if parts is None else self._rows(parts)

    def after(
        self,
        live: Mapping[Key, Planned],
        planned: Iterable[tuple[Sequence, int]],
        *,
        has_prompts: Callable[[], bool],
    ) -> list[Planned] | None:
        """Rows of the step after one that is in flight.

        Args:
            live: who is in flight.
            planned: as of `of_plan`, but of those that will be pending then, and maybe without
                blocks. Who is known to end by then may be in it: it is left out.
            has_prompts: whether somebody waits who has a prompt to compute. Then nobody is planned
                who would keep it from the place or the blocks of one that is known to end.
        """
        ending = {key for key, (sequence, row) in live.items() if is_last(sequence, row)}
        if ending and has_prompts():
            return None
        parts = self._parts((one for one in planned if one[0].key not in ending), live)
        if parts is None or not self._grow(parts, live):
            return None
        return self._rows(parts)

    def _parts(
        self, planned: Iterable[tuple[Sequence, int]], live: Mapping[Key, Planned]
    ) -> list[_Part] | None:
        """None where only a plain step can."""
        if self._ahead is None:
            return None
        parts: list[_Part] = []
        for sequence, num_tokens in planned:
            found = live.get(sequence.key)
            row = None if found is None else found[1]
            part = self._part(self._ahead, sequence, num_tokens, row)
            if part is None:
                return None
            parts.append(part)
        return parts if 0 < len(parts) <= self._ahead.max_rows else None

    def _part(
        self, ahead: DecodesAhead, sequence: Sequence, num_tokens: int, row: LaunchRow | None
    ) -> _Part | None:
        """Args: row: what it has in the launch before."""
        group = sequence.group
        start, num_all = sequence.num_computed_tokens, len(sequence.token_ids)
        has_drawn = sequence.state is State.RUNNING
        if row is not None:
            start += row.num_tokens
            if row.draw is not None:
                num_all += 1
                has_drawn = True
        is_drawing = start + num_tokens == num_all
        if not group.may_be_ahead:
            return None
        if not self.takes_prompts and (num_tokens > 1 or not is_drawing):
            return None
        if not is_drawing:
            return _Part(sequence, start, num_tokens, None, has_drawn)
        if not group.is_forked or group.is_continued:
            return None
        sampling = sequence.request.sampling
        draw = Draw(
            sampling,
            num_all,
            sampling.sample_index + sequence.sample_index,
            num_all - sequence.num_prompt_tokens,
            end_token_ids(sampling, self._eos_token_ids),
        )
        return _Part(sequence, start, num_tokens, draw, has_drawn) if ahead.takes(draw) else None

    def _grow(self, parts: Iterable[_Part], live: Mapping[Key, Planned]) -> bool:
        """Take the blocks that are missing. False: there are not enough, and none was taken."""
        size = self._holdings.block_size
        growing: list[_Part] = []
        num_missing = 0
        for part in parts:
            sequence = part.sequence
            if sequence.is_tail_shared and sequence.key in live:
                return False
            if sequence.is_tail_shared or part.end > len(sequence.block_ids) * size:
                growing.append(part)
                if not sequence.group.is_whole:
                    num_missing += self._holdings.num_missing(sequence, part.end)
        if num_missing > self._holdings.pool.num_available:
            return False
        for part in growing:
            self._holdings.grow(part.sequence, part.end)
        return True

    def _rows(self, parts: list[_Part]) -> list[Planned]:
        is_mixed = any(part.draw is None or part.num_tokens > 1 for part in parts)
        return [(part.sequence, self._row(part, is_mixed=is_mixed)) for part in parts]

    def _row(self, part: _Part, *, is_mixed: bool) -> LaunchRow:
        sequence, start, num_tokens, draw, has_drawn = part
        size = self._holdings.block_size
        end = start + num_tokens
        last_block_start = (end - 1) // size * size
        is_entered = start <= last_block_start and end < last_block_start + size
        if is_entered and (self._clears_blocks or (is_mixed and not has_drawn)):
            # As engine/step_builder.py: a plain step may come upon what it does not write.
            self._holdings.kv.clear(sequence.block_ids[last_block_start // size])
        if len(sequence.block_table) != len(sequence.block_ids):
            sequence.block_table = tuple(sequence.block_ids)
        known = sequence.token_ids
        if draw is not None and not is_mixed:
            token_id = known[start] if start < len(known) else DRAWN_BEFORE
            return DecodeRow(sequence.key, token_id, start, sequence.block_table, draw)
        token_ids = tuple(known[start:end]) if start < len(known) else (DRAWN_BEFORE,)
        return MixedRow(sequence.key, token_ids, start, sequence.block_table, draw)
