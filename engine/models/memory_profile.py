"""Measurement of the memory that an engine's largest step needs on the device in addition to
weights and cache, made before the cache is sized. Start-up only; it knows no requests."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.batch import Batch, TokenSpan
from engine.config import EngineConfig
from engine.errors import LoadError
from engine.models.interface import LoadedModel
from engine.sampling.sampler import WARM_UP, Sampler
from engine.scheduler import MAX_PROMPT_ROWS

MOST_LAYERS = 3
"""Largest number of layers whose inputs one draft head uses: EAGLE-3's."""


def largest_step_bytes(model: LoadedModel, config: EngineConfig) -> int:
    """Measure the peak bytes of a step of `max_num_tokens_per_step` tokens that samples
    `max_num_running` rows and has logits for MAX_PROMPT_ROWS more; 0 on CPU, where nothing is
    reserved.

    The model is attached to a cache of one block meanwhile, which nothing is written to.
    Raises: LoadError if such a step does not fit beside the weights.
    """
    device = torch.device(model.info.device)
    if device.type != "cuda":
        return 0
    memory = model.make_memory(1)
    model.attach(memory)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        for num_long in (0, 1):  # many decodes; as many as leave room for a chunk
            batch = _largest(config, model.info.context_window, num_long)
            if config.speculation.draft_heads:
                batch = _keeping(batch, model)
            requests = [WARM_UP] * len(batch.draw_indices)
            Sampler().begin(model.forward(batch), requests).result()
        torch.cuda.synchronize(device)
    except torch.cuda.OutOfMemoryError as error:
        raise LoadError(
            f"a step of {config.max_num_tokens_per_step} tokens does not fit on {device} beside "
            f"{model.info.weight_bytes} bytes of weights ({str(error).splitlines()[0]}); lower "
            "max_num_tokens_per_step"
        ) from error
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return int(peak)


def _keeping(batch: Batch, model: LoadedModel) -> Batch:
    """Return the batch with all hidden states kept that draft heads may need, since the heads are
    not loaded yet."""
    num_layers = 0 if model.ends is None else model.ends.num_layers
    layers = tuple(range(min(MOST_LAYERS, num_layers)))
    return replace(batch, wants_hidden=True, wants_every_hidden=True, wants_layers=layers)


def _largest(config: EngineConfig, context_window: int, num_long: int) -> Batch:
    """Build a batch of as many single tokens as requests may run, minus `num_long`, and, if
    `num_long` is 1, chunks that fill the token budget, with the largest number of rows of
    logits."""
    num_singles = config.max_num_running - num_long
    lengths = [1] * num_singles
    left = config.max_num_tokens_per_step - num_singles
    while num_long and left > 0:
        lengths.append(min(left, context_window))
        left -= lengths[-1]
    ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    spans = tuple(TokenSpan(0, length, ()) for length in lengths)
    draws = [end - 1 for end in ends[: config.max_num_running]]
    if config.speculation.is_on:  # a row of logits for each guess, too
        most = config.max_num_running * (1 + config.speculation.max_num_nodes)
        draws = list(range(min(most, ends[-1])))
    draws = sorted({*draws, *range(max(0, ends[-1] - MAX_PROMPT_ROWS), ends[-1])})
    return Batch((0,) * ends[-1], spans, tuple(draws))
