"""Intake: what of a handle is fetched, and where to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.sequence import HOLE
from kvstore.block_refs import Block, Tier
from services.decode.kv_loader import KvLoader
from services.worker.handle import HandleRun, Stretch
from services.worker.provenance import LegProvenance

SIZE = 16


def _intake(block_ids: tuple[int, ...], num_local: int) -> KvLoader:
    core: Any = SimpleNamespace(
        model=SimpleNamespace(block_size=SIZE), connector=SimpleNamespace(client=None)
    )
    reservation: Any = SimpleNamespace(block_ids=block_ids, num_local_tokens=num_local * SIZE)
    ask: Any = SimpleNamespace(request_id="r", tenant="t", adapter="", prompt_token_ids=())
    return KvLoader(core, ask, "e", reservation, LegProvenance(len(block_ids) * SIZE))


def _stretch(node_id: str, first: int, end: int) -> Stretch:
    blocks = [Block(bytes([i]) * 16, i, 2, i, SIZE, Tier.HOST) for i in range(first, end)]
    return Stretch(
        HandleRun(node_id, "address", bytes(16), f"lease of {node_id}", first, blocks), first, end
    )


@pytest.mark.parametrize(
    ("holes", "expected"),
    [
        ((), [("a", [1, 2]), ("b", [3, 4, 5])]),
        ((5,), [("a", [1, 2]), ("b", [3, 4])]),
        ((3,), [("a", [1, 2])]),
        ((1, 4), []),
    ],
)
def test_nobody_is_asked_for_nothing(
    holes: tuple[int, ...], expected: list[tuple[str, list[int]]]
) -> None:
    """Blocks up to the first lost place; no store is met for none at all."""
    block_ids = tuple(HOLE if index in holes else 100 + index for index in range(8))
    intake = _intake(block_ids, num_local=1)
    wanted, has_hole = intake._wanted([_stretch("a", 0, 3), _stretch("b", 3, 6)])
    found = [(batch.run.node_id, [block.frame for block, _ in batch.items]) for batch in wanted]
    assert found == expected and has_hole == bool(holes)
    places = [place for batch in wanted for place in batch.items]
    assert all(block_id == 100 + block.frame for block, block_id in places)
