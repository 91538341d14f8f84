"""The pipeline where the logits are on a device: the same rows, order and errors, with the kernels
of baton_kernels in place of sorts and of passes over [rows, vocabulary]. Decode steps that are
launched ahead draw with the same kernels: a token never depends on which way it was drawn.

Rows that change no logit are drawn from the model's own logits, all in one call; those that do from
a float32 copy. Thresholds of a trace are the ones that the draw had. Against CPU, a nucleus may
differ in a token whose mass ends at p within float32's rounding; all else is equal.

Engine thread only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from baton_kernels import logit_ops, noise
from baton_kernels.sampling import (
    DrawnTokens,
    Needs,
    SamplingRows,
    distance_limits,
    draw_tokens,
)
from numpy.typing import NDArray

from engine.errors import EngineError
from engine.request import Sampling
from engine.sampling import dense
from engine.sampling.copies import Fetched, Mark, bring
from engine.sampling.history import TokenHistory
from engine.sampling.logprobs import processed_logprobs
from engine.sampling.masks import mask
from engine.sampling.outcome import Outcome, argmaxes, report, rows_of, unsound
from engine.sampling.penalties import history_of
from engine.sampling.recipe import Row, masks_ends, recipe_of
from engine.sampling.row import Draw, Drawn


def draw_on_device(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    """See pipeline.draw."""
    return begin_on_device(logits, draws)()


@torch.inference_mode()
def begin_on_device(
    logits: torch.Tensor, draws: Sequence[Draw], into: torch.Tensor | None = None
) -> Callable[[], list[Drawn]]:
    """See pipeline.begin. Rows that change no logit are drawn by what is queued here; for others it
    says whether their logits are numbers."""
    is_adjusted = [
        recipe_of(one.sampling).adjusts or one.bitmask is not None or masks_ends(one)
        for one in draws
    ]
    computed = Mark(logits.device) if into is None else None
    queued = _queue(logits, draws, is_greedy=is_adjusted, into=into)
    rows = rows_of(draws, np.ones(len(draws), dtype=np.bool_))
    if into is not None:
        # Nobody asks them again: another step's may take their memory before this one's are read.
        logits = logits.new_empty(0, logits.shape[1])
    return partial(_finish, logits, draws, rows, queued, computed)


def _finish(
    logits: torch.Tensor,
    draws: Sequence[Draw],
    rows: list[Row],
    queued: Fetched,
    computed: Mark | None,
) -> list[Drawn]:
    """Wait for what was queued, and work on the rows that take more than an argmax.

    Args:
        computed: what was queued before.
    """
    if computed is not None:
        # To wake up takes the host as long as the draws take the device, which waits for what comes
        # of them: it is awake when they are there.
        computed.wait()
    token_ids, values = _read(queued, len(draws))
    drawn, is_valid = argmaxes(draws, token_ids, values)
    if rows:  # else the device waits, and there is nothing to do
        _finish_rows(logits, [row for row in rows if is_valid[row.place]], token_ids, drawn)
    return drawn


@torch.inference_mode()
def _finish_rows(
    logits: torch.Tensor, rows: list[Row], token_ids: list[int], drawn: list[Drawn]
) -> None:
    """Those that take more than an argmax, into `drawn`."""
    outcomes: dict[int, Outcome] = {}
    size = dense.rows_per_pass(logits)
    adjusted = [row for row in rows if row.adjusts]
    for start in range(0, len(adjusted), size):
        part = adjusted[start : start + size]
        own = _copy_of(logits, part)
        for row, outcome in zip(part, _process(own, part), strict=True):
            outcomes[row.place] = outcome
            drawn[row.place] = Drawn(outcome.token_id, error=outcome.error)
    traced = [row for row in rows if row.draw.sampling.trace and not row.adjusts]
    for start in range(0, len(traced), size):
        part = traced[start : start + size]
        picked = [token_ids[row.place] for row in part]
        for row, outcome in zip(part, _traced(_copy_of(logits, part), part, picked), strict=True):
            outcomes[row.place] = outcome
    report(logits, rows, outcomes, drawn)


def warm_up_device(logits: torch.Tensor) -> None:
    """Launch each kernel in each variant for so many rows: no request pays for a compilation.

    Args:
        logits: [R, V].
    """
    rows = range(len(logits))
    kinds: tuple[dict[str, float], ...] = (
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9},
    )
    for kind in kinds:
        plain = Sampling(max_tokens=1, **kind)  # type: ignore[arg-type]
        draw_on_device(logits, [Draw(plain, 0) for _ in rows])
        changed = dataclasses.replace(
            plain, repetition_penalty=1.5, presence_penalty=0.5, logit_bias=((0, 1.0),)
        )
        bitmask = torch.full((-(-logits.shape[1] // 32),), -1, dtype=torch.int32)
        history = TokenHistory(changed, (0,), (0,))
        draw_on_device(logits, [Draw(changed, 0, history=history, bitmask=bitmask) for _ in rows])


def sampling_rows(
    draws: Sequence[Draw], num_tokens: int, device: torch.device, is_greedy: Sequence[bool]
) -> SamplingRows:
    """What the rows ask for, brought to the device in one copy.

    Args:
        is_greedy: rows that are to be drawn without noise, whatever they ask for.
    """
    samplings = [one.sampling for one in draws]
    num_draws = len(draws)
    words = np.zeros((7, _aligned(num_draws)), dtype=np.int32)
    keys = [
        noise.seed_key(one.seed, row.sample_index)
        for one, row in zip(samplings, draws, strict=True)
    ]
    words[:2].reshape(-1).view(np.int64)[:num_draws] = keys
    words[2, :num_draws] = [one.position for one in draws]
    words[3, :num_draws] = [min(one.top_k, num_tokens) for one in samplings]
    floats = words[4:, :num_draws].view(np.float32)
    floats[0] = [
        0.0 if greedy else one.temperature for one, greedy in zip(samplings, is_greedy, strict=True)
    ]
    floats[1] = [one.top_p for one in samplings]
    floats[2] = [one.min_p for one in samplings]
    brought = bring(words, device)
    as_floats = brought[4:].view(torch.float32)[:, :num_draws]
    return SamplingRows(
        temperature=as_floats[0],
        seed_keys=brought[:2].view(-1).view(torch.int64)[:num_draws],
        positions=brought[2, :num_draws],
        top_k=brought[3, :num_draws],
        top_p=as_floats[1],
        min_p=as_floats[2],
    )


def _needs(draws: Sequence[Draw], is_greedy: Sequence[bool]) -> Needs:
    needs: Needs = "greedy"
    for one, greedy in zip(draws, is_greedy, strict=True):
        if not greedy and one.sampling.temperature > 0.0:
            if one.sampling.top_k > 0 or one.sampling.top_p < 1.0:
                return "truncated"
            needs = "sampled"
    return needs


def _draw(
    logits: torch.Tensor, draws: Sequence[Draw], is_greedy: Sequence[bool]
) -> tuple[list[int], NDArray[np.float32]]:
    """Token ids and best values, on the host."""
    return _read(_queue(logits, draws, is_greedy), len(draws))


def _queue(
    logits: torch.Tensor,
    draws: Sequence[Draw],
    is_greedy: Sequence[bool],
    into: torch.Tensor | None = None,
) -> Fetched:
    """One copy there, the draws, one copy back; waits for none of them.

    Args:
        into: takes the token ids, too: [R] int32 on the device.
    """
    rows = sampling_rows(draws, logits.shape[1], logits.device, is_greedy)
    num_draws = len(draws)
    out = torch.empty(2, _aligned(num_draws), dtype=torch.int32, device=logits.device)
    own = out[:, :num_draws]
    draw_tokens(
        logits,
        rows,
        needs=_needs(draws, is_greedy),
        out=DrawnTokens(own[0], own[1].view(torch.float32)),
    )
    if into is not None:
        into.copy_(own[0])
    return Fetched(out)


def _read(queued: Fetched, num_draws: int) -> tuple[list[int], NDArray[np.float32]]:
    host = queued.wait()[:, :num_draws]
    return host[0].tolist(), host[1].view(np.float32)


def _aligned(num_words: int) -> int:
    """Each row of so many begins where 16 bytes do: Triton compiles a kernel anew for pointers that
    do not."""
    return -(-num_words // 4) * 4


def _copy_of(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """[R, V] float32 of their own."""
    places = torch.tensor([row.place for row in rows], device=logits.device)
    return logits.index_select(0, places).float()


def _process(logits: torch.Tensor, rows: Sequence[Row]) -> list[Outcome]:
    """Steps 1 to the draw, of rows that change logits.

    Args:
        logits: [R, V] float32, of the rows alone; changed.
    """
    penalise(logits, rows)
    mask(logits, rows)
    draws = [row.draw for row in rows]
    token_ids, values = _draw(logits, draws, is_greedy=[False] * len(rows))
    errors: dict[int, EngineError] = {}
    for at in np.flatnonzero(~np.isfinite(values)).tolist():
        errors[at] = unsound(rows[at], float(values[at]))
    outcomes = [Outcome(token_id) for token_id in token_ids]
    traced = [at for at, row in enumerate(rows) if row.draw.sampling.trace and at not in errors]
    if traced:
        own = logits.index_select(0, torch.tensor(traced, device=logits.device))
        found = _traced(own, [rows[at] for at in traced], [token_ids[at] for at in traced])
        for at, outcome in zip(traced, found, strict=True):
            outcomes[at] = outcome
    for at, error in errors.items():
        outcomes[at] = Outcome(-1, error)
    return outcomes


def _traced(logits: torch.Tensor, rows: Sequence[Row], token_ids: Sequence[int]) -> list[Outcome]:
    """With what a trace tells beside the token.

    Args:
        logits: [R, V] float32 after steps 1 to 9, of the rows alone.
    """
    draws = [row.draw for row in rows]
    asked = sampling_rows(draws, logits.shape[1], logits.device, [False] * len(rows))
    best = logits.amax(dim=1, keepdim=True)
    is_sampled = asked.temperature > 0.0
    temperature = torch.where(is_sampled, asked.temperature, 1.0)
    distances = (best - logits) / temperature[:, None]
    limits = torch.where(is_sampled, distance_limits(distances, asked), torch.inf)
    processed = torch.where(is_sampled[:, None], -distances, logits)
    logprobs, sizes = processed_logprobs(processed, -limits, token_ids)
    return [
        Outcome(token_id, None, logprob, size, _rng_key(draw))
        for token_id, logprob, size, draw in zip(token_ids, logprobs, sizes, draws, strict=True)
    ]


def _rng_key(draw: Draw) -> int | None:
    """None where no noise was drawn."""
    if draw.sampling.temperature == 0.0:
        return None
    return noise.row_key(draw.sampling.seed, draw.sample_index, draw.position)


def penalise(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    """penalties.penalise, by the kernels; in place.

    Args:
        logits: [R, V] float32, contiguous.
        rows: R of them.
    """
    samplings = [row.draw.sampling for row in rows]
    seen = [
        history_of(row).seen_ids if one.repetition_penalty != 1.0 else _NO_IDS
        for row, one in zip(rows, samplings, strict=True)
    ]
    counted = [one.presence_penalty != 0.0 or one.frequency_penalty != 0.0 for one in samplings]
    said = [
        history_of(row).output_ids if is_on else _NO_IDS
        for row, is_on in zip(rows, counted, strict=True)
    ]
    counts = [
        history_of(row).output_counts if is_on else _NO_VALUES
        for row, is_on in zip(rows, counted, strict=True)
    ]
    off, none = [1.0] * len(rows), [0.0] * len(rows)
    repetition = [one.repetition_penalty for one in samplings]
    presence = [one.presence_penalty for one in samplings]
    frequency = [one.frequency_penalty for one in samplings]
    for ids, values, rates in (
        (seen, [_NO_VALUES] * len(rows), (repetition, none, none)),
        (said, counts, (off, presence, frequency)),
    ):
        if any(map(len, ids)):
            asked = torch.tensor(rates, dtype=torch.float32).to(logits.device)
            logit_ops.penalise(logits, logit_ops.Penalties(*_padded(ids, values, logits), *asked))
    recipes = [row.recipe for row in rows]
    if any(len(recipe.bias_ids) for recipe in recipes):
        biases = _padded(
            [recipe.bias_ids for recipe in recipes],
            [recipe.bias_values for recipe in recipes],
            logits,
        )
        logit_ops.add_bias(logits, *biases)


_NO_IDS: NDArray[np.int64] = np.empty(0, dtype=np.int64)
_NO_VALUES: NDArray[np.float32] = np.empty(0, dtype=np.float32)


def _padded(
    ids: Sequence[NDArray[np.int64]], values: Sequence[NDArray[np.float32]], logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, N] int32 with -1 for none, and [R, N] float32 with 0, on the logits' device."""
    words = np.zeros((2, len(ids), max(map(len, ids))), dtype=np.int32)
    words[0] = -1
    floats = words[1].view(np.float32)
    for at, (own, numbers) in enumerate(zip(ids, values, strict=True)):
        words[0, at, : len(own)] = own
        floats[at, : len(numbers)] = numbers
    assert words[0].max(initial=0) < logits.shape[1], "an id without a logit: another row's"
    brought = torch.from_numpy(words).to(logits.device)
    return brought[0], brought[1].view(torch.float32)
