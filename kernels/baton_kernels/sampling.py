"""draw_tokens: one token per row of logits: greedy, or by temperature, top-k, top-p and min-p with
noise that is a function of (seed, sample index, position, token id).

    distance d = (best - logit) / T                 float32; the best token's is 0
    top-k   d is at most the k-th smallest
    top-p   d is at most the least at which the mass of all nearer ones, and of those there, reaches
            p of what top-k left
    min-p   d is at most -log(min_p)
    token   the largest noise - d of what is left; the lowest id among equals

So ties at an edge stay in. Sums are of integers and maxima carry their ids: how the work is split
cannot change a token. No sort over the vocabulary on the device.

Knows no requests; what a row asks for is plain numbers. Invariant: a row's token depends on its own
logits and parameters only, to the last bit, and is always a valid id. Graph-safe on CUDA. No state;
any thread.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from baton_kernels import noise
from baton_kernels.dispatch import Backend, runs_triton

Needs = Literal["greedy", "sampled", "truncated"]
"""The most that any row of a call asks for: nothing, a temperature, or top-k or top-p as well."""

MAX_VOCAB_SIZE = (1 << 19) - 1
"""Masses of that many tokens fit an int64."""

LEAST_MIN_P = 1e-13
"""Below, no token is out that could win (noise spans less than 20): off."""


class SamplingRows(NamedTuple):
    """What each of B rows asks for: contiguous tensors [B], on the logits' device."""

    temperature: torch.Tensor
    """float32; 0: greedy."""

    seed_keys: torch.Tensor
    """int64: noise.seed_key of seed and sample index."""

    positions: torch.Tensor
    """int32: the place in the sequence that the drawn token takes. Negative: no row; its logits do
    not matter, its token is 0 and its best value 0."""

    top_k: torch.Tensor
    """int32; 0, or the vocabulary's size and more: off."""

    top_p: torch.Tensor
    """float32; 1: off."""

    min_p: torch.Tensor
    """float32; 0: off."""


class DrawnTokens(NamedTuple):
    """What was drawn in each of B rows."""

    token_ids: torch.Tensor
    """[B] int32, in [0, V) whatever the logits are: 0 where the best value is not finite."""

    best_values: torch.Tensor
    """[B] float32: the best raw logit. A token counts only where it is finite: NaN if the row has a
    NaN, else +inf, or -inf where nothing is allowed."""


