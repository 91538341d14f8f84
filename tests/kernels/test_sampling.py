"""draw_tokens: exactly the tokens of the engine's sampler, and of its own reference, whatever the
rows ask for and however a row is split."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from baton_kernels import gumbel_noise
from baton_kernels.sampling import (
    DrawnTokens,
    Needs,
    SamplingRows,
    draw_tokens,
    draw_tokens_reference,
)

from engine.request import Sampling
from engine.sampling.metadata import SamplingRequest
from tests.conftest import LONG
from tests.kernels.conftest import DEVICE, poisoned, some
from tests.unit.engine.sampling.reference import sample

ON_GPU = DEVICE == "cuda"


def _sampling(rng: random.Random, num_tokens: int) -> Sampling:
    return Sampling(
        max_tokens=1,
        temperature=rng.choice([0.0, 0.3, 0.8, 1.0, 1.0, 2.5]),
        top_k=rng.choice([0, 0, 1, 3, 40, 700, num_tokens // 2, num_tokens, num_tokens + 9]),
        top_p=rng.choice([1.0, 1.0, 1e-6, 0.5, 0.9, 0.97, 0.9999]),
        min_p=rng.choice([0.0, 0.0, 0.03, 0.5, 1.0]),
        seed=rng.randrange(1 << 64),
        sample_index=rng.randrange(1 << 31),
    )


def _rows(samplings: Sequence[Sampling], positions: Sequence[int]) -> SamplingRows:
    def values(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(one, name) for one in samplings], dtype=dtype, device=DEVICE)

    keys = [gumbel_noise.seed_key(one.seed, one.sample_index) for one in samplings]
    return SamplingRows(
        temperature=values("temperature", torch.float32),
        seed_keys=torch.tensor(keys, dtype=torch.int64, device=DEVICE),
        positions=torch.tensor(positions, dtype=torch.int32, device=DEVICE),
        top_k=values("top_k", torch.int32),
        top_p=values("top_p", torch.float32),
        min_p=values("min_p", torch.float32),
    )


def _by_sampler(
    logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]
) -> list[int]:
    """On CPU, where it is defined; -1 for rows that it calls an error."""
    draws = [
        SamplingRequest(one, position, one.sample_index)
        for one, position in zip(samplings, positions, strict=True)
    ]
    return [drawn.token_id for drawn in sample(logits.cpu(), draws)]


def _by_kernels(
    logits: torch.Tensor,
    rows: SamplingRows,
    *,
    needs: Needs = "truncated",
    splits: int = 2,
    list_length: int = 1024,
    tile: int | None = None,
) -> DrawnTokens:
    """Poisoned first. Without a GPU with few, long tiles: the interpreter takes as long for one."""
    from baton_kernels import sampling_triton as gpu

    num_rows, num_tokens = logits.shape
    if tile is None:
        tile = 1024 if ON_GPU else 1 << max(0, -(-num_tokens // splits) - 1).bit_length()
    out = DrawnTokens(
        poisoned(num_rows, dtype=torch.int32), poisoned(num_rows, dtype=torch.float32)
    )
    gpu.draw_tokens(logits, rows, needs, out, splits=splits, list_length=list_length, tile=tile)
    return out


def _check(
    logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int], splits: int
) -> None:
    rows = _rows(samplings, positions)
    drawn = _by_kernels(logits, rows, splits=splits)
    expected = draw_tokens_reference(logits, rows)
    assert drawn.token_ids.tolist() == expected.token_ids.tolist()
    assert drawn.best_values.equal(expected.best_values)
    assert drawn.token_ids.tolist() == _by_sampler(logits, samplings, positions)
    assert drawn.best_values.equal(logits.float().amax(dim=1))


def test_masses_are_exponentials(generator: torch.Generator) -> None:
    distances = torch.rand(200_000, generator=generator, device=DEVICE) * 33
    exact = torch.exp(-distances.double()) * 2.0**gumbel_noise.MASS_BITS
    found = gumbel_noise.masses(distances)
    assert bool(((found - exact).abs() <= exact * 3e-7 + 1).all())
    edges = torch.tensor([0.0, 31.99, 32.0, float("inf")], device=DEVICE)
    assert gumbel_noise.masses(edges).tolist() == [1 << 44, 0, 0, 0]


@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16]))
def test_mixed_rows(dtype: torch.dtype, seed: int, randn: Callable[..., torch.Tensor]) -> None:
    """Every kind of row at once; rows of a wider matrix, so they lie apart."""
    rng = random.Random(seed)
    shapes = [(37, 4097, 1), (64, 32_001, 8), (80, 151_936, 16)] if ON_GPU else [(7, 1537, 2)]
    for num_rows, num_tokens, splits in shapes:
        samplings = [_sampling(rng, num_tokens) for _ in range(num_rows)]
        positions = [rng.randrange(1 << 20) for _ in range(num_rows)]
        spread = torch.tensor([rng.choice([0.05, 1.0, 4.0, 15.0]) for _ in range(num_rows)])
        logits = (randn(num_rows, num_tokens + 7) * spread.to(DEVICE)[:, None]).to(dtype)
        _check(logits[:, :num_tokens], samplings, positions, splits)


def test_a_large_vocabulary(seed: int, randn: Callable[..., torch.Tensor]) -> None:
    rng = random.Random(seed)
    kinds = [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 50, "top_p": 0.9}]
    kinds += [{"temperature": 1.0, "top_p": 0.95, "min_p": 0.01}] if ON_GPU else []
    samplings = [Sampling(max_tokens=1, seed=rng.randrange(1 << 64), **kind) for kind in kinds]
    logits = (randn(len(kinds), 151_936) * 2).to(torch.bfloat16)
    _check(logits, samplings, [rng.randrange(1 << 17) for _ in kinds], splits=8)


def test_equal_logits_and_edges_within_them(seed: int) -> None:
    """Ties at an edge stay in; the lowest id wins among equals; all of a row in one bin."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = 5000 if ON_GPU else 1100  # more than a list holds
    coarse = torch.randint(0, 4, (4, num_tokens), generator=generator) * 2.0
    flat = torch.zeros(2, num_tokens)
    signed = torch.where(torch.arange(num_tokens) % 2 == 0, -0.0, 0.0)[None]
    # A cluster far from the best: one bin, many values.
    far = torch.rand(1, num_tokens, generator=generator) * 1e-3 - 9.0
    far[0, 17] = 5.0
    logits = torch.cat([coarse, flat, signed, far]).to(DEVICE)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 7},
        {"temperature": 1.0, "top_p": 0.2},
        {"temperature": 5.0, "top_k": num_tokens * 3 // 5, "top_p": 0.7},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 0.0},
        {"temperature": 2.0, "top_k": num_tokens // 2, "top_p": 0.97},
    ]
    samplings = [Sampling(max_tokens=1, seed=seed, **kind) for kind in kinds]
    _check(logits, samplings, list(range(8)), splits=1)


@pytest.mark.parametrize("list_length", some([64, 1024]))
def test_a_list_that_overflows_is_read_from_the_row(
    list_length: int, seed: int, randn: Callable[..., torch.Tensor]
) -> None:
    num_tokens, top_k = (3000, 2000) if ON_GPU else (1300, 1200)
    logits = randn(2, num_tokens) * 1e-3
    logits[:, 5] = 3.0
    kinds = [{"top_k": top_k}, {"top_k": top_k, "top_p": 0.8}]
    samplings = [Sampling(max_tokens=1, temperature=1.0, seed=seed, **kind) for kind in kinds]
    rows = _rows(samplings, [1, 2])
    drawn = _by_kernels(logits, rows, splits=1, list_length=list_length)
    assert drawn.token_ids.tolist() == _by_sampler(logits, samplings, [1, 2])


@pytest.mark.skipif(ON_GPU, reason="a compiled kernel keeps the slack it was compiled with")
def test_where_the_mass_is_not_known_well_enough_the_row_is_read(
    seed: int, randn: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rare: the winner lies between what the least and the most mass make of top-p."""
    import triton.language as tl
    from baton_kernels import sampling_triton

    num_rows = 12 if LONG else 4  # two of three come to it
    logits = randn(num_rows, 1000 if LONG else 250) * 2
    kind = {"temperature": 1.0, "top_p": 0.3}
    samplings = [Sampling(max_tokens=1, seed=seed + row, **kind) for row in range(num_rows)]
    calls: list[int] = []
    read = sampling_triton._best_of_row

    def counted(*args: object) -> object:
        calls.append(1)
        return read(*args)

    monkeypatch.setattr(sampling_triton, "_best_of_row", counted)
    monkeypatch.setattr(sampling_triton, "_MASS_SLACK", tl.constexpr(0.95))
    positions = list(range(num_rows))
    drawn = _by_kernels(logits, _rows(samplings, positions), splits=1)
    assert drawn.token_ids.tolist() == _by_sampler(logits, samplings, positions)
    assert calls


def test_masked_rows_draw_from_what_is_left(seed: int, randn: Callable[..., torch.Tensor]) -> None:
    """As a grammar leaves them: whole tiles of -inf."""
    num_tokens, first = (5000, 4000) if ON_GPU else (500, 400)
    logits = randn(3, num_tokens) * 3
    logits[:, :first] = -torch.inf
    logits[1, first + 3 :] = -torch.inf
    kind = {"temperature": 1.0, "top_p": 0.9}
    samplings = [Sampling(max_tokens=1, seed=seed, **kind) for _ in range(3)]
    rows = _rows(samplings, [1, 2, 3])
    drawn = _by_kernels(logits, rows, splits=4)
    assert drawn.token_ids.equal(draw_tokens_reference(logits, rows).token_ids)
    assert drawn.token_ids.tolist() == _by_sampler(logits, samplings, [1, 2, 3])


def test_rows_that_are_no_numbers_say_so(seed: int, randn: Callable[..., torch.Tensor]) -> None:
    """And reach no neighbour; their token is an id all the same."""
    nan, infinity = float("nan"), float("inf")
    logits = randn(6, 1500 if ON_GPU else 250)
    logits[0, [70, 240]] = nan
    logits[1, [200, 71]] = infinity
    logits[2] = -infinity
    logits[3, ::2] = -infinity
    logits[4, 3:] = -infinity
    kind = {"temperature": 1.0, "top_k": 10, "top_p": 0.9}
    samplings = [Sampling(max_tokens=1, seed=seed, **kind) for _ in range(6)]
    positions = list(range(6))
    drawn = _by_kernels(logits, _rows(samplings, positions), splits=1)
    expected = draw_tokens_reference(logits, _rows(samplings, positions))
    assert drawn.token_ids.tolist() == expected.token_ids.tolist()
    assert drawn.token_ids.tolist()[:3] == [0, 0, 0]
    assert drawn.best_values.tolist()[1:3] == [infinity, -infinity]
    assert bool(drawn.best_values[0].isnan())
    assert drawn.token_ids.tolist()[3:] == _by_sampler(logits, samplings, positions)[3:]


def test_places_without_a_row_draw_nothing(seed: int, randn: Callable[..., torch.Tensor]) -> None:
    logits = randn(3, 1000)
    logits[1] = float("nan")
    kind = {"temperature": 1.0, "top_p": 0.9}
    rows = _rows([Sampling(max_tokens=1, seed=seed, **kind)] * 3, [4, -1, 4])
    drawn = _by_kernels(logits, rows)
    expected = draw_tokens_reference(logits, rows)
    assert drawn.token_ids.tolist() == expected.token_ids.tolist()
    assert drawn.token_ids[1] == 0 and drawn.best_values[1] == 0
    assert drawn.best_values.equal(expected.best_values)


@pytest.mark.parametrize("needs", ["greedy", "sampled"])
def test_less_is_done_where_less_is_needed(
    needs: Needs, seed: int, randn: Callable[..., torch.Tensor]
) -> None:
    logits = randn(4, 3000).to(torch.bfloat16)
    kind = {"temperature": 0.0 if needs == "greedy" else 1.3, "min_p": 0.01}
    samplings = [Sampling(max_tokens=1, seed=seed, **kind) for _ in range(4)]
    drawn = _by_kernels(logits, _rows(samplings, [1, 2, 3, 4]), needs=needs, splits=4)
    assert drawn.token_ids.tolist() == _by_sampler(logits, samplings, [1, 2, 3, 4])


def test_the_split_changes_nothing(seed: int, randn: Callable[..., torch.Tensor]) -> None:
    rng = random.Random(seed)
    num_rows, num_tokens = (32, 128_256) if ON_GPU else (2, 5000)
    samplings = [_sampling(rng, num_tokens) for _ in range(num_rows)]
    rows = _rows(samplings, list(range(num_rows)))
    logits = randn(num_rows, num_tokens).to(torch.bfloat16)
    splits = [1, 4, 64] if ON_GPU else [1, 2]
    drawn = [_by_kernels(logits, rows, splits=each) for each in splits]
    assert all(each.token_ids.equal(drawn[0].token_ids) for each in drawn)
    expected = draw_tokens_reference(logits, rows)
    assert drawn[0].token_ids.tolist() == expected.token_ids.tolist()


def test_the_door(seed: int, randn: Callable[..., torch.Tensor]) -> None:
    """Dispatch, `out`, and every argument that does not fit by its name."""
    logits = randn(2, 600)
    samplings = [Sampling(max_tokens=1, temperature=1.0, seed=seed)] * 2
    rows = _rows(samplings, [1, 2])
    out = DrawnTokens(poisoned(2, dtype=torch.int32), poisoned(2, dtype=torch.float32))
    assert draw_tokens(logits, rows, out=out, backend="triton") is out
    assert draw_tokens(logits, rows, backend="reference").token_ids.equal(out.token_ids)
    assert draw_tokens(logits, rows).token_ids.tolist() == _by_sampler(logits, samplings, [1, 2])
    assert (
        draw_tokens(logits[:0], SamplingRows(*(each[:0] for each in rows))).token_ids.numel() == 0
    )
    bad = [
        ("logits", (logits.double(), rows), {}),
        ("logits", (logits.t(), rows), {}),
        ("logits", (torch.zeros(2, 1 << 19, device=DEVICE), rows), {}),
        ("needs", (logits, rows), {"needs": "all"}),
        ("top_p", (logits, rows._replace(top_p=rows.top_p.half())), {}),
        ("positions", (logits, rows._replace(positions=rows.positions[:1])), {}),
        ("counters", (logits, rows), {"counters": rows.seed_keys}),
        ("out.token_ids", (logits, rows), {"out": out._replace(token_ids=out.best_values)}),
    ]
    for name, args, keywords in bad:
        with pytest.raises(ValueError, match=f"^{name}"):
            draw_tokens(*args, **keywords)  # type: ignore[arg-type]
