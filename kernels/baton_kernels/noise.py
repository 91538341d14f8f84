"""Gumbel noise and mass of a token, number by number: the arithmetic that `draw_tokens` is made of,
in plain torch.

The noise is engine/noise.py's, bit for bit (that is its one definition, where it is explained; this
package may not import it, so a test compares the two). The mass is what top-p sums: exp(-distance)
as a fixed-point integer, so that a sum does not depend on its order. Both are written out in IEEE
basic operations, each rounded on its own, so CPU, CUDA and the Triton kernels get the same bits.

Knows no rows and no parameters. Pure; any thread.
"""

from __future__ import annotations

import torch

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB

NOISE_MIN = -2.8116
NOISE_MAX = 16.636

LOG_COEFFICIENTS = (0.24279078841, 0.40000972152, 0.28498786688, 0.66666662693)
LN2_LOW = 9.0580006145e-06
LN2_HIGH = 6.9313812256e-01

MASS_BITS = 44
"""A token as probable as the best has mass 2^44: 2^18 of them still fit an int64."""
MASS_END = 32.0
"""Distance from the best, in nats, from which on a mass is 0: e^-32 is below 2^-44."""

LOG2_E = 1.44269504
EXP_COEFFICIENTS = (1.3888889e-3, 8.3333333e-3, 4.1666668e-2, 1.6666667e-1, 0.5)
"""Taylor's, from the sixth power down: on [-ln 2 / 2, ln 2 / 2] the rest is below 2^-23."""


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _shift_right(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    return (words >> num_bits) & ((1 << (64 - num_bits)) - 1)


def mix(words: torch.Tensor) -> torch.Tensor:
    """splitmix64's next(), elementwise, int64 with wraparound."""
    words = words + _signed(GOLDEN)
    words = (words ^ _shift_right(words, 30)) * _signed(MIX_1)
    words = (words ^ _shift_right(words, 27)) * _signed(MIX_2)
    return words ^ _shift_right(words, 31)


def row_keys(seed_keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[B] int64: what is left of (seed, sample index, position)."""
    return mix(seed_keys ^ positions.to(torch.int64))


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """float32 noise of each (key, token id): int64 tensors whose shapes broadcast."""
    words = mix(keys + token_ids * _signed(GOLDEN))
    odd = _shift_right(words, 41) * 2 + 1
    return -log(-log(odd.to(torch.float32) * 2.0**-24))


def log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of positive normal float32. Source: see engine/noise.py."""
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


def masses(distances: torch.Tensor) -> torch.Tensor:
    """int64: floor(exp(-distance) * 2^44), with float32's error of about 2^-23.

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
