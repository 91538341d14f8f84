"""Ways to cut a step that verifies a token tree: without some of its parts, and otherwise than the
tables say (verify_step.py). They replace what chooses, and nothing else: the numbers that come out
are the same up to rounding, but where a part is left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from engine.decoder.layer_attention import LayerAttention

Replaced = tuple[Any, str, Any]
"""(module or class, name, what stands there meanwhile)."""


@dataclass(frozen=True)
class Way:
    """How the step is cut otherwise."""

    name: str
    replaced: tuple[Replaced, ...]


def _attended(self: LayerAttention, _index: int, _layer: Any, qkv: Any, *_: Any) -> Any:
    """Nothing is turned, written or attended: the queries as they are."""
    return qkv[:, : self._shape.num_heads * self._shape.head_dim]


NO_TREES = Way("without attention", ((LayerAttention, "_trees", lambda *_: None),))
NO_MIXED = Way("without attention, rotation and KV", ((LayerAttention, "mixed", _attended),))


def attention_ways() -> list[Way]:
    """Other cuts of tree attention."""
    from baton_kernels.gpu import attention_plan as plan

    def config(*sizes: int) -> Replaced:
        return plan, "config_for", lambda *_, **__: plan.Config(*sizes)

    def splits(factor: float) -> Replaced:
        chosen = plan.plan_splits
        return plan, "plan_splits", lambda *its: max(1, round(chosen(*its) * factor))

    sizes = ((32, 32, 4, 3), (32, 64, 4, 3), (64, 32, 4, 3), (64, 64, 4, 2), (128, 64, 8, 3))
    found = [Way(f"attention {one}", (config(*one),)) for one in sizes]
    return [*found, *(Way(f"attention: splits x {by}", (splits(by),)) for by in (0.5, 0.75, 2.0))]


def product_ways() -> list[Way]:
    """Other cuts of products of few rows."""
    from baton_kernels.gpu import tiles

    chosen = tiles.skinny_tile

    def by_triton(_: tiles.Product) -> int:
        return 64

    def tile(block_n: int, stages: int, num_programs: int, most: int) -> Callable[..., Any]:
        def choose(num_rows: int, width: int, depth: int, is_gated: bool) -> Any:
            if num_rows <= 16:
                return chosen(num_rows, width, depth, is_gated)
            split = tiles.split_for(
                width, block_n, depth, 128, num_programs=num_programs, most=most
            )
            return tiles.Tile(32 if num_rows <= 32 else 64, block_n, 128, split, num_stages=stages)

        return choose

    def of_64_rows(num_rows: int, *its: Any) -> Any:
        return chosen(max(num_rows, 33) if num_rows > 16 else num_rows, *its)

    all_ours: Replaced = (tiles, "max_rows", by_triton)
    found = [
        Way("products: small weights by Triton, too", (all_ours,)),
        Way(
            "products: tiles of 64 rows",
            ((tiles, "skinny_tile", of_64_rows),),
        ),
    ]
    for cut in ((64, 3, 264, 8), (128, 2, 128, 4)):
        ours = (tiles, "skinny_tile", tile(*cut))
        found.append(Way(f"products {cut}", (ours,)))
        found.append(Way(f"products {cut}, small weights, too", (ours, all_ours)))
    return found


@contextlib.contextmanager
def going(way: Way) -> Iterator[None]:
    """What is chosen by shapes is chosen anew, before and after."""
    with contextlib.ExitStack() as stack:
        stack.callback(_forget_choices)
        for target, name, stand_in in way.replaced:
            stack.enter_context(mock.patch.object(target, name, stand_in))
        _forget_choices()
        yield


def _forget_choices() -> None:
    with contextlib.suppress(ImportError):
        from baton_kernels.gpu import tiles

        tiles.choose_tile.cache_clear()
