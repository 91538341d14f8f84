"""AheadDecoder: LlamaDecoder's steps that are launched before the previous one was read
(DecodesAhead, engine/models/interface.py).

A launch of decodes consists of the rows' image in pinned memory, one CUDA graph, which reads it and
writes the sampled tokens to pinned memory, and one event. A launch with prompts is a plain step
that is not waited for (mixed_launch.py). Only `read` waits. The caller chooses the rows, and drops
samples that are not wanted.

Invariant: at most two launches are unread, so that two of each pinned buffer suffice: a launch that
was read no longer uses its own. Engine thread only.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from baton_kernels.decode_step_rows import HEADER_WORDS, NUM_BUFFERS, next_number
from numpy.typing import NDArray

from engine.decoder.graph_set import Captured, capture_all
from engine.decoder.graphs import (
    FIRST_WIDTH_TOKENS,
    Decode,
    DecodeGraphs,
    DecodeStep,
    DrawRows,
)
from engine.decoder.mixed_launch import ForwardDrawn, MixedLaunch, begin_mixed, warm_up_mixed
from engine.decoder.plain_graphs import PlainGraphs, make_plain_graphs
from engine.decoder.row_table import Image, Placed, RowTable, aligned
from engine.errors import IntegrityError, InvalidLogits, WrongState
from engine.kv.memory import KvMemory
from engine.lora.stacked_weights import StackedLora
from engine.models.interface import DecodeRow, Launch, MixedRow, Progress
from engine.sampling.metadata import SamplerOutput, SamplingRequest, masks_ends, metadata_of

if TYPE_CHECKING:
    from engine.models.llama import LlamaDecoder

MAX_OUTSTANDING = NUM_BUFFERS
"""Largest number of unread launches."""

MAX_CHANGES = 1 << 14
"""Largest number of block table entries in one image: 128 kB of pinned memory, of which a step
copies the used part. More changes at once (many long prompts) need a copy of their own."""


@dataclass(frozen=True, eq=False)
class RowLaunch:
    """A decode launch that is not read yet."""

    order: NDArray[np.intp]
    """[rows], the place of each row in the tables."""

    positions: tuple[int, ...]
    """[rows], the positions of the sampled tokens; for errors."""

    number: int
    """Number of the launch's step, which determines its pinned buffers."""

    done: torch.cuda.Event | None
    """The event at which the launch is done; None on a CPU, where it is done already."""


