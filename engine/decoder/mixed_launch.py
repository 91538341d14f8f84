"""begin_mixed: a step with prompts, launched before the one before it was read: its forward pass
and draws are queued on the device, and tokens that it takes from the launch before never leave it.

Such a step is a plain one, with two differences: token ids below zero stand for places among the
last launch's draws (`place_of`, engine/decoder/inputs.py:fill_drawn), and what it draws is left
among them for the next. Knows no tables and no graphs. Nothing waits but the functions that it
gives. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from baton_kernels.step_rows import NUM_BUFFERS

from engine.batch import Batch, Span
from engine.decoder.inputs import fill_drawn
from engine.errors import IntegrityError
from engine.models.interface import DRAWN_BEFORE, MixedRow
from engine.sampling.metadata import SamplerOutput
from engine.sampling.sampler import Sampler
from engine.sequence import Key

ForwardDrawn = Callable[[Batch, torch.Tensor | None], torch.Tensor]
"""LoadedModel.forward of a batch whose token ids may be `place_of`s among these [R] int32 valid
token ids, which lie on the device; None: none of them is."""


@dataclass(frozen=True, eq=False)
class MixedLaunch:
    """A mixed launch that is under way."""

    finish: Callable[[], list[SamplerOutput]]
    """Waits for the draws and gives them; to be called once."""

    done: torch.cuda.Event | None
    """None: the device is the CPU, and all is there."""


def place_of(place: int) -> int:
    """The token id that stands for the token drawn at this place."""
    return -1 - place


@torch.inference_mode()
def warm_up_mixed(last_drawn: torch.Tensor, num_words: int, *, vocab_size: int) -> None:
    """Do what would make the host wait at the first launches: load the kernels that no plain step
    has, and take pinned memory for two steps under way that no graph takes.

    Args:
        last_drawn: as of `begin_mixed`; stays as it is.
        num_words: most int32 of one step.
    """
    valid = last_drawn.clamp(0, vocab_size - 1)
    fill_drawn(torch.full_like(last_drawn, place_of(0)), valid)
    if last_drawn.device.type != "cuda":
        return
    # torch keeps what is free by its size, rounded up to a power of two.
    sizes = [1 << power for power in range(7, max(num_words - 1, 1).bit_length() + 1)]
    kept = [
        torch.empty(size, dtype=torch.int32, pin_memory=True)
        for size in sizes
        for _ in range(NUM_BUFFERS)
    ]
    del kept


def begin_mixed(
    rows: Sequence[MixedRow],
    places: Mapping[Key, int],
    last_drawn: torch.Tensor,
    forward: ForwardDrawn,
    *,
    vocab_size: int,
) -> tuple[Callable[[], list[SamplerOutput]], dict[Key, int]]:
    """Queue a step.

    Args:
        places: where in `last_drawn` the launch before left each row's token.
        last_drawn: [max_rows] int32 on the device; overwritten with this step's tokens, a valid one
            for a row in error, too.
    Returns: what waits for its draws and gives them, and where in `last_drawn` each is.
    Raises: IntegrityError for a row that takes a token which was not drawn.
    """
    token_ids: list[int] = []
    spans: list[Span] = []
    draw_indices: list[int] = []
    is_taking = False
    for row in rows:
        if row.token_ids == (DRAWN_BEFORE,):
            if row.key not in places:
                raise IntegrityError(f"{row.key} takes a token of the launch before, but drew none")
            token_ids.append(place_of(places[row.key]))
            is_taking = True
        else:
            token_ids += row.token_ids
        spans.append(Span(row.position, row.num_tokens, row.block_ids))
        if row.draw is not None:
            draw_indices.append(len(token_ids) - 1)
    batch = Batch(tuple(token_ids), tuple(spans), tuple(draw_indices))
    logits = forward(batch, last_drawn.clamp(0, vocab_size - 1) if is_taking else None)
    draws = [row.draw for row in rows if row.draw is not None]
    keys = [row.key for row in rows if row.draw is not None]
    if not draws:
        return list, {}
    pending = Sampler().begin(logits, draws, into=last_drawn[: len(draws)])
    return pending.result, {key: place for place, key in enumerate(keys)}
