"""begin_mixed: launches a step with prompts before the previous one was read: its forward pass and
sampling are queued on the device, and tokens sampled by the launch before stay on the device.

Such a step is a plain one with two differences: negative token ids refer to tokens that the last
launch sampled (`place_of`, engine/decoder/inputs.py:fill_drawn), and its own sampled tokens are
stored there for the next. It knows no tables and no graphs. Nothing waits except the functions that
it returns. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from baton_kernels.decode_step_rows import NUM_BUFFERS

from engine.batch import Batch, TokenSpan
from engine.decoder.inputs import fill_drawn
from engine.errors import IntegrityError
from engine.models.interface import DRAWN_BEFORE, MixedRow
from engine.sampling.metadata import SamplerOutput
from engine.sampling.sampler import Sampler
from engine.sequence import Key

ForwardDrawn = Callable[[Batch, torch.Tensor | None], torch.Tensor]
"""LoadedModel.forward for a batch whose token ids may be placeholders (`place_of`) of these [R]
int32 valid token ids on the device; None: there are no placeholders."""


@dataclass(frozen=True, eq=False)
class MixedLaunch:
    """A mixed launch that is not read yet."""

    finish: Callable[[], list[SamplerOutput]]
    """Waits for the samples and returns them; called once."""

    done: torch.cuda.Event | None
    """The event at which the launch is done; None on a CPU, where it is done already."""


def place_of(place: int) -> int:
    """Return the token id that is the placeholder of the token sampled at this place."""
    return -1 - place


@torch.inference_mode()
def warm_up_mixed(last_drawn: torch.Tensor, num_words: int, *, vocab_size: int) -> None:
    """Load kernels that no plain step uses, and allocate pinned memory for two steps, so that the
    first launches do not make the host wait.

    Args:
        last_drawn: as in `begin_mixed`; not changed.
        num_words: largest number of int32 of one step.
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
        places: the index in `last_drawn` of each row's token from the launch before.
        last_drawn: [max_rows] int32 on the device; overwritten with this step's tokens, valid ones
            for rows in error, too.
    Returns: a function that waits for the outputs and returns them, and the index of each row's
        token in `last_drawn`.
    Raises: IntegrityError for a row whose token was not sampled by the launch before.
    """
    token_ids: list[int] = []
    spans: list[TokenSpan] = []
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
        spans.append(TokenSpan(row.position, row.num_tokens, row.block_ids))
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
