"""LentPrompt: what is entered while it is computed is told of when it is, and given back if not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from engine.outputs import FilledBlock
from kvstore.block_refs import PackedBlocks
from kvstore.errors import LeaseLapsed
from kvstore.exported_blocks import ExportedBlocks, ExportOffer
from services.prefill.handoff import HandoffBuilder
from services.prefill.lending import NOT_HELD, LentPrompt
from services.worker.provenance import HandoverPath
from services.worker.store_writer import TailSource

NUM_FULL = 6
CHUNK = 2
SIZE = 16
BLOCK_IDS = [40, 7, 8, 31, 3, 12, 9]
HASHES = [bytes([index + 1]) * 16 for index in range(NUM_FULL)]
FILLED = [FilledBlock(index, BLOCK_IDS[index], HASHES[index]) for index in range(NUM_FULL)]
TAIL = TailSource("tail", BLOCK_IDS[NUM_FULL], 5)


class FakeLender:
    """Over a real table; checksums are block ids."""

    def __init__(self, on_free: Callable[[Sequence[int]], None]) -> None:
        self.loans = ExportedBlocks(64, 4096, 1e9, on_free)
        self.open_prompts: set[object] = set()

    def enter(
        self, offers: Sequence[ExportOffer], lease_id: str, *, is_computed: bool = True
    ) -> str:
        return self.loans.lend(offers, lease_id, is_computed=is_computed)[0]

    def computed(self, lease_id: str, block_ids: Sequence[int]) -> None:
        self.loans.computed(lease_id, block_ids)

    async def seal(self, lease_id: str) -> PackedBlocks:
        return self.loans.seal(lease_id, {each: each for each in self.loans.unsealed_of(lease_id)})

    def hand_over(self, lease_id: str, ttl_s: float) -> None:
        self.loans.hand_over(lease_id, ttl_s, 0.0)

    def release(self, lease_id: str) -> None:
        self.loans.release([lease_id], 0.0)


class Place:
    """A prompt of six full blocks and a tail, whose blocks are held."""

    def __init__(self) -> None:
        self.held: Counter[int] = Counter()
        self.lender = FakeLender(self.held.subtract)
        engine: Any = SimpleNamespace(
            block_ids=lambda name: tuple(BLOCK_IDS),
            quarantine=lambda name, block_ids: self.held.update(block_ids),
            unquarantine=lambda block_ids: self.held.subtract(list(block_ids)),
        )
        self.engine = engine
        self.thread: Any = SimpleNamespace(post=lambda run: run(engine))
        lender: Any = self.lender
        self.prompt = LentPrompt(
            lender,
            self.thread,
            "a",
            num_blocks=len(BLOCK_IDS),
            block_size=SIZE,
            chain_hashes=HASHES,
            num_ahead=CHUNK,
        )
        self.prompt.look_ahead()
        assert self.lender.loans.num_lent == 0, "nothing is held yet"
        self.hold()

    def hold(self) -> None:
        """The request starts."""
        self.prompt.hold(self.engine)

    @property
    def told(self) -> list[int]:
        """What whoever knows the lease is told of, in order."""
        blocks = self.lender.loans.blocks_of(self.prompt.lease_id, 0)
        return [block.frame for block in blocks]

    def add(self, blocks: Iterable[FilledBlock]) -> None:
        """A step is over, and the next one runs."""
        self.prompt.add(blocks)
        self.prompt.look_ahead()

    def check_over(self) -> None:
        """Each hold was given back, once."""
        self.lender.loans.check_integrity()
        assert self.lender.loans.num_lent == 0 and not self.lender.open_prompts
        assert set(self.held.values()) == {0}


async def test_what_is_entered_is_told_of_when_it_is_computed() -> None:
    place = Place()
    place.add(FILLED[:2])
    await place.prompt.lend()
    assert place.told == BLOCK_IDS[:2] and place.lender.loans.num_lent == 4
    place.add(FILLED[2:4])
    assert place.told == BLOCK_IDS[:2] and place.lender.loans.num_lent == 6
    place.prompt.add(FILLED[4:])
    await place.prompt.lend(TAIL)
    assert place.told == BLOCK_IDS
    assert [block.frame for block in place.prompt.refs] == BLOCK_IDS[:NUM_FULL]
    assert [block.checksum for block in place.prompt.refs] == BLOCK_IDS[:NUM_FULL]
    assert place.prompt.tail is not None and place.prompt.tail.frame == TAIL.block_id
    assert place.prompt.hand_over(1.0)
    place.prompt.close(is_handed_over=True)
    assert place.lender.loans.num_lent == len(BLOCK_IDS)
    place.prompt.release()
    place.check_over()


@pytest.mark.parametrize("num_step_tokens", [2 * SIZE, 2 * SIZE - 1])
async def test_no_more_is_entered_than_a_step_fills(num_step_tokens: int) -> None:
    """Each entry counts as lent, and what is never computed is given back for nothing."""
    place = Place()
    engine = SimpleNamespace(max_num_tokens_per_step=num_step_tokens)
    core: Any = SimpleNamespace(
        lender=place.lender,
        thread=place.thread,
        model=SimpleNamespace(block_size=SIZE),
        settings=SimpleNamespace(engine=engine),
    )
    num_tokens = NUM_FULL * SIZE + TAIL.num_tokens
    ask = SimpleNamespace(
        wants_handle=True, handover=HandoverPath.DIRECT, num_context_tokens=num_tokens
    )
    job: Any = SimpleNamespace(ask=ask, engine_id="a")
    opened = HandoffBuilder(core).open_lent(job, HASHES)
    assert opened is not None
    place.prompt.close(is_handed_over=False)
    place.prompt = opened
    place.hold()
    place.add(FILLED[:1])
    assert place.lender.loans.num_lent == 3, "one that is filled, and two of the next step"
    place.prompt.close(is_handed_over=False)
    place.check_over()


@pytest.mark.parametrize(
    "other",
    [
        FilledBlock(2, 50, HASHES[2]),
        FilledBlock(2, BLOCK_IDS[3], HASHES[2]),
        FilledBlock(2, BLOCK_IDS[2], HASHES[3]),
    ],
    ids=["none of its own", "another of its own", "of other tokens"],
)
@pytest.mark.parametrize("looks_ahead", [True, False])
async def test_a_block_that_is_not_what_was_expected_ends_it(
    other: FilledBlock, looks_ahead: bool
) -> None:
    """A last line of defence: no engine that keeps what is held in place comes to this."""
    place = Place()
    (place.add if looks_ahead else place.prompt.add)(FILLED[:2])
    await place.prompt.lend()
    place.prompt.add([other])
    await place.prompt.lend()
    assert place.prompt.problem == NOT_HELD and not place.prompt.hand_over(1.0)
    with pytest.raises(LeaseLapsed):
        place.lender.loans.check_lease(place.prompt.lease_id, 0.0)
    place.prompt.look_ahead()
    place.prompt.close(is_handed_over=False)
    place.check_over()


async def test_a_lease_that_was_handed_over_keeps_what_was_computed_and_no_more() -> None:
    place = Place()
    place.add(FILLED[:2])
    await place.prompt.lend()
    assert place.prompt.hand_over(1.0) and place.lender.loans.num_lent == 2
    place.prompt.add(FILLED[2:4])
    place.prompt.look_ahead()  # what the loop was still to do
    assert place.prompt.problem is None and place.lender.loans.num_lent == 2
    place.lender.loans.check_integrity()
    place.prompt.close(is_handed_over=True)
    place.prompt.release()
    place.check_over()
