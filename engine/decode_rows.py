"""DecodeRows: who takes part in a launch (engine/in_flight.py), and its rows. A launch is made of
samples that compute one token and draw the next, by draws that the model makes by itself; for
anything else the answer is None: a plain step.

A step is planned before the tokens of the one before are known: everybody goes on who is not known
to end. Known is the length; a row too many of who ends by its token is engine/in_flight.py's
matter. Takes blocks for the tokens it plans, evicts for them, but never takes them from anybody.
Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from engine.constraints import end_token_ids
from engine.holdings import Holdings
from engine.in_flight import Planned
from engine.models.interface import DRAWN_BEFORE, DecodeRow, DecodesAhead
from engine.sampling.row import Draw
from engine.schedule.order import Key
from engine.sequence import Sequence


class DecodeRows:
    """See the module.

    Args:
        ahead: None: always a plain step.
        clears_blocks: those that are entered; for a model that reads what was not written.
    """

    def __init__(
        self,
        ahead: DecodesAhead | None,
        holdings: Holdings,
        eos_token_ids: frozenset[int],
        *,
        clears_blocks: bool = True,
    ) -> None:
        self._ahead = ahead
        self._clears_blocks = clears_blocks
        self._holdings = holdings
        self._eos_token_ids = eos_token_ids

    def of_plan(self, planned: Iterable[tuple[Sequence, int]]) -> list[Planned] | None:
        """Rows of a step whose tokens are all known.

        Args:
            planned: (sequence, number of its pending tokens), which has the blocks for them.
        """
        if self._ahead is None:
            return None
        draws: list[tuple[Sequence, Draw]] = []
        for sequence, num_tokens in planned:
            draw = self._draw(self._ahead, sequence, 0) if num_tokens == 1 else None
            if draw is None:
                return None
            draws.append((sequence, draw))
        if len(draws) > self._ahead.max_rows:
            return None
        return [(sequence, self._row(sequence, draw, 0)) for sequence, draw in draws]

    def after(
        self,
        live: Mapping[Key, Planned],
        joining: Iterable[tuple[Sequence, int]],
        *,
        has_prompts: Callable[[], bool],
    ) -> list[Planned] | None:
        """Rows of the step after one that is in flight.

        Args:
            live: who is in flight.
            joining: as `planned` of `of_plan`: who takes part from now on.
            has_prompts: whether somebody waits who has a prompt to compute. Then nobody is planned
                who would keep it from the place or the blocks of one that is known to end.
        """
        joined = self.of_plan(joining)
        if joined is None or self._ahead is None:
            return None
        draws: list[tuple[Sequence, Draw]] = []
        num_missing = 0
        size = self._holdings.block_size
        for sequence, _ in live.values():
            num_drawn = len(sequence.token_ids) - sequence.num_prompt_tokens + 1
            if num_drawn >= sequence.group.max_output_tokens:
                if has_prompts():
                    return None
                continue
            draw = self._draw(self._ahead, sequence, 1)
            if draw is None or sequence.is_tail_shared:
                return None
            if draw.position > len(sequence.block_ids) * size and not sequence.group.is_whole:
                num_missing += 1
            draws.append((sequence, draw))
        if not 0 < len(draws) + len(joined) <= self._ahead.max_rows:
            return None
        if num_missing > self._holdings.pool.num_available:
            return None
        rows: list[Planned] = []
        for sequence, draw in draws:
            if draw.position > len(sequence.block_ids) * size:
                self._holdings.grow(sequence, draw.position)
            rows.append((sequence, self._row(sequence, draw, 1)))
        return rows + joined

    def _draw(self, ahead: DecodesAhead, sequence: Sequence, num_unread: int) -> Draw | None:
        """What its next row draws; None where only a plain step can."""
        group = sequence.group
        num_tokens = len(sequence.token_ids)
        if (
            not group.may_be_ahead
            or not group.is_forked
            or group.is_continued
            or num_tokens - sequence.num_computed_tokens != 1
        ):
            return None
        sampling = sequence.request.sampling
        position = num_tokens + num_unread
        draw = Draw(
            sampling,
            position,
            sampling.sample_index + sequence.sample_index,
            position - sequence.num_prompt_tokens,
            end_token_ids(sampling, self._eos_token_ids),
        )
        return draw if ahead.takes(draw) else None

    def _row(self, sequence: Sequence, draw: Draw, num_unread: int) -> DecodeRow:
        position = draw.position - 1
        size = self._holdings.block_size
        if self._clears_blocks and position % size == 0 and size > 1:
            # As engine/step_builder.py: a plain step may come upon what it does not write.
            self._holdings.kv.clear(sequence.block_ids[position // size])
        if len(sequence.block_table) != len(sequence.block_ids):
            sequence.block_table = tuple(sequence.block_ids)
        token_id = DRAWN_BEFORE if num_unread else sequence.token_ids[position]
        return DecodeRow(sequence.key, token_id, position, sequence.block_table, draw)