class AheadDecoder:
    """Launches decode steps on the device, and mixed ones.

    Args:
        decode: computes a decode step, and writes its KV.
        max_rows: largest number of rows of a launch.
        context_window: largest number of tokens of a row.
        uses_graphs: False: launch kernel by kernel; always so without CUDA.
        plain: CUDA graphs of plain steps, captured with those of launches, in the same memory.
        draw: samples the rows, on a rank of several (engine/parallel/parallel_launches.py); None:
            `draw_tokens`.
        stacks: the stacked adapters of rows, which `decode` adds; None: no row has one.
        max_changes: largest number of block table entries in one image.
        first_width_tokens: see DecodeGraphs.
    """

    def __init__(
        self,
        decode: Decode,
        *,
        max_rows: int,
        context_window: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        uses_graphs: bool = True,
        plain: PlainGraphs | None = None,
        draw: DrawRows | None = None,
        stacks: StackedLora | None = None,
        max_changes: int = MAX_CHANGES,
        first_width_tokens: int = FIRST_WIDTH_TOKENS,
    ) -> None:
        self.max_rows = max_rows
        self.plain = plain
        self._device = device
        self._vocab_size = vocab_size
        self._forward: weakref.WeakMethod[ForwardDrawn] | None = None
        is_cuda = device.type == "cuda"
        num_slots = 0 if stacks is None else stacks.num_slots
        image = Image(aligned(max_rows), max_changes, num_slots)
        width = aligned(-(-context_window // block_size))
        self._table = RowTable(image, table_width=width, block_size=block_size)
        self._step = DecodeStep(
            decode, image, table_width=width, vocab_size=vocab_size, device=device, draw=draw
        )
        self._graphs = DecodeGraphs(
            self._step,
            max_rows=max_rows,
            table_width=width,
            block_size=block_size,
            uses_graphs=uses_graphs and is_cuda,
            first_width_tokens=first_width_tokens,
        )
        self._stacks = stacks
        self._images = self._step.images.numpy()
        self._outputs = self._step.outputs.numpy()
        self._outstanding: deque[RowLaunch | MixedLaunch] = deque()
        self._next_number = 0

    @property
    def takes_prompts(self) -> bool:
        """Whether `launch_mixed` is available."""
        return self._forward is not None

    def take_prompts(self, forward: ForwardDrawn) -> None:
        """Enable `launch_mixed`.

        Args: forward: a bound method, of which only a weak reference is kept.
        """
        self._forward = weakref.WeakMethod(forward)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile and capture everything that launches and plain steps of `plain` need, without
        writing KV; forgets all rows. Raises: WrongState while a launch is unread; LoadError if
        the device lacks the memory."""
        if self._outstanding:
            raise WrongState("a launch is under way")
        self._table.forget()
        self._images[:] = self._table.words
        # On CPU a launch compiles nothing: it would only take a second for each width of tables.
        sets: list[Captured] = [self._graphs] if self._device.type == "cuda" else []
        if self.plain is not None:
            sets.insert(0, self.plain)
        capture_all(sets, self._device, progress)
        self._step.begin_anew()
        self._next_number = 0
        if self.plain is not None:
            with self._on_device():
                self.plain.reserve()
        if self.takes_prompts:
            num_words = 0 if self.plain is None else self.plain.num_words
            with self._on_device():
                warm_up_mixed(self._step.last_drawn, num_words, vocab_size=self._vocab_size)

    def close(self) -> None:
        """Free the CUDA graphs (GraphSet.forget). No launch may follow."""
        self._graphs.forget()
        if self.plain is not None:
            self.plain.forget()

    def takes(self, draw: SamplingRequest) -> bool:
        """Whether the device can sample with these parameters: greedy, or temperature, top-k, top-p
        and min-p, without processors that change logits, and without log probabilities or a
        trace."""
        sampling = draw.sampling
        if draw.bitmask is not None or sampling.grammar is not None:
            return False
        metadata = metadata_of(sampling)
        if metadata.is_plain:
            return True
        is_quiet = sampling.logprobs is None and not sampling.trace
        return is_quiet and not metadata.adjusts and not masks_ends(draw)

    @torch.inference_mode()
    def launch(self, rows: Sequence[DecodeRow]) -> RowLaunch:
        """Launch a step.

        Args: rows: 1 to `max_rows`. A token id of -1 is the token that the row sampled in the
            launch before.
        Raises: WrongState if two launches are unread; IntegrityError for invalid rows
            (engine/decoder/row_table.py); errors of the device. After an error all token ids of the
            next launch must be given; after an error of the device `drain` must be called first.
        """
        self._check_room(len(rows))
        number = self._next_number
        try:
            placed = self._table.update(rows)
            if placed.has_adapters and self._stacks is not None:
                self._stacks.check_held(row.adapter for row in rows)
            with self._on_device():
                done = self._begin(placed, len(rows))
        except BaseException:
            self._table.forget()
            raise
        positions = tuple(row.draw.position for row in rows)
        launch = RowLaunch(placed.order, positions, number, done)
        self._outstanding.append(launch)
        return launch

    def _check_room(self, num_rows: int) -> None:
        if len(self._outstanding) == MAX_OUTSTANDING:
            raise WrongState(f"{MAX_OUTSTANDING} launches are not read yet")
        if not 0 < num_rows <= self.max_rows:
            raise WrongState(f"a launch of {num_rows} rows, not 1 to {self.max_rows}")

    @torch.inference_mode()
    def launch_mixed(self, rows: Sequence[MixedRow]) -> MixedLaunch:
        """Launch a step that may have prompts. Errors are those of `launch`."""
        self._check_room(len(rows))
        forward = None if self._forward is None else self._forward()
        if forward is None:
            raise WrongState("no prompts are launched here")
        try:
            with self._on_device():
                finish, places = begin_mixed(
                    rows,
                    self._table.drawn_at,
                    self._step.last_drawn,
                    forward,
                    vocab_size=self._vocab_size,
                )
                launch = MixedLaunch(finish, self._mark())
        except BaseException:
            self._table.forget()
            raise
        self._table.leave_elsewhere(places)
        self._outstanding.append(launch)
        return launch

    def _begin(self, placed: Placed, num_rows: int) -> torch.cuda.Event | None:
        """Queue the next step. Returns: the event at which it is done; None on a CPU."""
        num_words = placed.num_words
        image = self._images[self._next_number % NUM_BUFFERS]
        image[:num_words] = self._table.words[:num_words]
        if len(placed.overflow):
            self._step.apply(placed.overflow)
        self._graphs.run(num_rows, placed.num_blocks, placed.needs, placed.has_adapters)
        self._next_number = next_number(self._next_number)
        return self._mark()

    def _mark(self) -> torch.cuda.Event | None:
        """Return an event at which all queued work is done; None on a CPU."""
        if self._device.type != "cuda":
            return None
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return done

    def read(self, launch: Launch) -> list[SamplerOutput]:
        """Wait for a launch. Returns: the outputs of its rows, in their order; a row whose greatest
        logit is not finite has an InvalidLogits.

        Raises: WrongState for a launch that is not the oldest unread one; errors of the device;
            IntegrityError if the results belong to another launch.
        """
        if not self._outstanding or self._outstanding[0] is not launch:
            raise WrongState("launches are read once, in order")
        oldest = self._outstanding.popleft()
        if oldest.done is not None:
            oldest.done.synchronize()
        if isinstance(oldest, MixedLaunch):
            return oldest.finish()
        output = self._outputs[oldest.number % NUM_BUFFERS]
        if output[0] != oldest.number:
            raise IntegrityError(f"launch {oldest.number} left the draws of {output[0]}")
        token_ids, bits = output[HEADER_WORDS:].reshape(2, -1)
        drawn = [SamplerOutput(token_id) for token_id in token_ids[oldest.order].tolist()]
        values = bits.view(np.float32)[oldest.order]
        is_valid = np.isfinite(values)
        if not is_valid.all():
            for at in np.flatnonzero(~is_valid).tolist():
                message = f"the best logit for position {oldest.positions[at]} is {values[at]}"
                drawn[at] = SamplerOutput(-1, error=InvalidLogits(message))
        return drawn

    def _on_device(self) -> AbstractContextManager[object]:
        """Return a context in which the decoder's device is the current one."""
        is_cuda = self._device.type == "cuda"
        return torch.cuda.device(self._device) if is_cuda else contextlib.nullcontext()

    def drain(self) -> None:
        """Wait for all launches, and forget them and all rows. Called after an exception."""
        self._outstanding.clear()
        self._table.forget()
        self._next_number = 0
        # A device that failed touches nothing any more, and says so again at the next call.
        with contextlib.suppress(RuntimeError), self._on_device():
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._step.begin_anew()


def make_ahead(
    decoder: LlamaDecoder,
    memory: KvMemory,
    *,
    max_rows: int,
    max_tokens: int,
    context_window: int,
    max_num_nodes: int = 0,
    max_changes: int = MAX_CHANGES,
) -> AheadDecoder:
    """Create the AheadDecoder of a decoder that is attached to `memory`, whose blocks store the
    compute dtype.

    Args:
        max_rows, max_tokens, max_num_nodes: as in make_plain_graphs.
        max_changes: as in AheadDecoder.
    """
    return AheadDecoder(
        decoder.decode,
        max_rows=max_rows,
        context_window=context_window,
        block_size=memory.layout.block_size,
        vocab_size=decoder.shape.vocab_size,
        device=memory.cache.device,
        stacks=decoder.stacks,
        max_changes=max_changes,
        plain=make_plain_graphs(
            decoder,
            memory,
            max_rows=max_rows,
            max_tokens=max_tokens,
            context_window=context_window,
            max_num_nodes=max_num_nodes,
        ),
    )
