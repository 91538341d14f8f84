"""warm_up: runs the model's first steps, so that no request waits for compilation and allocation.
It writes no KV. Called before the first request; engine thread only."""

from __future__ import annotations

import torch

from engine import batch
from engine.models.interface import DecodesAhead, LoadedModel, Progress
from engine.sampling.sampler import Sampler

_BESIDE = 2
"""Number of tokens of a prompt in a step with decodes: one more than a decode has."""


def warm_up(
    model: LoadedModel,
    ahead: DecodesAhead | None,
    max_num_tokens: int,
    max_num_running: int,
    progress: Progress | None = None,
) -> None:
    """Run a plain step of each kind of batch, sampling included; then compile and capture launches
    ahead, or, without them, plain steps.

    Args:
        model: a model with its cache attached.
        max_num_tokens: number of tokens of the largest step.
        max_num_running: number of requests of the largest step.
    """
    # Only our kernels look no further than a sequence's end, and only they are compiled by classes
    # of numbers of decodes.
    most = 0 if model.reads_unwritten else max_num_running
    steps = _steps(model.info.device, max_num_tokens, most)
    for done, lengths in enumerate(steps):
        if progress is not None:
            progress("warm-up", done, len(steps))
        logits = model.forward(batch.warm_up(*lengths))[-1:]
        # Of many rows once: dtype and strides are those of all steps.
        Sampler().warm_up(logits, max_num_tokens if done == 0 else 1)
    if ahead is not None:
        ahead.warm_up(progress)
    else:
        model.warm_up(progress)
    if progress is not None:
        progress("warm-up", len(steps), len(steps))


def _steps(device: str, max_num_tokens: int, max_num_running: int) -> list[tuple[int, ...]]:
    """Return the prompt lengths of each warm-up step, from the smallest to the largest.

    Where kernels are compiled for classes of sizes, there is one prompt of every power of two, and
    every class of numbers of decodes, alone and with a prompt. The number of programs with which
    decodes fill a device determines how attention splits them: some classes are less than a third
    wide, so that numbers a quarter apart are run. Contexts have one length: variants that are
    compiled for longer ones only (exact steps outside of graphs) are not included.
    """
    if torch.device(device).type == "cpu":
        return [(1,), (max_num_tokens,)]
    powers = [1 << i for i in range(max_num_tokens.bit_length()) if 1 << i < max_num_tokens]
    steps: list[tuple[int, ...]] = [(num_tokens,) for num_tokens in [*powers, max_num_tokens]]
    quarters = {power * part // 4 for power in powers for part in (4, 5, 6, 7)}
    most = min(max_num_running, max_num_tokens - _BESIDE)
    for num_decodes in sorted({n for n in quarters if n < most} | {most}) if most > 0 else ():
        decodes = (1,) * num_decodes
        steps += [decodes] * (num_decodes > 1) + [(*decodes, _BESIDE)]
    return steps
