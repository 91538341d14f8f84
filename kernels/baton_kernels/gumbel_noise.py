"""Gumbel noise as a function of (seed, sample index, absolute position, token id): nothing to
store, nothing to lose. Also the probability mass of a token, which top-p sums.

The one definition of the noise: sampling, draft models and heads take it from here, and
noise_triton.py is the same arithmetic for kernels. The same bits on CPU and CUDA, in this and every
later version: a resumed request must sample what the first one would have sampled. So the
logarithm is written out in IEEE basic operations (+, -, *, / and integer bit casts on float32),
each one torch operation of its own, so that no compiler contracts a multiply and an add into one
rounding; library logarithms differ between devices. tests/unit/kernels/test_noise.py pins values.

    key     = mix(mix(mix(seed) ^ sample_index) ^ position)   64 bits, per row
    word    = mix(key + token_id * GOLDEN)                    mix: the finaliser of splitmix64
    uniform = (2 * (word >> 41) + 1) * 2^-24                  23 bits, made odd: never 0 or 1
    noise   = -log(-log(uniform))                             within [NOISE_MIN, NOISE_MAX]

A mass is exp(-distance) as a fixed-point integer, so that a sum does not depend on its order.

Knows no logits and no parameters. Pure; any thread.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NewType

import numpy as np
import torch
from numpy.typing import NDArray

RowKey = NewType("RowKey", int)
"""64-bit signed key derived from (seed, sample index, position)."""

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB

NOISE_MIN = -2.8116
"""Lower bound of the noise: below -log(-log(2^-24)), with room for the rounding of a sum."""
NOISE_MAX = 16.636
"""Upper bound of the noise: above -log(-log(1 - 2^-24)), with room for the rounding of a sum."""

NUM_RANKS = 1 << 23
"""Number of distinct values of the noise."""

LOG_COEFFICIENTS = (0.24279078841, 0.40000972152, 0.28498786688, 0.66666662693)
LN2_LOW = 9.0580006145e-06
LN2_HIGH = 6.9313812256e-01

MASS_BITS = 44
"""Binary digits of a mass after the point: the most probable token has mass 2^44, and 2^18 of them
still fit an int64."""
MASS_END = 32.0
"""Distance in nats from the best token from which on a mass is 0: e^-32 is below 2^-44."""

LOG2_E = 1.44269504
EXP_COEFFICIENTS = (1.3888889e-3, 8.3333333e-3, 4.1666668e-2, 1.6666667e-1, 0.5)
"""Taylor coefficients of exp, from the sixth power down: on [-ln 2 / 2, ln 2 / 2] the error is
below 2^-23."""

_MASK = (1 << 64) - 1


def _signed(word: int) -> int:
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word


# -- keys


def _mix(word: int) -> int:
    """Compute splitmix64's next() of a Python integer: https://prng.di.unimi.it/splitmix64.c"""
    word = (word + GOLDEN) & _MASK
    word = ((word ^ (word >> 30)) * MIX_1) & _MASK
    word = ((word ^ (word >> 27)) * MIX_2) & _MASK
    return word ^ (word >> 31)


