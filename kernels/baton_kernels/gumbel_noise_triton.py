"""Device functions of `baton_kernels.gumbel_noise` for Triton kernels, with the same bits.

A kernel that calls them must be compiled with `EXACT`: a multiply and an add that are contracted
into one rounding change bits. Pure; device code.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from baton_kernels import gumbel_noise

EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""Launch options of every kernel that calls these functions."""

_GOLDEN = tl.constexpr(gumbel_noise.GOLDEN)
_MIX_1 = tl.constexpr(gumbel_noise.MIX_1)
_MIX_2 = tl.constexpr(gumbel_noise.MIX_2)
_LOG_A, _LOG_B, _LOG_C, _LOG_D = (tl.constexpr(each) for each in gumbel_noise.LOG_COEFFICIENTS)
_EXP_A, _EXP_B, _EXP_C, _EXP_D, _EXP_E = (
    tl.constexpr(each) for each in gumbel_noise.EXP_COEFFICIENTS
)
_LN2_LOW = tl.constexpr(gumbel_noise.LN2_LOW)
_LN2_HIGH = tl.constexpr(gumbel_noise.LN2_HIGH)
_LOG2_E = tl.constexpr(gumbel_noise.LOG2_E)
_MASS_END = tl.constexpr(gumbel_noise.MASS_END)
_MASS_BIAS = tl.constexpr(127 + gumbel_noise.MASS_BITS)


@triton.jit
def mix(words):
    """Compute splitmix64's next(), uint64 -> uint64."""
    words = words + _GOLDEN
    words = (words ^ (words >> 30)) * _MIX_1
    words = (words ^ (words >> 27)) * _MIX_2
    return words ^ (words >> 31)


@triton.jit
def row_key(seed_key, position):
    """Compute the uint64 key of a row from its int64 seed key and int32 position."""
    return mix((seed_key ^ position.to(tl.int64)).to(tl.uint64, bitcast=True))


@triton.jit
def ranks(key, token_ids):
    """Compute the rank of a token's noise among all its values in ascending order: uint64 key,
    int32 token ids -> int32 below 2^23."""
    words = mix(key + token_ids.to(tl.uint64) * _GOLDEN)
    return (words >> 41).to(tl.int32)


@triton.jit
def gumbel_of(rank):
    """Convert an int32 rank to its float32 Gumbel noise."""
    uniform = (rank * 2 + 1).to(tl.float32) * 0.000000059604644775390625
    return -log(-log(uniform))


@triton.jit
def may_reach(rank, lack):
    """Return whether the noise of a rank may be `lack` or more: cheap, never false when it is, and
    now and then true when it is not.

    With f = 1 + rank / 2^23, in [1, 2): 1 - u is 2 - f - 2^-24, and -log(-log(u)) is below
    -log(1 - u). The slack is for the roundings, of this and of `lack`.
    """
    f = (rank | 0x3F800000).to(tl.float32, bitcast=True)
    return f >= 1.9999997 - tl.exp2(lack * -1.4426950408889634) * 1.001


@triton.jit
def log(x):
    """Compute the natural logarithm of positive normal float32."""
    bits = x.to(tl.int32, bitcast=True) + (0x3F800000 - 0x3F3504F3)
    exponent = ((bits >> 23) - 127).to(tl.float32)
    f = ((bits & 0x007FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    s = tl.div_rn(f, f + 2.0)
    z = s * s
    w = z * z
    t1 = (w * _LOG_A + _LOG_B) * w
    t2 = (w * _LOG_C + _LOG_D) * z
    half_square = f * 0.5 * f
    inner = s * (half_square + (t2 + t1))
    inner = inner + exponent * _LN2_LOW
    inner = inner - half_square
    inner = inner + f
    return inner + exponent * _LN2_HIGH


@triton.jit
def masses(distances):
    """Compute fixed-point masses: float32 distances, at least 0 -> int64."""
    x = tl.minimum(distances, _MASS_END) * -1.0
    n = tl.floor(x * _LOG2_E + 0.5)
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    value = r * _EXP_A + _EXP_B
    value = value * r + _EXP_C
    value = value * r + _EXP_D
    value = value * r + _EXP_E
    value = value * r + 1.0
    value = value * r + 1.0
    scale = ((n.to(tl.int32) + _MASS_BIAS) << 23).to(tl.float32, bitcast=True)
    found = (value * scale).to(tl.int64)
    return tl.where(distances < _MASS_END, found, 0)
