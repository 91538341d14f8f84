"""What was copied ahead of its handle counts as far as that names it just so, and no further."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.block_refs import Block, PackedBlocks, Tier
from kvstore.errors import CHECKSUM
from kvstore.node_ids import lender_node_id
from services.decode.kv_loader import CopiedAhead, CopyAhead, KvLoader, RestOfPrompt
from services.worker.handle import HandleRun, Stretch
from services.worker.provenance import FINGERPRINT, LegProvenance, WorkerCounts
from services.worker.store_pool import LoadedBlocks

SIZE = 16
HASHES = tuple(bytes([index]) * 16 for index in range(1, 7))
FOUND = 1000
"""What is found of a block that is not sealed, less its frame."""

TAIL = Block(b"", 6, 2, 60, 5, Tier.DEVICE)


def blocks(first: int, end: int) -> list[Block]:
    return [Block(HASHES[i], i, 2, 10 * i, SIZE, Tier.DEVICE) for i in range(first, end)]


def run(named: list[Block], first: int = 0, **changes: Any) -> HandleRun:
    made = HandleRun(lender_node_id("p"), "a", bytes(16), "lease", first, PackedBlocks.of(named))
    return dataclasses.replace(made, **changes)


def ahead(first: int = 2) -> CopyAhead:
    """Blocks [first, 6) and the tail were copied."""
    made = CopyAhead(None, on_rest=lambda: None, on_failure=lambda reason: None)  # type: ignore[arg-type]
    copied = [*blocks(first, 6), TAIL]
    made.keep(CopiedAhead(run(copied, first)))
    return made


def frames(copied: CopiedAhead | None) -> list[int]:
    return [] if copied is None else [block.frame for block in copied.blocks]


def test_it_is_confirmed_piece_by_piece() -> None:
    made = ahead()
    assert frames(made.confirm(Stretch(run(blocks(0, 2)), 0, 2))) == []
    assert made.contradiction(2) is None
    assert frames(made.confirm(Stretch(run(blocks(0, 4)), 0, 4))) == [2, 3]
    assert made.contradiction(4) is None
    assert frames(made.confirm(Stretch(run(blocks(0, 6)), 0, 6))) == [4, 5]
    assert frames(made.confirm(Stretch(run([TAIL], 6), 6, 7))) == [6]
    assert made.contradiction(7) is None, "nothing is left"


@pytest.mark.parametrize(
    "changes",
    [{"lease_id": "another"}, {"store_incarnation": b"1" * 16}, {"node_id": lender_node_id("q")}],
)
def test_another_place_is_another_block(changes: dict[str, Any]) -> None:
    made = ahead()
    assert made.confirm(Stretch(run(blocks(0, 6), **changes), 0, 6)) is None
    assert made.contradiction(6) == FINGERPRINT
    assert made.confirm(Stretch(run(blocks(0, 6)), 0, 6)) is None, "it is forgotten"


@pytest.mark.parametrize("field", ["chain_hash", "frame", "generation", "checksum", "num_tokens"])
def test_a_block_that_differs_in_anything_ends_it(field: str) -> None:
    made, named = ahead(), blocks(0, 6)
    other: Any = b"9" * 16 if field == "chain_hash" else 99
    named[4] = dataclasses.replace(named[4], **{field: other})
    assert frames(made.confirm(Stretch(run(named), 0, 6))) == [2, 3]
    assert made.contradiction(6) == (CHECKSUM if field == "checksum" else FINGERPRINT)
    assert made.contradiction(6) is None, "it is forgotten"


class Core:
    """A worker's, whose loads bring the first `num_usable` of what is asked for."""

    def __init__(self, num_usable: int = 99) -> None:
        self.model = SimpleNamespace(block_size=SIZE)
        self.layout = SimpleNamespace(is_quantized=False)
        self.limits = SimpleNamespace(transfer_budget_s=1.0)
        self.connector = SimpleNamespace(client=None, address="", load=self.load)
        self.remote_stores = SimpleNamespace(client=self.client)
        self.step_log = None
        self.num_usable = num_usable
        self.loads: list[list[tuple[int, int]]] = []
        self.promises: list[tuple[int, float]] = []
        self.counts = WorkerCounts()

    async def client(self, *_: Any) -> Any:
        return SimpleNamespace(transport_name="grpc")

    async def load(
        self,
        client: Any,
        engine_id: str,
        lease_id: str,
        items: Any,
        *_: Any,
        num_unsealed: int,
        held_until_s: float,
        **__: Any,
    ) -> LoadedBlocks:
        self.loads.append([(block.frame, block_id) for block, block_id in items])
        self.promises.append((num_unsealed, held_until_s))
        found = {
            at: FOUND + items[at][0].frame for at in range(len(items) - num_unsealed, len(items))
        }
        return LoadedBlocks(min(len(items), self.num_usable), 64 * len(items), checksums=found)


