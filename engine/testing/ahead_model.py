"""AheadModel: any LoadedModel with steps that can be launched ahead, by its own forward passes and
engine/sampling/sampler.py. It gains nothing: it is the truth that others are compared with, and
shows an engine's mistakes.

What a device may do, it does at its worst: a launch is computed when it is launched, or as late as
may be (`is_late`): when it is read, or when something must come after it. Then a block that was
given away too early is written when it is another's, and a FakeModel's tokens show it.

Invariants, each checked: at most two launches are unread, read in their order; DRAWN_BEFORE stands
only for rows of the launch just before. Engine thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from engine.batch import Batch, TokenSpan
from engine.errors import IntegrityError
from engine.models.interface import (
    DRAWN_BEFORE,
    DecodeRow,
    DecodesAhead,
    Guesses,
    Launch,
    LaunchRow,
    LoadedModel,
    MixedRow,
    Progress,
)
from engine.sampling.metadata import SamplerOutput, SamplingRequest
from engine.sampling.sampler import Sampler
from engine.sequence import Key

MAX_UNREAD = 2


class _Step:
    """A launch. `drawn` is set once it was computed, and `before` until then."""

    def __init__(self, rows: tuple[LaunchRow, ...], before: _Step | None) -> None:
        self.rows = rows
        self.before = before
        self.drawn: list[SamplerOutput] | None = None
        needed = {row.key for row in rows if DRAWN_BEFORE in _token_ids(row)}
        known = set() if before is None else before.drawing
        if not needed <= known:
            raise IntegrityError(f"{needed - known} drew nothing in the launch before")
        if len({row.key for row in rows}) < len(rows):
            raise IntegrityError("a row is twice in one launch")

    @property
    def drawing(self) -> set[Key]:
        """Return the keys of the rows that sample."""
        return {row.key for row in self.rows if row.draw is not None}

    def tokens(self) -> dict[Key, int]:
        """Return the token that each row sampled; 0 for an error. Called once the launch was
        computed."""
        drawn = [max(0, one.token_id) for one in self.drawn or ()]
        keys = [row.key for row in self.rows if row.draw is not None]
        return dict(zip(keys, drawn, strict=True))


def _token_ids(row: LaunchRow) -> tuple[int, ...]:
    return row.token_ids if isinstance(row, MixedRow) else (row.token_id,)


class AheadModel:
    """The given model with launches; everything but `ahead` is the given model's.

    Args:
        is_late: compute a launch as late as possible.
        takes: returns whether a row may be launched; None: all rows.
        takes_prompts: False: steps with prompts are never launched.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        is_late: bool = False,
        max_rows: int = 1 << 20,
        takes: Callable[[SamplingRequest], bool] | None = None,
        takes_prompts: bool = True,
    ) -> None:
        self._model = model
        self.info = model.info
        self.layout = model.layout
        self.adapters = model.adapters
        self.kv_record = model.kv_record
        self.device_memory = model.device_memory
        self.make_memory = model.make_memory
        self.attach = model.attach
        self.hidden = model.hidden
        self.every_hidden = model.every_hidden
        self.layer_inputs = model.layer_inputs
        self.ends = model.ends
        self.warm_up = model.warm_up
        self.check_alive = model.check_alive
        self.check_integrity = model.check_integrity
        self.watch = model.watch
        self.reads_unwritten = model.reads_unwritten
        self.max_queued_tokens = 1 << 20
        """Largest number of tokens of a step for which `queues_step` returns True."""
        self.close = model.close
        self.launches = PlainAhead(
            model, is_late=is_late, max_rows=max_rows, takes=takes, takes_prompts=takes_prompts
        )
        self.ahead: DecodesAhead | None = self.launches

    @property
    def guesses(self) -> Guesses:
        """The given model's kinds of draft tokens."""
        return self._model.guesses

    def queues_step(self, batch: Batch) -> bool:
        """Whether the batch has at most `max_queued_tokens` tokens."""
        return len(batch.token_ids) <= self.max_queued_tokens

    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute all launches, then the batch with the given model."""
        self.launches.compute_all()
        return self._model.forward(batch)


class PlainAhead:
    """The launches of an AheadModel."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        is_late: bool,
        max_rows: int,
        takes: Callable[[SamplingRequest], bool] | None,
        takes_prompts: bool,
    ) -> None:
        self.max_rows = max_rows
        self.takes_prompts = takes_prompts
        self.is_late = is_late
        self.num_launches = 0
        self.num_mixed = 0
        """Number of launches by `launch_mixed`."""
        self._model = model
        self._takes = takes
        self._unread: deque[_Step] = deque()
        self._newest: _Step | None = None
        self._block_size = model.layout.block_size

    def warm_up(self, progress: Progress | None = None) -> None:
        """Do nothing: nothing is compiled."""

    def takes(self, draw: SamplingRequest) -> bool:
        """Whether the row may be launched (`takes` of AheadModel)."""
        if draw.history is not None or draw.bitmask is not None:
            raise IntegrityError("asked for a draw that depends on what was drawn before")
        return self._takes is None or self._takes(draw)

    def launch(self, rows: Sequence[DecodeRow]) -> Launch:
        """Launch a decode step; it is computed now, or with `is_late` when it is read."""
        return self._begin(rows)

    def launch_mixed(self, rows: Sequence[MixedRow]) -> Launch:
        """Launch a step that may have prompts; it is computed now, or with `is_late` when it is
        read."""
        if not self.takes_prompts:
            raise IntegrityError("a mixed launch for a model that cannot")
        size = self._block_size
        for row in rows:
            if len(row.block_ids) != -(-(row.position + row.num_tokens) // size):
                raise IntegrityError(f"{row.key} has {len(row.block_ids)} blocks in a mixed launch")
            if row.draw is not None and row.draw.position != row.position + row.num_tokens:
                raise IntegrityError(f"{row.key} draws for {row.draw.position}, not its end")
        self.num_mixed += 1
        return self._begin(rows)

    def _begin(self, rows: Sequence[LaunchRow]) -> Launch:
        if len(self._unread) >= MAX_UNREAD or not 0 < len(rows) <= self.max_rows:
            raise IntegrityError(f"{len(rows)} rows, {len(self._unread)} launches unread")
        step = _Step(tuple(rows), self._newest)
        self.num_launches += 1
        if not self.is_late:
            self._compute(step)
        self._unread.append(step)
        self._newest = step
        return step

    def read(self, launch: Launch) -> list[SamplerOutput]:
        """Compute the launch, if it was not, and return its outputs."""
        if not self._unread or launch is not self._unread[0]:
            raise IntegrityError("launches are read in their order, each once")
        step = self._unread[0]
        self._compute(step)
        self._unread.popleft()
        return step.drawn or []

    def drain(self) -> None:
        """Drop all launches; those that were not computed never are."""
        self._unread.clear()
        self._newest = None

    def compute_all(self) -> None:
        """Compute all launches, before other work."""
        for step in self._unread:
            self._compute(step)

    def _compute(self, step: _Step) -> None:
        if step.drawn is not None:
            return
        if step.before is not None:
            self._compute(step.before)
        before = {} if step.before is None else step.before.tokens()
        size = self._block_size
        token_ids: list[int] = []
        spans: list[TokenSpan] = []
        draw_indices: list[int] = []
        draws: list[SamplingRequest] = []
        for row in step.rows:
            end = row.position + row.num_tokens
            token_ids += [
                before[row.key] if token_id == DRAWN_BEFORE else token_id
                for token_id in _token_ids(row)
            ]
            blocks = row.block_ids[: -(-end // size)]
            adapter = row.adapter if isinstance(row, DecodeRow) else 0
            spans.append(TokenSpan(row.position, row.num_tokens, blocks, adapter))
            if row.draw is not None:
                draw_indices.append(len(token_ids) - 1)
                draws.append(row.draw)
        logits = self._model.forward(Batch(tuple(token_ids), tuple(spans), tuple(draw_indices)))
        step.drawn = Sampler().begin(logits, draws).result() if draws else []
        step.before = None
