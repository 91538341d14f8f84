"""Packed linears give F.linear's numbers, epilogues included, for any number of rows."""

from __future__ import annotations

import pytest
import torch
from baton_kernels.packed_linear import unavailable_reason
from torch.nn.functional import linear, silu

from engine.layers.linear import PackedLinear
from engine.models.fusion import PlainLinear

DTYPES = [
    dtype for dtype in (torch.float32, torch.bfloat16) if unavailable_reason(dtype, "cpu") is None
]


@pytest.mark.skipif(not DTYPES, reason="oneDNN's packed linear is not available here")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 3, 8, 65])
@pytest.mark.parametrize("has_bias", [True, False])
def test_packed_equals_plain(dtype: torch.dtype, num_rows: int, has_bias: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(40, 24, generator=generator).to(dtype)
    bias = torch.randn(40, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(num_rows, 24, generator=generator).to(dtype)
    other = torch.randn(num_rows, 40, generator=generator).to(dtype)
    exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.3}[dtype]  # values reach 15
    for make in (PackedLinear, PlainLinear):
        layer = make(weight, bias)
        results = {
            "plain": (layer(x), exact),
            "times": (layer.forward_times(x, other), exact * other.double()),
            "plus": (layer.forward_plus(x, other), exact + other.double()),
            "swish": (make(weight, bias, "swish")(x), silu(exact)),
        }
        for name, (got, wanted) in results.items():
            assert got.shape == (num_rows, 40) and got.dtype is dtype
            close = torch.allclose(got.double(), wanted, atol=tolerance, rtol=2e-2)
            assert close, (make.__name__, name)


def test_a_row_does_not_depend_on_its_batch(seed: int) -> None:
    """Beyond rounding: what makes a batch of any shape safe."""
    if not DTYPES:
        pytest.skip("oneDNN's packed linear is not available here")
    generator = torch.Generator().manual_seed(seed)
    layer = PackedLinear(torch.randn(64, 48, generator=generator), None)
    x = torch.randn(33, 48, generator=generator)
    for count in (1, 2, 16):
        assert torch.allclose(layer(x[:count]), layer(x)[:count], atol=1e-4)


def test_elsewhere_the_reason_is_said() -> None:
    assert unavailable_reason(torch.float32, "cuda:0") == "on cuda:0"
