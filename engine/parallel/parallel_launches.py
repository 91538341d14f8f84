"""ParallelAhead and FollowingDecoder: decode steps that several ranks launch ahead (DecodesAhead,
engine/models/interface.py). ParallelAhead in rank 0 sends each launch to the other ranks as the
words that it copies to its own device; FollowingDecoder in each of them launches it.

Every rank of the last stage samples the tokens itself, from the same logits by the same kernels.
They are sent to the first stage, where the next launch begins. Only `read` waits. Invariant: all
ranks launch the same words in the same order. Called by the thread that computes.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from baton_kernels.sampling import DrawnTokens, Needs, SamplingRows, draw_tokens

from engine.decoder.ahead import AheadDecoder
from engine.decoder.row_table import Placed
from engine.errors import RankFailed
from engine.kv.memory import KvMemory
from engine.models.interface import Launch, Progress
from engine.parallel.messages import Drain, LaunchWords, WarmUp
from engine.parallel.rank_model import RankModel
from engine.parallel.rank_processes import RankProcesses
from engine.parallel.ranks import Ranks
from engine.sampling.metadata import SamplerOutput

Built = TypeVar("Built", bound=AheadDecoder)


class ParallelAhead(AheadDecoder):
    """The launches of rank 0, which are sent to the other ranks. Created by `build`."""

    def lead(self, processes: RankProcesses) -> None:
        """Set the processes to which every launch is sent. Called once, before the first launch."""
        self._processes = processes

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile and capture all launches together with the other ranks (AheadDecoder.warm_up).
        Each graph may take as long as a step."""

        def show(what: str, done: int, total: int) -> None:
            self._processes.begin_again()
            if progress is not None:
                progress(what, done, total)

        with self._processes.step():
            self._processes.tell(WarmUp())
            super().warm_up(show)

    def _begin(self, placed: Placed, num_rows: int) -> torch.cuda.Event | None:
        words = self._table.words[: placed.num_words]
        launch = LaunchWords(
            words.tobytes(),
            placed.overflow.tobytes(),
            num_rows,
            placed.num_blocks,
            placed.needs,
        )
        with self._processes.step():
            self._processes.tell(launch)
            return super()._begin(placed, num_rows)

    def read(self, launch: Launch) -> list[SamplerOutput]:
        """Wait for a launch (AheadDecoder.read). Raises: RankFailed, and the samples are
        dropped."""
        with self._processes.step():
            return super().read(launch)

    def drain(self) -> None:
        """Wait for all launches and forget them, at the other ranks, too, if they are alive."""
        with contextlib.suppress(RankFailed):
            self._processes.tell(Drain())
        super().drain()


class FollowingDecoder(AheadDecoder):
    """The launches of another rank, which follow rank 0's. Created by `build`."""

    @torch.inference_mode()
    def follow(self, launch: LaunchWords) -> None:
        """Launch the same step as rank 0. Its buffers are free when rank 0's are, since this rank
        has taken part in every step that rank 0 has read."""
        words = np.frombuffer(launch.words, dtype=np.int32)
        self._table.words[: len(words)] = words
        overflow = np.frombuffer(launch.overflow, dtype=np.int32).reshape(-1, 2).copy()
        placed = Placed(
            np.empty(0, dtype=np.intp), len(words), launch.num_blocks, launch.needs, overflow
        )
        with self._on_device():
            self._begin(placed, launch.num_rows)


def build(
    kind: type[Built],
    part: RankModel,
    ranks: Ranks,
    memory: KvMemory,
    *,
    max_rows: int,
    context_window: int,
) -> Built:
    """Create this rank's launches. All ranks must use the same sizes, on which the layout of words
    depends.

    Args: part: a part of the model that is attached to `memory`.
    """
    return kind(
        part.decode,
        max_rows=max_rows,
        context_window=context_window,
        block_size=memory.layout.block_size,
        vocab_size=part.vocab_size,
        device=memory.cache.device,
        draw=partial(_draw, ranks),
    )


def _draw(
    ranks: Ranks, logits: torch.Tensor, rows: SamplingRows, needs: Needs, out: DrawnTokens
) -> None:
    if ranks.place.is_last:
        draw_tokens(logits, rows, needs=needs, out=out)
    ranks.pass_tokens(out.token_ids)