def draw_tokens(
    logits: torch.Tensor,
    rows: SamplingRows,
    *,
    needs: Needs = "truncated",
    out: DrawnTokens | None = None,
    counters: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> DrawnTokens:
    """Draw one token per row.

    Args:
        logits: [B, V] bfloat16, float16 or float32; rows dense, at any distance. Read only.
        needs: what the host knows of the rows; less saves launches. A row that asks for more than
            this gets what this allows.
        out: written and returned.
        counters: [B or more] int32, all 0, on the logits' device, and left so: saves the launch
            that makes them. No two calls at a time may have the same.
    Raises: ValueError naming the argument that does not fit.
    Bytes moved: B * V * logits' element size, once where greedy, twice where sampled, three times
        where truncated (again from the L2 cache where they fit it). Source: the draw, Gumbel
        (1954); the split, ours.
    """
    out = _checked(logits, rows, needs, out, counters)
    if not logits.shape[0]:
        return out
    if runs_triton(backend, logits):
        from baton_kernels import sampling_triton as gpu

        gpu.draw_tokens(logits, rows, needs, out, counters)
        return out
    token_ids, best_values = draw_tokens_reference(logits, rows, needs=needs)
    out.token_ids.copy_(token_ids)
    out.best_values.copy_(best_values)
    return out


def draw_tokens_reference(
    logits: torch.Tensor, rows: SamplingRows, *, needs: Needs = "truncated"
) -> DrawnTokens:
    """`draw_tokens` in plain torch, with sorts; waits for nothing, but takes some arrays of B * V
    int64."""
    values = logits.float()
    num_tokens = values.shape[1]
    ids = torch.arange(num_tokens, device=values.device)
    best = values.amax(dim=1)
    token_ids = torch.where(values == best[:, None], ids, num_tokens).amin(dim=1)
    is_row = rows.positions >= 0
    if needs != "greedy":
        is_sampled = is_row & best.isfinite() & (rows.temperature > 0)
        temperature = torch.where(is_sampled, rows.temperature, 1.0)
        distances = (best[:, None] - values) / temperature[:, None]
        distances = torch.where(is_sampled[:, None], distances, 0.0)
        limits = distance_limits(distances, rows, truncates=needs == "truncated")
        keys = noise.keys_at(rows.seed_keys, rows.positions)
        scores = noise.gumbel(keys[:, None], ids[None]) - distances
        scores = torch.where(distances <= limits[:, None], scores, -torch.inf)
        is_winner = scores == scores.amax(dim=1, keepdim=True)
        winners = torch.where(is_winner, ids, num_tokens).amin(dim=1)
        token_ids = torch.where(is_sampled, winners, token_ids)
    token_ids = torch.where(is_row & best.isfinite(), token_ids, 0).to(torch.int32)
    # A zero has no sign here, as it has none in a comparison.
    return DrawnTokens(token_ids, torch.where(is_row & (best != 0), best, 0.0))


def distance_limits(
    distances: torch.Tensor, rows: SamplingRows, *, truncates: bool = True
) -> torch.Tensor:
    """[B] float32: the largest distance that stays in, as `draw_tokens` has it; by a sort.

    Args:
        distances: [B, V] float32, each row's least 0.
    """
    is_cut = rows.min_p >= LEAST_MIN_P
    limits = torch.where(is_cut, -noise.log(torch.where(is_cut, rows.min_p, 1.0)), torch.inf)
    if not truncates:
        return limits
    num_tokens = distances.shape[1]
    ascending = distances.sort(dim=1).values
    is_ranked = (rows.top_k > 0) & (rows.top_k < num_tokens)
    last = (rows.top_k.long() - 1).clamp(0, num_tokens - 1)
    farthest = torch.where(is_ranked, ascending.gather(1, last[:, None])[:, 0], torch.inf)
    mass = noise.masses(ascending)
    mass = torch.where(ascending <= farthest[:, None], mass, 0).cumsum(dim=1)
    total = mass[:, -1]
    wanted = torch.ceil(total.double() * rows.top_p.double()).long()
    wanted = torch.minimum(wanted, total).clamp(min=1)
    num_before = (mass < wanted[:, None]).sum(dim=1)
    edge = ascending.gather(1, num_before[:, None])[:, 0]
    edge = torch.where(rows.top_p < 1.0, edge, torch.inf)
    return torch.minimum(torch.minimum(limits, farthest), edge)


_DTYPES = {
    "temperature": torch.float32,
    "seed_keys": torch.int64,
    "positions": torch.int32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
}


def _checked(
    logits: torch.Tensor,
    rows: SamplingRows,
    needs: Needs,
    out: DrawnTokens | None,
    counters: torch.Tensor | None,
) -> DrawnTokens:
    """`out`, or a new one. Raises: ValueError."""
    if logits.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"logits: bfloat16, float16 or float32, not {logits.dtype}")
    if logits.dim() != 2 or (logits.shape[1] > 1 and logits.stride(1) != 1):
        raise ValueError(f"logits: [B, V], rows dense, not {logits.shape} {logits.stride()}")
    num_rows, num_tokens = logits.shape
    if not 0 < num_tokens <= MAX_VOCAB_SIZE:
        raise ValueError(f"logits: from 1 to {MAX_VOCAB_SIZE} tokens, not {num_tokens}")
    if needs not in ("greedy", "sampled", "truncated"):
        raise ValueError(f"needs {needs!r} is none of greedy, sampled, truncated")
    if out is None:
        out = DrawnTokens(
            torch.empty(num_rows, dtype=torch.int32, device=logits.device),
            torch.empty(num_rows, dtype=torch.float32, device=logits.device),
        )
    named = {name: (getattr(rows, name), dtype) for name, dtype in _DTYPES.items()}
    named["out.token_ids"] = (out.token_ids, torch.int32)
    named["out.best_values"] = (out.best_values, torch.float32)
    if counters is not None:
        named["counters"] = (counters[:num_rows], torch.int32)
    for name, (tensor, dtype) in named.items():
        if tensor.dtype != dtype or tensor.shape != (num_rows,) or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: contiguous {dtype} [{num_rows}], not {tensor.dtype} {tensor.shape}"
            )
        if tensor.device != logits.device:
            raise ValueError(f"{name}: on {tensor.device}, logits on {logits.device}")
    return out
