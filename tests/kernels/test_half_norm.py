"""A norm between two products of few rows, half done by each, against float64 and against the norm
done by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from baton_kernels.linear import Extras, between_products, linear, linear_reference

from engine.batch import TokenSpan
from engine.layers.linear import FusedLinear
from engine.lora.stacked_weights import AdapterRows, Deltas, LowRank
from tests.kernels.conftest import DEVICE, some

TOLERANCE = {torch.bfloat16: 1e-2 if DEVICE == "cuda" else 2e-2, torch.float32: 1e-5}


def error_of(result: torch.Tensor, truth: torch.Tensor) -> float:
    assert not result.isnan().any(), "something was not written"
    return float((result.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "hidden", "depth", "width"),
    some(
        [
            *((2, 136, 96, 72), (8, 200, 384, 64), (16, 64, 128, 33), (5, 320, 512, 40)),
            *((20, 72, 96, 33), (33, 72, 96, 33)),
        ]
    ),
)
def test_equals_float64(
    num_rows: int,
    hidden: int,
    depth: int,
    width: int,
    is_gated: bool,
    dtype: torch.dtype,
    randn: Callable[..., torch.Tensor],
    poisoned: Callable[..., torch.Tensor],
) -> None:
    inner, stream = randn(num_rows, depth, dtype=dtype), randn(num_rows, hidden, dtype=dtype)
    maker = randn(hidden, depth, dtype=dtype) / depth**0.5
    taker = randn(width * (2 if is_gated else 1), hidden, dtype=dtype) / hidden**0.5
    norm = randn(hidden, dtype=dtype)
    half = between_products(inner, maker, taker, norm, 1e-5, is_gated=is_gated, backend="triton")
    assert half is not None
    for room in (half.scaled, half.squares):
        room.fill_(torch.nan)
    x = linear(inner, maker, residual=stream, leaves=half, backend="triton")
    assert torch.equal(x, linear(inner, maker, residual=stream, backend="triton"))
    out = poisoned(num_rows, width, dtype=dtype)
    activation = "silu_mul" if is_gated else None
    linear(x, taker, half_norm=half, activation=activation, out=out, backend="triton")
    extras = Extras(norm_weight=norm.double(), norm_eps=1e-5, is_gated=is_gated)
    truth = linear_reference(x.double(), taker.double(), extras)
    assert error_of(out, truth) < TOLERANCE[dtype]
    again = linear(x, taker, half_norm=half, activation=activation, backend="triton")
    assert torch.equal(out, again)


def test_none_where_the_norm_is_better_done_by_itself(randn: Callable[..., torch.Tensor]) -> None:
    weight, norm = randn(64, 64), randn(64)
    for x, backend in ((randn(1, 64), "triton"), (randn(4, 64), "reference")):
        half = between_products(x, weight, weight, norm, 1e-5, is_gated=False, backend=backend)
        assert half is None


def test_what_does_not_fit_is_named(randn: Callable[..., torch.Tensor]) -> None:
    x, weight, norm = randn(4, 64), randn(64, 64), randn(64)
    half = between_products(x, weight, weight, norm, 1e-5, is_gated=False, backend="triton")
    for kwargs, name in (
        ({"half_norm": half, "norm_weight": norm}, "one norm"),
        ({"half_norm": half, "x": randn(3, 64)}, "half_norm"),
        ({"leaves": half, "x": randn(3, 64)}, "leaves"),
        ({"leaves": half, "backend": "reference"}, "Triton"),
        ({"leaves": half, "exact": True}, "exact"),
        ({"leaves": half, "x": x[:1]}, "leaves"),
    ):
        with pytest.raises(ValueError, match=name):
            linear(**({"x": x, "weight": weight, "backend": "triton"} | kwargs))  # type: ignore[arg-type]


def test_rows_with_an_adapter_are_normed_with_what_it_adds(
    randn: Callable[..., torch.Tensor], seed: int
) -> None:
    """And rows without one keep every bit."""
    hidden, depth = 72, 96
    maker, taker = FusedLinear(randn(hidden, depth)), FusedLinear(randn(40, hidden), is_gated=True)
    norm = randn(hidden)
    rows = AdapterRows(torch.device(DEVICE))
    for projection in (maker, taker):
        projection.backend = "triton"
        projection.deltas = Deltas(rows, projection.out_features, torch.float32)
        factors = randn(4, projection.in_features), randn(4, projection.out_features)
        projection.deltas.by_slot[1] = LowRank(*factors)
    inner, stream = randn(5, depth), randn(5, hidden)

    def run(adapters: Sequence[int], *, is_half: bool) -> torch.Tensor:
        rows.place([TokenSpan(0, 1, (index,), slot) for index, slot in enumerate(adapters)])
        half = maker.room(inner, taker, norm, 1e-5) if is_half else None
        assert (half is not None) == is_half
        x = maker.forward(inner, residual=stream.clone(), leaves=half)
        return taker.forward(x, norm_weight=norm, norm_eps=1e-5, half_norm=half)

    plain = run([0] * 5, is_half=True)
    for adapters in ([1, 0, 1, 0, 0], [1] * 5):
        found, expected = run(adapters, is_half=True), run(adapters, is_half=False)
        assert error_of(found, expected.double()) < 1e-5
        for index, slot in enumerate(adapters):
            assert torch.equal(found[index], plain[index]) == (not slot)
