"""SwiGLU of two numbers, as a Triton function: one way to compute it, so that exact results have
the same bits wherever they are computed. No state.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu_times(gate, up):  # type: ignore[no-untyped-def]
    """silu(gate) * up in float32."""
    power = tl.exp(-tl.abs(gate))  # at most 1: no overflow
    return tl.where(gate >= 0, gate, gate * power) / (1.0 + power) * up
