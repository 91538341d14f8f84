"""Attention of decode cut into equal shares, on devices of different sizes: against plain torch in
float64, with whatever lies outside of a sequence's own positions set to NaN."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from baton_kernels import attention_plan, attention_triton
from baton_kernels.attention import decode_attention
from baton_kernels.attention_plan import Plan

from tests.kernels.conftest import DEVICE, some
from tests.kernels.test_attention import SHAPES, Cache, Shape, close


@pytest.fixture(params=[3], ids=lambda number: f"{2 * number} programs")
def shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Launches are cut so, on a device of that size; the plans of those that were."""
    launched: list[Plan] = []
    launch = attention_triton.launch_shares

    def noted(*arguments: Any, **options: Any) -> None:
        launched.append(next(one for one in arguments if isinstance(one, Plan)))
        launch(*arguments, **options)

    monkeypatch.setattr(attention_plan, "num_sms", lambda _: request.param)
    monkeypatch.setattr(attention_plan, "suits_shares", lambda *_: True)
    monkeypatch.setattr(attention_triton, "launch_shares", noted)
    return launched


def mixed_lengths(seed: int) -> list[int]:
    """One far longer than the others, and padding, anywhere."""
    draw = random.Random(seed)
    found = [draw.randint(1, 40) for _ in range(draw.randint(1, 4))]
    found += [draw.randint(200, 400)] + [0] * draw.randint(0, 3)
    draw.shuffle(found)
    return found


def assert_counters_are_zero() -> None:
    assert not attention_plan.own_workspace(torch.device(DEVICE)).counters.any()


@pytest.mark.parametrize(
    ("shape", "shared"),
    some(zip(SHAPES, [1, 3, 20, 20, 1, 3], strict=True)),
    indirect=["shared"],
    ids=str,
)
def test_shares_are_reference(
    shape: Shape, shared: list[Plan], generator: torch.Generator, seed: int
) -> None:
    cache = Cache(shape, mixed_lengths(seed), torch.float32, generator)
    close(cache.kernel(scaling=0.3), cache.truth(scaling=0.3))
    assert len(shared) == (shape.num_heads // shape.num_kv_heads <= 16)
    assert_counters_are_zero()


@pytest.mark.parametrize(
    ("dtype", "num_scales", "option"),
    [("int8", 1, "softcap"), ("fp8_e4m3", 1, ""), ("int8", 4, "sinks")],
)
def test_quantized_shares_are_reference(
    dtype: str,
    num_scales: int,
    option: str,
    shared: list[Plan],
    generator: torch.Generator,
    seed: int,
) -> None:
    cache = Cache(Shape(), mixed_lengths(seed), torch.float32, generator)
    rows = cache.quantized(dtype, num_scales)
    options: dict[str, Any] = {"softcap": {"softcap": 2.0}, "sinks": {"sinks": cache.sinks}}.get(
        option, {}
    )
    close(cache.kernel(rows, scaling=0.5, **options), cache.truth(rows, scaling=0.5, **options))
    assert shared
    assert_counters_are_zero()


@pytest.mark.parametrize("shared", [1, 20], indirect=True)
@pytest.mark.parametrize("ends", [[0, 0], [0, 1, 0], [32, 33]], ids=str)
def test_few_tiles(ends: list[int], shared: list[Plan], generator: torch.Generator) -> None:
    """Less than a share for everybody, whole tiles, and none at all."""
    cache = Cache(Shape(), ends, torch.float32, generator)
    close(cache.kernel(scaling=0.3), cache.truth(scaling=0.3))
    assert shared
    assert_counters_are_zero()


def test_a_head_that_many_programs_share(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    """One over all programs: its parts are merged in several rounds."""
    monkeypatch.setattr(attention_plan, "num_sms", lambda _: 12)
    monkeypatch.setattr(attention_plan, "suits_shares", lambda *_: True)
    cache = Cache(Shape(num_heads=1, num_kv_heads=1), [900], torch.float32, generator)
    close(cache.kernel(scaling=0.3), cache.truth(scaling=0.3))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"exact": True}, False),
        ({"window": 20}, False),
        ({"num_splits": 3}, False),
    ],
    ids=str,
)
def test_who_is_not_cut_so(
    options: dict[str, Any], expected: bool, shared: list[Plan], generator: torch.Generator
) -> None:
    """Where sums have a fixed order, or programs look at a window."""
    cache = Cache(Shape(), [20, 3], torch.float32, generator)
    cache.kernel(scaling=0.3, **options)
    assert bool(shared) == expected


@pytest.mark.parametrize(
    ("num_pairs", "is_long", "expected"),
    [
        (8, False, False),
        (64, True, False),
        (98, True, False),
        (99, True, True),
        (99, False, True),
        (264, False, True),
        (265, False, False),
        (265, True, True),
        (528, True, True),
        (529, True, False),
    ],
)
def test_what_suits_a_device_of_132(num_pairs: int, is_long: bool, expected: bool) -> None:
    assert attention_plan.suits_shares(num_pairs, is_long, 132) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a device's own size")
def test_lengths_of_a_graph_may_change(generator: torch.Generator) -> None:
    """Captured with some lengths, and right with others: nothing of the cut is the host's."""
    shape = Shape(num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128, block_size=16)
    draw = random.Random(3)
    ends = [draw.randint(1, 600) for _ in range(20)]
    cache = Cache(shape, ends, torch.bfloat16, generator)
    out = torch.empty(20, 32, 128, dtype=torch.bfloat16, device=DEVICE)

    def run() -> None:
        decode_attention(cache.query, cache.rows, cache.tables, cache.ends, out=out, scaling=0.1)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(5):
        for index, end in enumerate(ends):
            cache.ends[index] = draw.randint(0, end)
        graph.replay()
        close(out, cache.truth(scaling=0.1))
