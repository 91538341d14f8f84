"""warm_up: the model's first steps, so that no request pays for what they compile or allocate.
Writes no KV. Before the first request; engine thread only.
"""

from __future__ import annotations

import torch

from engine import batch
from engine.models.interface import DecodesAhead, LoadedModel, Progress
from engine.sampling import pipeline


def warm_up(
    model: LoadedModel,
    ahead: DecodesAhead | None,
    max_num_tokens: int,
    progress: Progress | None = None,
) -> None:
    """Run a plain step per kind of batch, with a draw; and whatever its launches need.

    Args:
        model: with its cache attached.
        max_num_tokens: of the largest step.
    """
    sizes = _sizes(model.info.device, max_num_tokens)
    for done, num_tokens in enumerate(sizes):
        if progress is not None:
            progress("warm-up", done, len(sizes))
        pipeline.warm_up(model.forward(batch.warm_up(num_tokens)))
    if ahead is not None:
        ahead.warm_up(progress)
    if progress is not None:
        progress("warm-up", len(sizes), len(sizes))


def _sizes(device: str, max_num_tokens: int) -> list[int]:
    """The smallest step and the largest; where kernels are compiled for classes of sizes, all
    powers of two between."""
    sizes = [1]
    while torch.device(device).type != "cpu" and 2 * sizes[-1] < max_num_tokens:
        sizes.append(2 * sizes[-1])
    return [*sizes, max_num_tokens]