def _mix_array(word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Compute `_mix` elementwise; numpy's unsigned 64-bit arrays wrap as its masks do."""
    word = word + np.uint64(GOLDEN)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(MIX_1)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(MIX_2)
    return word ^ (word >> np.uint64(31))


def mix(words: torch.Tensor) -> torch.Tensor:
    """Compute splitmix64's next() elementwise on int64, with wraparound."""
    words = words + _signed(GOLDEN)
    words = (words ^ _shift_right(words, 30)) * _signed(MIX_1)
    words = (words ^ _shift_right(words, 27)) * _signed(MIX_2)
    return words ^ _shift_right(words, 31)


def _shift_right(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Shift int64 right logically; torch's own shift repeats the sign bit."""
    return (words >> num_bits) & ((1 << (64 - num_bits)) - 1)


def _seed_word(seed: int, sample_index: int) -> int:
    return _mix(_mix(seed & _MASK) ^ (sample_index & _MASK))


def seed_key(seed: int, sample_index: int) -> int:
    """Compute the part of a row's key that is the same for all positions, a signed 64-bit integer:
    `row_key` is mix(seed_key ^ position). A device gets it once per sequence."""
    return _signed(_seed_word(seed, sample_index))


def row_key(seed: int, sample_index: int, position: int) -> RowKey:
    """Compute the key of one row's noise. `position` is the index that the sampled token will have
    in the sequence, the prompt's first token being 0. Only the low 64 bits of each argument
    count."""
    return RowKey(_signed(_mix(_seed_word(seed, sample_index) ^ (position & _MASK))))


def seed_keys(seeds: Sequence[int], sample_indices: Sequence[int]) -> NDArray[np.int64]:
    """Compute `seed_key` of each (seed, sample index), [B] int64.

    Args:
        seeds, sample_indices: within [0, 2^64).
    """
    word = _mix_array(np.array(seeds, dtype=np.uint64))
    return _mix_array(word ^ np.array(sample_indices, dtype=np.uint64)).view(np.int64)


def row_keys(
    seeds: Sequence[int], sample_indices: Sequence[int], positions: Sequence[int]
) -> NDArray[np.int64]:
    """Compute `row_key` of each (seed, sample index, position), [B] int64.

    Args:
        seeds, sample_indices, positions: within [0, 2^64).
    """
    word = seed_keys(seeds, sample_indices).view(np.uint64)
    return _mix_array(word ^ np.array(positions, dtype=np.uint64)).view(np.int64)


def keys_at(seed_keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Compute `row_key` of each row, [B] int64, from its seed key and the position of its token."""
    return mix(seed_keys ^ positions.to(torch.int64))


# -- noise


def words(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Compute the 64 random bits of each (key, token id), elementwise on int64 with wraparound."""
    return mix(keys + token_ids * _signed(GOLDEN))


def ranks(random_words: torch.Tensor) -> torch.Tensor:
    """Compute the rank of each word's noise among all its values in ascending order, int64 in [0,
    NUM_RANKS)."""
    return _shift_right(random_words, 41)


def uniform(random_words: torch.Tensor) -> torch.Tensor:
    """Convert random words to float32 in (0, 1): the top 23 bits as an odd multiple of 2^-24, exact
    in float32."""
    odd = ranks(random_words) * 2 + 1
    return odd.to(torch.float32) * 2.0**-24


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Compute standard Gumbel noise, float32, of each (key, token id).

    Args:
        keys, token_ids: int64, one device, shapes that broadcast.
    """
    return -log(-log(uniform(words(keys, token_ids))))


def log(x: torch.Tensor) -> torch.Tensor:
    """Compute the natural logarithm of positive normal float32, at most 1 ulp off, in basic
    operations only.

    Source: fdlibm's e_logf.c as in musl (Sun Microsystems, freely granted): x = 2^k * m with m in
    [sqrt(1/2), sqrt(2)), log(1 + f) = f - f^2/2 + s * (f^2/2 + R(s)), s = f / (2 + f).
    """
    a, b, c, d = LOG_COEFFICIENTS
    bits = x.view(torch.int32) + (0x3F800000 - 0x3F3504F3)
    exponent = ((bits >> 23) - 127).to(torch.float32)
    f = ((bits & 0x007FFFFF) + 0x3F3504F3).view(torch.float32) - 1.0
    s = f / (f + 2.0)
    z = s * s
    w = z * z
    t1 = (w * a + b) * w
    t2 = (w * c + d) * z
    half_square = f * 0.5 * f
    inner = s * (half_square + (t2 + t1))
    inner = inner + exponent * LN2_LOW
    inner = inner - half_square
    inner = inner + f
    return inner + exponent * LN2_HIGH


def rank_grid(keys: NDArray[np.int64], num_tokens: int) -> NDArray[np.uint64]:
    """Compute the rank of every token's noise under each key: [K] -> [K, num_tokens]. Equal to
    `ranks(words())`, in half the time on CPU where most tokens of a row are needed."""
    word = keys.view(np.uint64)[:, None] + _counters(num_tokens)
    shifted = word >> np.uint64(30)
    for factor, num_bits in ((MIX_1, 27), (MIX_2, 31)):
        word ^= shifted
        word *= np.uint64(factor)
        np.right_shift(word, np.uint64(num_bits), out=shifted)
    word ^= shifted
    word >>= np.uint64(41)
    return word


@functools.lru_cache(maxsize=4)
def _counters(num_tokens: int) -> NDArray[np.uint64]:
    """Return (token id + 1) * GOLDEN of each token, which is added to a key."""
    counters = np.arange(1, num_tokens + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    counters.flags.writeable = False
    return counters


def least_rank(value: float) -> int:
    """Return the least rank whose noise is at least `value`; NUM_RANKS if there is none. Exact, by
    bisection: the noise never falls from one rank to the next."""
    low, high = 0, NUM_RANKS
    while low < high:
        middle = (low + high) // 2
        if float(-log(-log(uniform(torch.tensor([_signed(middle << 41)]))))) >= value:
            high = middle
        else:
            low = middle + 1
    return low


# -- masses


def masses(distances: torch.Tensor) -> torch.Tensor:
    """Compute fixed-point probability masses, int64: floor(exp(-distance) * 2^44), with float32's
    relative error of about 2^-23.

    Args:
        distances: float32, at least 0; infinity has mass 0.
    Source: exp(-d) = 2^n * exp(r), n = floor(-d / ln 2 + 1/2), r = -d - n ln 2.
    """
    x = distances.clamp(max=MASS_END) * -1.0
    n = torch.floor(x * LOG2_E + 0.5)
    r = x - n * LN2_HIGH
    r = r - n * LN2_LOW
    value = r * EXP_COEFFICIENTS[0] + EXP_COEFFICIENTS[1]
    for coefficient in EXP_COEFFICIENTS[2:]:
        value = value * r + coefficient
    value = value * r + 1.0
    value = value * r + 1.0
    scale = ((n.to(torch.int32) + (127 + MASS_BITS)) << 23).view(torch.float32)
    found = (value * scale).to(torch.int64)
    return torch.where(distances < MASS_END, found, 0)