def intake(core: Core, num_local: int) -> KvLoader:
    num_tokens = 6 * SIZE + 5
    reservation: Any = SimpleNamespace(
        block_ids=tuple(range(100, 109)), num_local_tokens=num_local * SIZE, chain_hashes=HASHES
    )
    ask: Any = SimpleNamespace(
        request_id="r",
        tenant="t",
        adapter="",
        prompt_token_ids=(1,) * num_tokens,
        chain=SimpleNamespace(root=bytes(32)),
    )
    core_: Any = core
    return KvLoader(core_, ask, "e", reservation, LegProvenance(num_tokens))


@pytest.mark.parametrize(
    ("num_unsealed", "num_local", "num_places", "expected"),
    [
        (0, 2, 9, []),
        (5, 2, 9, [2, 3, 4, 5, 6]),
        (2, 2, 9, [5, 6]),
        (5, 4, 9, [4, 5, 6]),  # some came otherwise meanwhile
        (1, 4, 9, [6]),
        (3, 2, 5, [4]),  # there is no place for the last two
        (2, 2, 4, []),
    ],
)
async def test_blocks_that_are_not_sealed_are_kept_with_the_checksums_of_what_came(
    num_unsealed: int, num_local: int, num_places: int, expected: list[int]
) -> None:
    """And count when a handle says the same."""
    core = Core()
    made = intake(core, num_local)
    made._block_ids = made._block_ids[:num_places]
    rest = [*blocks(2, 6), TAIL]
    told = [dataclasses.replace(each, checksum=0) for each in rest]
    kept = rest[: len(rest) - num_unsealed] + told[len(rest) - num_unsealed :]
    made._ahead._rest = RestOfPrompt(run(kept, 2), num_unsealed, 77.0)
    await made.pull_rest(deadline())
    assert core.promises == [(len(expected), 77.0)]
    copied = made._ahead._copied
    assert copied is not None
    right = {block.frame: block.checksum for block in rest}
    for block in copied.blocks:
        found = FOUND + block.frame if block.frame in expected else right[block.frame]
        assert block.checksum == found
    named = [
        dataclasses.replace(block, checksum=FOUND + block.frame)
        if block.frame in expected
        else block
        for block in [*blocks(0, 6), TAIL]
    ]
    if 4 in expected:
        named[4] = dataclasses.replace(named[4], checksum=1)
    made._confirm([Stretch(run(named[:6]), 0, 6), Stretch(run(named[6:], 6), 6, 7)])
    end = 4 if 4 in expected else min(7, num_places)
    assert made.num_tokens == min(16 * end, 101)
    assert core.counts.early_pulls_failed == ({CHECKSUM: 1} if 4 in expected else {})


def deadline() -> Any:
    return SimpleNamespace(sooner=lambda seconds: None)


def other_tail(**changes: Any) -> Block:
    return dataclasses.replace(TAIL, **changes)


@pytest.mark.parametrize(
    ("rest", "first", "num_local", "expected"),
    [
        ([*blocks(2, 6), TAIL], 2, 2, [2, 3, 4, 5, 6]),
        ([*blocks(2, 6), TAIL], 2, 4, [4, 5, 6]),  # some came otherwise meanwhile
        ([*blocks(2, 6), TAIL], 2, 1, []),  # what lies between is not here
        (blocks(2, 5), 2, 2, [2, 3, 4]),
        ([*blocks(2, 5), *blocks(4, 5)], 2, 2, [2, 3, 4]),  # another prompt's
        ([*blocks(2, 6), other_tail(num_tokens=6)], 2, 2, [2, 3, 4, 5]),
        ([*blocks(2, 6), other_tail(chain_hash=b"9" * 16)], 2, 2, [2, 3, 4, 5]),
        ([*blocks(2, 5), TAIL], 2, 2, [2, 3, 4]),
        ([], 6, 6, []),
    ],
)
async def test_of_the_lenders_word_only_what_the_prompt_asks_for_is_fetched(
    rest: list[Block], first: int, num_local: int, expected: list[int]
) -> None:
    core = Core()
    made = intake(core, num_local)
    made._ahead._rest = RestOfPrompt(run(rest, first))
    await made.pull_rest(deadline())
    assert core.loads == ([[(frame, 100 + frame) for frame in expected]] if expected else [])
    assert made.num_blocks == num_local, "no handle has named it"
    await made.pull_rest(deadline())
    assert len(core.loads) == bool(expected), "once"
    made._confirm([Stretch(run(blocks(0, 6)), 0, 6), Stretch(run([TAIL], 6), 6, 7)])
    num_here = max([num_local * SIZE, *(min(16 * frame + 16, 101) for frame in expected)])
    assert made.num_tokens == num_here
