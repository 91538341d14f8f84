"""The noise is a wire contract: a resumed request draws what the first worker would have drawn."""

from __future__ import annotations

import math
import random

import pytest
import torch
from baton_kernels import gumbel_noise

# (seed, sample index, position, token id) -> float32 bits. Never change these: running requests and
# recorded traces depend on them.
GOLDEN = {
    (0, 0, 0, 0): 0xBF36E298,  # -0.714395
    (0, 0, 0, 1): 0xBF8C822F,  # -1.097723
    (1, 0, 0, 0): 0x40066D41,  # 2.100418
    (0, 1, 0, 0): 0x3FCE7BD0,  # 1.613153
    (0, 0, 1, 0): 0x3FE9C860,  # 1.826427
    (12345, 2, 601, 2047): 0x3F20A5AF,  # 0.6275281
    (2**64 - 1, 0, 4095, 151935): 0x3F998951,  # 1.199503
    (0x9E3779B97F4A7C15, 1, 131071, 32000): 0x3F97B790,  # 1.185289
}


def _gumbel(seed: int, sample_index: int, position: int, token_ids: list[int]) -> torch.Tensor:
    keys = torch.tensor([gumbel_noise.row_key(seed, sample_index, position)])
    return gumbel_noise.gumbel(keys, torch.tensor(token_ids))


@pytest.mark.parametrize("place", sorted(GOLDEN))
def test_golden_values_never_change(place: tuple[int, int, int, int]) -> None:
    *draw, token_id = place
    value = _gumbel(*draw, [token_id])
    assert value.view(torch.int32).item() & 0xFFFFFFFF == GOLDEN[place]
    word = gumbel_noise.words(torch.tensor([gumbel_noise.row_key(*draw)]), torch.tensor([token_id]))
    exact = -math.log(-math.log(gumbel_noise.uniform(word).item()))
    assert math.isclose(value.item(), exact, rel_tol=1e-5)


