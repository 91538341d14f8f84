"""Linear layers with what surrounds them, against float64: odd shapes, poisoned outputs, strided
rows; and a norm between two products of few rows, half done by each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from baton_kernels.layer_ops import silu_mul
from baton_kernels.linear import Extras, between_products, linear, linear_reference

from engine.batch import TokenSpan
from engine.layers.linear import FusedLinear
from engine.lora.stacked_weights import AdapterRows, Deltas, LowRank
from tests.kernels.conftest import DEVICE, error_of, some
from tests.kernels.conftest import PRODUCT_TOLERANCE as TOLERANCE


def truth_of(x: torch.Tensor, weight: torch.Tensor, extras: dict[str, Any]) -> torch.Tensor:
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in extras.items()}
    return linear_reference(x.double(), weight.double(), Extras(**wide))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "width", "depth", "backend"),
    some(
        [
            (1, 40, 128, "triton"),
            (1, 24, 520, "triton"),
            (3, 72, 1024, "triton"),
            (8, 33, 70, "triton"),
            (17, 65, 200, "triton"),
            (50, 130, 256, "triton"),
            (130, 72, 256, "auto"),  # where there is a GPU, the library
        ]
    ),
)
def test_equals_float64(
    num_rows: int,
    width: int,
    depth: int,
    backend: Any,
    dtype: torch.dtype,
    randn: Callable[..., torch.Tensor],
    poisoned: Callable[..., torch.Tensor],
) -> None:
    x = randn(num_rows, depth + 8, dtype=dtype)[:, :depth]  # rows have a stride of their own
    plain = {
        "bias": randn(width, dtype=dtype),
        "residual": randn(num_rows, width + 4, dtype=dtype)[:, :width],
    }
    gated = {"norm_weight": randn(depth, dtype=dtype), "norm_eps": 1e-5, "is_gated": True}
    normed = plain | {"norm_weight": randn(depth, dtype=dtype)}
    for extras in (plain, gated, normed, normed | gated | {"bias": None}, {}):
        is_gated = bool(extras.get("is_gated"))
        weight = randn(width * (2 if is_gated else 1), depth, dtype=dtype) / depth**0.5
        out = poisoned(num_rows, width + 3, dtype=dtype)
        result = linear(
            x,
            weight,
            extras.get("bias"),
            residual=extras.get("residual"),
            norm_weight=extras.get("norm_weight"),
            norm_eps=extras.get("norm_eps", 1e-6),
            activation="silu_mul" if is_gated else None,
            out=out[:, :width],
            backend=backend,
        )
        assert error_of(result, truth_of(x, weight, extras)) < TOLERANCE[dtype], extras.keys()
        assert out[:, width:].isnan().all(), "written beside the output"


@pytest.mark.skipif(DEVICE == "cpu", reason="NO GPU TEST: weights as large models have them")
@pytest.mark.parametrize("num_rows", [17, 24, 32, 33, 64])
@pytest.mark.parametrize(
    ("width", "depth", "is_gated"),
    [(6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (4096, 14336, False),
     (128256, 4096, False)],
)  # fmt: skip
def test_large_weights_equal_the_librarys_product(
    num_rows: int, width: int, depth: int, *, is_gated: bool, poisoned: Callable[..., torch.Tensor]
) -> None:
    """In float32: products of large models in the tiles that the tables choose for them."""
    torch.manual_seed(num_rows + width)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE}
    x = torch.randn(num_rows, depth, **options)
    weight = torch.randn(width * (1 + is_gated), depth, **options) / depth**0.5
    residual = torch.randn(num_rows, width, **options)
    out = poisoned(num_rows, width, dtype=torch.bfloat16)
    linear(x, weight, residual=residual, activation="silu_mul" if is_gated else None, out=out)
    truth = x.float() @ weight.float().t()
    truth = (silu_mul(truth) if is_gated else truth) + residual.float()
    assert error_of(out, truth.double()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(
    "cut",
    [
        {"split_k": 2},
        {"split_k": 3},
        {"split_k": 8},
        {"split_k": 2, "splits_warps": True},
        {"split_k": 2, "num_stages": 1},
    ],
)
def test_split_sums_are_whole_and_leave_nothing_behind(
    cut: dict[str, Any], is_gated: bool, randn: Callable[..., torch.Tensor]
) -> None:
    """Whoever comes last adds up the partial sums: twice the same bits with the same counters."""
    from baton_kernels import linear_triton
    from baton_kernels.linear_tiles import Tile

    x = randn(5, 300)
    weight = randn(48 if is_gated else 24, 300)
    tile = Tile(**({"block_m": 8, "block_n": 16, "block_k": 64, "num_stages": 2} | cut))
    results = []
    for _ in range(2):
        linear_triton._counters(x.device)._next = 0
        results.append(
            linear_triton.launch(
                x,
                weight,
                torch.full_like(x[:, :24], torch.nan),
                tile,
                is_gated=is_gated,
            )
        )
    assert error_of(results[0], truth_of(x, weight, {"is_gated": is_gated})) < 1e-5
    assert torch.equal(*results)
    assert not linear_triton._counters(x.device)._ring.any()


def test_counters_go_round() -> None:
    from baton_kernels import linear_triton

    ring = linear_triton._Counters(torch.device(DEVICE))
    size = len(ring._ring)
    first = ring.take(size - 7)
    assert ring.take(3).data_ptr() == first.data_ptr() + 4 * (size - 4), "aligned to 16 bytes"
    assert ring.take(1).data_ptr() == first.data_ptr(), "round again"
    with pytest.raises(ValueError, match="tiles"):
        ring.take(size + 1)


@pytest.mark.parametrize("backend", ["reference"] if DEVICE == "cpu" else ["auto", "reference"])
def test_exact_rows_do_not_depend_on_others(
    backend: Any, randn: Callable[..., torch.Tensor]
) -> None:
    dtype = torch.bfloat16
    shapes = ((200, 384), (96, 1024), (200, 64), (64, 80), (64, 96), (64, 128), (64, 256))
    for (width, depth), is_gated in itertools.product(shapes, (False, True)):
        weight = randn(width * (2 if is_gated else 1), depth, dtype=dtype) / depth**0.5
        x = randn(1100 if DEVICE == "cuda" else 70, depth, dtype=dtype)
        kwargs: dict[str, Any] = {
            "norm_weight": randn(depth, dtype=dtype),
            "activation": "silu_mul" if is_gated else None,
            "backend": backend,
            "exact": True,
        }
        bias = randn(weight.shape[0], dtype=dtype)
        residual = randn(x.shape[0], width, dtype=dtype)
        for extras in ({}, {"bias": bias}, {"residual": residual}):
            whole = linear(x, weight, **kwargs, **extras)
            for num_rows in (1, 5, 16, 17, 64, 65, 300):
                rows = slice(7, 7 + num_rows)
                own = extras | ({"residual": residual[rows]} if "residual" in extras else {})
                part = linear(x[rows], weight, **kwargs, **own)
                assert torch.equal(part, whole[rows]), (width, depth, is_gated, num_rows, *extras)


def test_exact_swiglu_in_one_launch_has_the_bits_of_two(
    randn: Callable[..., torch.Tensor],
) -> None:
    for num_rows, width, depth in ((1, 40, 128), (5, 72, 512), (33, 24, 256)):
        x = randn(num_rows, depth, dtype=torch.bfloat16)
        weight = randn(2 * width, depth, dtype=torch.bfloat16) / depth**0.5
        bias, norm = randn(2 * width, dtype=torch.bfloat16), randn(depth, dtype=torch.bfloat16)
        kwargs: dict[str, Any] = {"norm_weight": norm, "exact": True, "backend": "triton"}
        apart = silu_mul(linear(x, weight, bias, **kwargs), backend="triton")
        assert torch.equal(linear(x, weight, bias, activation="silu_mul", **kwargs), apart)


@pytest.mark.skipif(DEVICE != "cuda", reason="a kernel in Gluon, for Hopper: no interpreter")
@pytest.mark.parametrize(
    ("num_rows", "width", "depth"), [(1, 128, 64), (300, 384, 1024), (1025, 256, 192)]
)
def test_swiglu_of_many_rows_in_one_launch(
    num_rows: int,
    width: int,
    depth: int,
    randn: Callable[..., torch.Tensor],
    poisoned: Callable[..., torch.Tensor],
) -> None:
    from baton_kernels import hopper_support
    from baton_kernels.gated_linear_hopper import silu_gated

    x = randn(num_rows, depth + 64, dtype=torch.bfloat16)[:, :depth]
    weight = randn(2 * width, depth, dtype=torch.bfloat16) / depth**0.5
    out = poisoned(num_rows, width + 8, dtype=torch.bfloat16)
    if not hopper_support.can_gate(x, weight, out[:, :width]):
        pytest.skip("not this GPU's, or not this Triton's")
    silu_gated(x, weight, out[:, :width])
    truth = truth_of(x, weight, {"is_gated": True})
    assert error_of(out[:, :width], truth) < TOLERANCE[torch.bfloat16]
    assert out[:, width:].isnan().all(), "written beside the output"
    again = torch.empty_like(out[:, :width].contiguous())
    assert torch.equal(silu_gated(x, weight, again), out[:, :width])
    if num_rows >= 1024:
        assert torch.equal(linear(x, weight, activation="silu_mul"), again), "not the door's"


def test_residual_may_be_the_output(randn: Callable[..., torch.Tensor]) -> None:
    x, weight, stream = randn(3, 64), randn(32, 64), randn(3, 32)
    truth = truth_of(x, weight, {"residual": stream.clone()})
    assert linear(x, weight, residual=stream, out=stream, backend="triton") is stream
    assert error_of(stream, truth) < 1e-5


def test_no_rows() -> None:
    empty = torch.empty(0, 64, device=DEVICE)
    assert linear(empty, torch.ones(8, 64, device=DEVICE)).shape == (0, 8)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("x", {"x": torch.ones(2, 8, dtype=torch.float16)}),
        ("x", {"x": torch.ones(8, 2).t()}),
        ("weight", {"weight": torch.ones(4, 9)}),
        ("weight", {"weight": torch.ones(4, 8, dtype=torch.bfloat16)}),
        ("weight", {"weight": torch.ones(3, 8), "activation": "silu_mul"}),
        ("bias", {"bias": torch.ones(5)}),
        ("residual", {"residual": torch.ones(2, 5)}),
        ("norm_weight", {"norm_weight": torch.ones(4)}),
        ("activation", {"activation": "gelu"}),
        ("out", {"out": torch.ones(1, 4)}),
        ("backend", {"backend": "fast"}),
    ],
)
def test_what_does_not_fit_is_named(name: str, kwargs: dict[str, Any]) -> None:
    given = {"x": torch.ones(2, 8), "weight": torch.ones(4, 8)} | kwargs
    with pytest.raises(ValueError, match=name):
        linear(**given)


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
def test_a_norm_between_two_products_half_done_by_each(
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


def test_no_half_norm_where_it_is_better_done_by_itself(
    randn: Callable[..., torch.Tensor],
) -> None:
    weight, norm = randn(64, 64), randn(64)
    for x, backend in ((randn(1, 64), "triton"), (randn(4, 64), "reference")):
        half = between_products(x, weight, weight, norm, 1e-5, is_gated=False, backend=backend)
        assert half is None


def test_a_half_norm_that_does_not_fit_is_named(randn: Callable[..., torch.Tensor]) -> None:
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
        assert error_of(found, expected) < 1e-5
        for index, slot in enumerate(adapters):
            assert torch.equal(found[index], plain[index]) == (not slot)
