"""What adapters add to one linear layer, in each of our linear layers and with each of their
epilogues: the delta comes before the activation, and rows without an adapter keep every bit."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from baton_kernels.packed_linear import unavailable_reason
from torch import nn
from torch.nn.functional import linear, silu

from engine.batch import TokenSpan
from engine.errors import IntegrityError
from engine.layers.linear import PackedLinear
from engine.lora.stacked_weights import AdapterRows, Deltas, LowRank, attach, detach
from engine.models.fusion import PlainLinear

IN, OUT = 24, 40
DTYPES = (torch.float32, torch.bfloat16)


def _spans(rng: random.Random, num_slots: int) -> list[TokenSpan]:
    return [
        TokenSpan(0, rng.choice([1, 1, 1, 2, 5, 40]), (0,), rng.randint(0, num_slots))
        for _ in range(rng.randint(1, 9))
    ]


def _deltas(rows: AdapterRows, generator: torch.Generator, slots: list[int]) -> Deltas:
    deltas = Deltas(rows, OUT, torch.float32)
    for slot in slots:
        rank = 3 + slot
        deltas.by_slot[slot] = LowRank(
            torch.randn(rank, IN, generator=generator), torch.randn(rank, OUT, generator=generator)
        )
    return deltas


def _expected(x: torch.Tensor, spans: list[TokenSpan], deltas: Deltas) -> torch.Tensor:
    """[T, out] in float64, row by row."""
    out = torch.zeros(x.shape[0], OUT, dtype=torch.float64)
    row = 0
    for span in spans:
        factors = deltas.by_slot.get(span.adapter)
        for _ in range(span.num_tokens):
            if factors is not None:
                out[row] = x[row].double() @ factors.a.double().T @ factors.b.double()
            row += 1
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_packed", [True, False])
def test_every_epilogue(
    dtype: torch.dtype, is_packed: bool, seed: int, scale: Callable[[int], int]
) -> None:
    reason = unavailable_reason(dtype, "cpu") if is_packed else None
    if reason is not None:
        pytest.skip(reason)
    rng = random.Random(f"{seed} {dtype} {is_packed}")
    generator = torch.Generator().manual_seed(seed)
    make = PackedLinear if is_packed else PlainLinear
    weight = torch.randn(OUT, IN, generator=generator).to(dtype)
    bias = torch.randn(OUT, generator=generator).to(dtype)
    plain, swish = make(weight, bias), make(weight, bias, "swish")
    rtol, atol = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (3e-2, 2.0)}[dtype]
    for _ in range(max(20, scale(200))):
        spans = _spans(rng, 3)
        num_rows = sum(span.num_tokens for span in spans)
        x = torch.randn(num_rows, IN, generator=generator).to(dtype)
        other = torch.randn(num_rows, OUT, generator=generator).to(dtype)
        calls = {
            "plain": lambda x=x: plain(x),
            "batched": lambda x=x: plain(x[None])[0] if is_packed else plain(x),
            "times": lambda x=x, other=other: plain.forward_times(x, other),
            "plus": lambda x=x, other=other: plain.forward_plus(x, other),
            "swish": lambda x=x: swish(x),
        }
        before = {name: call() for name, call in calls.items()}
        rows = AdapterRows(torch.device("cpu"))
        rows.place(spans)
        deltas = _deltas(rows, generator, [1, 2])  # slot 3 does not touch this layer
        delta = _expected(x, spans, deltas)
        inner = linear(x.double(), weight.double(), bias.double()) + delta
        wanted = {
            "plain": inner,
            "batched": inner,
            "times": inner * other.double(),
            "plus": inner + other.double(),
            "swish": silu(inner),
        }
        for layer in (plain, swish):
            attach(layer, deltas)
        after = {name: call() for name, call in calls.items()}
        for layer in (plain, swish):
            detach(layer, None)
        is_base = torch.tensor([s.adapter == 0 for s in spans for _ in range(s.num_tokens)])
        for name in calls:
            assert after[name].dtype is dtype
            assert torch.equal(after[name][is_base], before[name][is_base]), name
            close = torch.allclose(after[name].double(), wanted[name], rtol=rtol, atol=atol)
            assert close, (name, float((after[name].double() - wanted[name]).abs().max()))
        assert all(torch.equal(call(), before[name]) for name, call in calls.items())


def test_a_linear_of_the_model_itself_gets_a_hook(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(IN, OUT).requires_grad_(False)
    x = torch.randn(1, 6, IN, generator=generator)
    before = layer(x)
    rows = AdapterRows(torch.device("cpu"))
    deltas = _deltas(rows, generator, [1])
    spans = [TokenSpan(0, 2, (0,)), TokenSpan(0, 3, (0,), 1), TokenSpan(0, 1, (0,))]
    handle = attach(layer, deltas)
    assert torch.equal(layer(x), before), "no step has begun"
    rows.place(spans)
    after = layer(x)
    assert torch.equal(after[0, [0, 1, 5]], before[0, [0, 1, 5]])
    wanted = before[0].double() + _expected(x[0], spans, deltas)
    assert torch.allclose(after[0].double(), wanted, rtol=1e-4, atol=1e-4)
    rows.place([TokenSpan(0, 6, (0,))])
    assert torch.equal(layer(x), before), "a step without adapters"
    rows.place(spans)
    detach(layer, handle)
    assert torch.equal(layer(x), before)


def test_rows_of_another_step_are_an_error() -> None:
    rows = AdapterRows(torch.device("cpu"))
    deltas = _deltas(rows, torch.Generator().manual_seed(0), [1])
    rows.place([TokenSpan(0, 3, (0,), 1)])
    with pytest.raises(IntegrityError, match="2 rows in a step of 3"):
        deltas.add(torch.ones(2, IN), torch.ones(2, OUT))


def test_nan_in_a_row_without_an_adapter_stays_there(seed: int) -> None:
    """And NaN of one adapter's rows stays with that adapter."""
    generator = torch.Generator().manual_seed(seed)
    rows = AdapterRows(torch.device("cpu"))
    deltas = _deltas(rows, generator, [1, 2])
    rows.place([TokenSpan(0, 1, (0,), slot) for slot in (0, 1, 2, 1)])
    x = torch.randn(4, IN, generator=generator)
    x[0], x[1] = torch.nan, torch.nan
    out = torch.zeros(4, OUT)
    deltas.add(x, out)
    assert torch.isnan(out).any(dim=1).tolist() == [False, True, False, False]