def test_words_are_splitmix64_in_wrapping_64_bit_arithmetic(seed: int) -> None:
    """The tensor code must do what Python's exact integers do."""
    mask = (1 << 64) - 1
    key = gumbel_noise.row_key(seed, 3, 1000)
    token_ids = [0, 1, 2, 151_935, 2**31]
    words = gumbel_noise.words(torch.tensor([key]), torch.tensor(token_ids)).tolist()
    for token_id, word in zip(token_ids, words, strict=True):
        z = (key + token_id * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        assert word & mask == z ^ (z >> 31)


def test_a_seed_key_is_what_a_row_key_is_made_of(seed: int) -> None:
    """A device makes the row's key of each token from it."""
    rng = random.Random(seed)
    for _ in range(100):
        draw = rng.randrange(2**64), rng.randrange(2**31), rng.randrange(2**31)
        word = gumbel_noise.seed_key(*draw[:2]) ^ draw[2]
        assert -(2**63) <= word < 2**63
        mixed = gumbel_noise.words(torch.tensor([word]), torch.tensor([0])).item()
        assert mixed == gumbel_noise.row_key(*draw)


def test_row_keys_are_row_key_of_each_row(seed: int) -> None:
    """numpy's wrapping arrays must do what Python's exact integers do."""
    rng = random.Random(seed)
    seeds = [0, 1, 2**64 - 1, 2**63, *(rng.randrange(2**64) for _ in range(500))]
    indices = [0, 2**31 - 1, *(rng.randrange(2**31) for _ in range(502))]
    positions = [0, 131_071, *(rng.randrange(2**31) for _ in range(502))]
    expected = [gumbel_noise.row_key(*one) for one in zip(seeds, indices, positions, strict=True)]
    assert gumbel_noise.row_keys(seeds, indices, positions).tolist() == expected
    seed_keys = gumbel_noise.seed_keys(seeds, indices)
    assert seed_keys.tolist() == [
        gumbel_noise.seed_key(*one) for one in zip(seeds, indices, strict=True)
    ]
    int32 = torch.tensor(positions, dtype=torch.int32)
    assert gumbel_noise.keys_at(torch.from_numpy(seed_keys), int32).tolist() == expected


def test_the_grid_of_ranks_is_the_rank_of_each_word(seed: int) -> None:
    keys = gumbel_noise.row_keys([seed, seed + 1, 2**64 - 1], [0, 1, 2], [9, 8, 7])
    for num_tokens in (1, 33, 5000):
        words = gumbel_noise.words(torch.from_numpy(keys)[:, None], torch.arange(num_tokens)[None])
        expected = gumbel_noise.ranks(words)
        assert gumbel_noise.rank_grid(keys, num_tokens).tolist() == expected.tolist()


def test_the_least_rank_is_where_the_noise_reaches_a_value(seed: int) -> None:
    rng = random.Random(seed)
    for value in [-2.0, 0.0, 5.0, 16.0, *(rng.uniform(-2.8, 16.6) for _ in range(20))]:
        rank = gumbel_noise.least_rank(value)
        words = torch.tensor([rank - 1, rank]) << 41
        below, at = (-gumbel_noise.log(-gumbel_noise.log(gumbel_noise.uniform(words)))).tolist()
        assert below < value <= at
        assert gumbel_noise.ranks(words).tolist() == [rank - 1, rank]
    assert gumbel_noise.least_rank(gumbel_noise.NOISE_MIN) == 0
    assert gumbel_noise.least_rank(gumbel_noise.NOISE_MAX) == gumbel_noise.NUM_RANKS


def test_uniform_takes_every_kind_of_word_into_the_open_interval() -> None:
    words = torch.tensor([0, -1, 1 << 41, -(1 << 63), (1 << 63) - 1])
    expected = [2.0**-24, 1 - 2.0**-24, 3 * 2.0**-24, 0.5 + 2.0**-24, 0.5 - 2.0**-24]
    assert gumbel_noise.uniform(words).tolist() == expected


def test_log_is_within_one_ulp_of_the_true_logarithm(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-125, 127, (20_000,), generator=generator).float()
    x = torch.cat(
        [
            (torch.rand(20_000, generator=generator) + 1.0) * torch.exp2(exponents),
            torch.linspace(0.4, 2.5, 20_001),
            1.0 - torch.arange(1, 1000) * 2.0**-24,
            1.0 + torch.arange(0, 1000) * 2.0**-23,
        ]
    )
    exact = [math.log(value) for value in x.tolist()]
    for value, wanted, got in zip(x.tolist(), exact, gumbel_noise.log(x).tolist(), strict=True):
        ulp = 2.0 ** (math.floor(math.log2(abs(wanted))) - 23) if wanted else 2.0**-149
        assert abs(got - wanted) <= ulp, value


def test_noise_stays_within_its_bounds_and_is_monotonic() -> None:
    """All 2^23 values there are: the pruning of a draw depends on the bounds."""
    uniform = torch.arange(1, 2**24, 2, dtype=torch.float32) * 2.0**-24
    values = -gumbel_noise.log(-gumbel_noise.log(uniform))
    assert gumbel_noise.NOISE_MIN < values[0] and values[-1] < gumbel_noise.NOISE_MAX
    assert bool((values[1:] >= values[:-1]).all())


def test_uniform_is_uniform_in_every_argument(seed: int) -> None:
    """Chi-square over 256 cells with 2^16 draws along each of the four arguments.

    255 degrees of freedom; above 377 with probability 1e-6, so four tests raise a false alarm in
    one of 250,000 runs.
    """
    count = 1 << 16
    one = torch.tensor([gumbel_noise.row_key(seed, 0, 0)])
    along = {
        "token id": gumbel_noise.words(one, torch.arange(count)),
        "position": _words_of([gumbel_noise.row_key(seed, 0, i) for i in range(count)]),
        "sample index": _words_of([gumbel_noise.row_key(seed, i, 7) for i in range(count)]),
        "seed": _words_of([gumbel_noise.row_key(seed + i, 0, 7) for i in range(count)]),
    }
    for name, words in along.items():
        cells = (gumbel_noise.uniform(words) * 256).long()
        observed = torch.bincount(cells, minlength=256).double()
        expected = count / 256
        assert float(((observed - expected) ** 2 / expected).sum()) < 377, name


def _words_of(keys: list[gumbel_noise.RowKey]) -> torch.Tensor:
    return gumbel_noise.words(torch.tensor(keys), torch.tensor(5))


def test_neighbouring_draws_are_not_correlated(seed: int) -> None:
    """Correlation of 2^16 pairs, at most 6 standard errors: false alarm 2e-9 each."""
    count = 1 << 16
    keys = torch.tensor([gumbel_noise.row_key(seed, 0, position) for position in (10, 11)])
    uniform = gumbel_noise.uniform(gumbel_noise.words(keys[:, None], torch.arange(count)[None]))
    for a, b in ((uniform[0], uniform[1]), (uniform[0][1:], uniform[0][:-1])):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 6 / math.sqrt(count)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_same_bits() -> None:
    keys = torch.tensor([gumbel_noise.row_key(seed, 0, 100 + seed) for seed in range(8)])[:, None]
    token_ids = torch.arange(151_936)[None]
    on_cpu = gumbel_noise.gumbel(keys, token_ids)
    on_cuda = gumbel_noise.gumbel(keys.cuda(), token_ids.cuda()).cpu()
    assert torch.equal(on_cpu.view(torch.int32), on_cuda.view(torch.int32))
    uniform = torch.arange(1, 2**24, 2, dtype=torch.float32) * 2.0**-24
    assert torch.equal(gumbel_noise.log(uniform), gumbel_noise.log(uniform.cuda()).cpu())
