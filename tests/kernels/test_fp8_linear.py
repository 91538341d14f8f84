"""Linear layers in fp8: quantized as the reference does, to the byte, and multiplied exactly
enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from baton_kernels.fp8_linear import (
    Fp8Weight,
    fp8_linear,
    fp8_linear_reference,
    quantize_rows,
    quantize_weight,
)
from baton_kernels.linear import Extras, linear

from tests.kernels.conftest import DEVICE, PRODUCT_TOLERANCE, error_of

Randn = Callable[..., torch.Tensor]
TOLERANCE = PRODUCT_TOLERANCE[torch.bfloat16]


def reference_without_rounding(x: torch.Tensor, weight: Fp8Weight, extras: Extras) -> torch.Tensor:
    """The same quantized numbers, and float32 from there on."""
    wide = {
        name: value.float() if isinstance(value, torch.Tensor) else value
        for name, value in vars(extras).items()
    }
    return fp8_linear_reference(x.float(), weight, Extras(**wide))


def test_quantizes_each_output_channel_by_itself(randn: Randn) -> None:
    weight = randn(40, 96) * torch.logspace(-3, 3, 40, device=DEVICE)[:, None]
    weight[7] = 0
    quantized = quantize_weight(weight)
    back = quantized.values.float() * quantized.scales[:, None]
    assert ((back - weight).abs() <= weight.abs().amax(1)[:, None] / 16).all()
    assert quantized.values.float().abs().amax(1).tolist() == [448.0] * 7 + [0.0] + [448.0] * 32
    assert quantized.scales[7] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_rows", "depth"), [(1, 128), (5, 72), (3, 1000)])
def test_rows_have_the_bytes_of_the_reference(
    num_rows: int, depth: int, dtype: torch.dtype, randn: Randn
) -> None:
    x = (randn(num_rows, depth + 8) * 30).to(dtype)[:, :depth]
    x[0, 3:] = 0  # all but three
    values, scales = quantize_rows(x, backend="triton")
    wanted, wanted_scales = quantize_rows(x, backend="reference")
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(values.view(torch.int8), wanted.view(torch.int8))
    zeros, ones = quantize_rows(torch.zeros_like(x), backend="triton")
    assert not zeros.view(torch.int8).any() and (ones == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "width", "depth", "backend"),
    [
        (1, 40, 128, "triton"),
        (7, 33, 544, "triton"),
        (20, 65, 200, "triton"),
        (130, 64, 256, "auto"),  # where there is a GPU, the library
    ],
)
def test_equals_the_reference(
    num_rows: int,
    width: int,
    depth: int,
    backend: Any,
    dtype: torch.dtype,
    randn: Randn,
    poisoned: Callable[..., torch.Tensor],
) -> None:
    x = randn(num_rows, depth, dtype=dtype)
    plain = Extras(randn(width, dtype=dtype), randn(num_rows, width, dtype=dtype))
    gated = Extras(norm_weight=randn(depth, dtype=dtype), norm_eps=1e-5, is_gated=True)
    for extras in (plain, gated):
        height = width * (2 if extras.is_gated else 1)
        weight = quantize_weight(randn(height, depth, dtype=dtype) / depth**0.5)
        result = fp8_linear(
            x,
            weight,
            extras.bias,
            residual=extras.residual,
            norm_weight=extras.norm_weight,
            norm_eps=extras.norm_eps,
            activation="silu_mul" if extras.is_gated else None,
            out=poisoned(num_rows, width, dtype=dtype),
            backend=backend,
        )
        wanted = reference_without_rounding(x, weight, extras)
        assert error_of(result, wanted) < TOLERANCE


def test_is_near_the_product_it_stands_for(randn: Randn) -> None:
    """The price of fp8 for normal numbers: e4m3 has three bits of mantissa on both sides."""
    x, weight = randn(64, 512), randn(96, 512) / 512**0.5
    wanted = linear(x, weight, backend="reference")
    result = fp8_linear(x, quantize_weight(weight))
    assert error_of(result, wanted) < 0.05


@pytest.mark.parametrize("backend", ["reference"] if DEVICE == "cpu" else ["auto", "reference"])
def test_exact_rows_do_not_depend_on_others(backend: Any, randn: Randn) -> None:
    weight = quantize_weight(randn(96, 512))
    x = randn(150, 512, dtype=torch.bfloat16)
    whole = fp8_linear(x, weight, exact=True, backend=backend)
    for num_rows in (1, 5, 16, 17, 65):
        part = fp8_linear(x[7 : 7 + num_rows], weight, exact=True, backend=backend)
        assert torch.equal(part, whole[7 : 7 + num_rows])


def test_what_does_not_fit_is_named(randn: Randn) -> None:
    weight = quantize_weight(randn(8, 16))
    with pytest.raises(ValueError, match="scales"):
        Fp8Weight(weight.values, weight.scales[:4])
    with pytest.raises(ValueError, match="values"):
        Fp8Weight(randn(8, 16), weight.scales)
    with pytest.raises(ValueError, match="weight"):
        fp8_linear(randn(2, 15), weight)
    with pytest.raises(ValueError, match="activation"):
        fp8_linear(randn(2, 16), weight, activation="gelu")  # type: ignore[arg-type]
