"""What is lent, and until when: against a model that forgets nothing, step by step."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest

from kvstore.block_refs import Block
from kvstore.errors import LeaseLapsed, StoreIntegrityError
from kvstore.exported_blocks import (
    FIRST_GENERATION,
    ExportedBlock,
    ExportedBlocks,
    ExportLease,
    ExportOffer,
)

NUM_BLOCKS = 12
TTL_S = 10.0


def offer(block_id: int, content: int = 0, *, is_sealed: bool = True) -> ExportOffer:
    checksum = 7 * block_id + content if is_sealed else None
    return ExportOffer(block_id, b"%7d.%8d" % (block_id, content), checksum, 16)


@pytest.fixture
def table() -> ExportedBlocks:
    """It tells nobody of what came free."""
    return ExportedBlocks(NUM_BLOCKS, 64, TTL_S, lambda block_ids: None)


class Model:
    """Leases and holds as sets; every block's owner counts by hand."""

    def __init__(self) -> None:
        self.kept: Counter[int] = Counter()  # what a lender keeps in place, by block
        self.table = ExportedBlocks(NUM_BLOCKS, 64, TTL_S, self.on_free)
        self.leases: dict[str, tuple[float, set[int]]] = {}
        self.unsealed: dict[str, list[int]] = {}  # by lease, in the order in which they were lent
        self.ahead: dict[str, list[int]] = {}  # by lease, in the order in which they were entered
        self.computed_ids: set[int] = set()  # what can be read
        self.holds: dict[str, set[int]] = {}
        self.pins: list[tuple[float, set[int]]] = []  # when they end, what they hold
        self.content: Counter[int] = Counter()  # how often a block was given back
        self.old: list[Block] = []
        self.now_s = 0.0

    def on_free(self, block_ids: list[int]) -> None:
        self.kept.subtract(block_ids)

    @property
    def lent(self) -> set[int]:
        entered = (self.ahead[lease_id] for lease_id in self.leases)
        return set().union(
            *(ids for _, ids in self.leases.values()),
            *entered,
            *self.holds.values(),
            *(ids for _, ids in self.pins),
        )

    def after(self, before: set[int]) -> None:
        """Blocks that came free are told; a handle on them is old from now on."""
        self.content.update(before - self.lent)
        self.computed_ids -= before - self.lent

    # -- steps

    def lend(self, draw: random.Random) -> None:
        block_ids = draw.sample(range(NUM_BLOCKS), draw.randint(0, 4))
        known = draw.choice(["", *self.leases])
        offers = [
            offer(each, self.content[each], is_sealed=draw.random() < 0.7) for each in block_ids
        ]
        self.kept.update(block_ids)
        if known and not math.isinf(self.leases[known][0]):
            with pytest.raises(StoreIntegrityError, match="grows no more"):
                self.table.lend(offers, known)
            self.kept.subtract(block_ids)
            return
        lease_id, blocks = self.table.lend(offers, known)
        assert lease_id == known or not known
        expires_s, ids = self.leases.get(lease_id, (math.inf, set()))
        self.leases[lease_id] = (expires_s, ids | set(block_ids))
        unsealed = [each for each in self.unsealed.get(lease_id, []) if each not in block_ids]
        unsealed += [each.block_id for each in offers if each.checksum is None]
        self.unsealed[lease_id] = unsealed
        ahead = self.ahead.get(lease_id, [])
        self.ahead[lease_id] = [each for each in ahead if each not in block_ids]
        self.computed_ids.update(block_ids)
        for block, given in zip(blocks, offers, strict=True):
            assert (block.frame, block.chain_hash) == (given.block_id, given.chain_hash)
            assert block.generation == FIRST_GENERATION + 2 * self.content[block.frame]
        self.old += blocks

    def enter(self, draw: random.Random) -> None:
        """To be lent when they are computed."""
        block_ids = draw.sample(range(NUM_BLOCKS), draw.randint(0, 4))
        known = draw.choice(["", *self.leases])
        offers = [offer(each, self.content[each], is_sealed=False) for each in block_ids]
        if known and not math.isinf(self.leases[known][0]):
            with pytest.raises(StoreIntegrityError, match="grows no more"):
                self.table.lend(offers, known, is_computed=False)
            return
        self.kept.update(block_ids)
        lease_id, blocks = self.table.lend(offers, known, is_computed=False)
        assert lease_id == known or not known
        _, ids = self.leases.setdefault(lease_id, (math.inf, set()))
        self.unsealed.setdefault(lease_id, [])
        ahead = self.ahead.setdefault(lease_id, [])
        ahead += [each for each in block_ids if each not in ids and each not in ahead]
        self.old += blocks  # whoever guesses what they will be

    def computed(self, draw: random.Random) -> None:
        """The first of those that were entered, some of them, or others."""
        lease_id = draw.choice([*self.leases, "none"])
        if lease_id == "none":
            with pytest.raises(LeaseLapsed):
                self.table.computed(lease_id, [])
            return
        ahead = self.ahead[lease_id]
        if len(ahead) > 1 and draw.random() < 0.3:
            with pytest.raises(StoreIntegrityError, match="not the next"):
                self.table.computed(lease_id, ahead[1:])
            return
        block_ids = ahead[: draw.randint(0, len(ahead))]
        self.table.computed(lease_id, block_ids)
        self.ahead[lease_id] = ahead[len(block_ids) :]
        self.leases[lease_id][1].update(block_ids)
        self.unsealed[lease_id] += block_ids
        self.computed_ids.update(block_ids)

    def seal(self, draw: random.Random) -> None:
        """The first of those that wait, some of them, or one that does not wait."""
        lease_id = draw.choice([*self.leases, "none"])
        if lease_id == "none":
            with pytest.raises(LeaseLapsed):
                self.table.seal(lease_id, {})
            return
        waiting = self.unsealed[lease_id]
        assert self.table.unsealed_of(lease_id) == waiting
        block_ids = waiting[: draw.randint(0, len(waiting))]
        checksums = {each: 7 * each + self.content[each] for each in block_ids}
        others = self.leases[lease_id][1] - set(waiting)
        if others and draw.random() < 0.3:
            with pytest.raises(StoreIntegrityError, match="waits for no checksum"):
                self.table.seal(lease_id, checksums | {draw.choice(sorted(others)): 1})
            return
        sealed = self.table.seal(lease_id, checksums)
        assert [(block.frame, block.checksum) for block in sealed] == list(checksums.items())
        self.unsealed[lease_id] = waiting[len(block_ids) :]
        self.old += sealed

    def hand_over(self, draw: random.Random) -> None:
        if self.leases:
            lease_id = draw.choice(list(self.leases))
            ttl_s = draw.choice([1.0, 5.0, 1e9])
            if self.unsealed[lease_id]:
                with pytest.raises(StoreIntegrityError, match="not sealed"):
                    self.table.hand_over(lease_id, ttl_s, self.now_s)
                return
            before = self.lent
            self.table.hand_over(lease_id, ttl_s, self.now_s)
            self.leases[lease_id] = (self.now_s + min(ttl_s, TTL_S), self.leases[lease_id][1])
            self.ahead[lease_id] = []
            self.after(before)

    def renew(self, draw: random.Random) -> None:
        lease_id = draw.choice([*self.leases, "none"])
        ttl_s = draw.choice([0.0, 3.0, 1e9])
        if lease_id == "none":
            with pytest.raises(LeaseLapsed):
                self.table.renew(lease_id, ttl_s, self.now_s)
            return
        self.table.renew(lease_id, ttl_s, self.now_s)
        expires_s, ids = self.leases[lease_id]
        if ttl_s:
            expires_s = max(expires_s, self.now_s + min(ttl_s, TTL_S))
        self.leases[lease_id] = (expires_s, ids)

    def release(self, draw: random.Random) -> None:
        lease_id = draw.choice([*self.leases, "none"])
        before = self.lent
        num = self.table.release([lease_id, lease_id], self.now_s)
        assert num == (self.leases.pop(lease_id, None) is not None)
        self.after(before)

    def hold(self, draw: random.Random) -> None:
        blocks = draw.sample(self.old, min(len(self.old), draw.randint(0, 4)))
        hold_id, held = self.table.hold(blocks)
        for block, is_held in zip(blocks, held, strict=True):
            is_now = block.generation == FIRST_GENERATION + 2 * self.content[block.frame]
            assert is_held == (block.frame in self.computed_ids and is_now)
        stale = self.table.find_stale([(block.frame, block.generation) for block in blocks])
        assert stale == [index for index, is_held in enumerate(held) if not is_held]
        pairs = zip(blocks, held, strict=True)
        self.holds[hold_id] = {block.frame for block, is_held in pairs if is_held}

    def unhold(self, draw: random.Random) -> None:
        hold_id = draw.choice([*self.holds, "none"])
        before = self.lent
        self.holds.pop(hold_id, None)
        self.table.unhold(hold_id)
        self.table.unhold(hold_id)
        self.after(before)

    def pin(self, draw: random.Random) -> None:
        """A reader has blocks of a lease held, others with them, or only asks which are stale."""
        lease_id = draw.choice([*self.leases, "none"])
        pairs = [(each.frame, each.generation) for each in self.old]
        pairs = draw.sample(pairs, min(len(pairs), draw.randint(0, 4)))
        ttl_s = draw.choice([0.0, 0.6, 3.0])
        if lease_id == "none":
            with pytest.raises(LeaseLapsed):
                self.table.pin(lease_id, pairs, ttl_s, self.now_s)
            return
        held_s, stale = self.table.pin(lease_id, pairs, ttl_s, self.now_s)
        assert stale == self.table.find_stale(pairs)
        ids = {block_id for at, (block_id, _) in enumerate(pairs) if at not in stale}
        is_held = bool(ttl_s and ids and ids <= self.leases[lease_id][1])
        assert held_s == (ttl_s if is_held else 0.0)
        if is_held:
            self.pins.append((self.now_s + ttl_s, ids))

    def pin_from(self, draw: random.Random) -> None:
        if self.leases:
            lease_id = draw.choice(list(self.leases))
            blocks = self.table.blocks_of(lease_id, 1)
            self.table.pin_from(lease_id, 1, 2.5, self.now_s)
            self.pins.append((self.now_s + 2.5, {block.frame for block in blocks}))

    def pass_time(self, draw: random.Random) -> None:
        self.now_s += draw.choice([0.5, 2.0, 6.0])
        before = self.lent
        self.table.lapse(self.now_s)
        self.leases = {k: v for k, v in self.leases.items() if v[0] > self.now_s}
        self.pins = [pin for pin in self.pins if pin[0] > self.now_s]
        self.after(before)

    def check(self) -> None:
        self.table.check_integrity()
        assert self.table.num_lent == len(self.lent)
        assert self.table.num_leases == len(self.leases)
        assert self.table.num_pins == len(self.pins)
        for lease_id in self.leases:
            self.check_known(lease_id)
        assert {each for each, num in self.kept.items() if num} == self.lent
        assert set(self.kept.values()) <= {0, 1}, "kept in place once for each that is lent"

    def check_known(self, lease_id: str) -> None:
        """What readers of one lease are told."""
        blocks = self.table.blocks_of(lease_id, 0)
        assert {block.frame for block in blocks} == self.leases[lease_id][1]
        waiting = self.unsealed[lease_id]
        for block in blocks:
            right = 7 * block.frame + self.content[block.frame]
            assert block.checksum == (0 if block.frame in waiting else right)
        frames = [block.frame for block in blocks]
        num_sealed = min((frames.index(each) for each in waiting), default=len(frames))
        assert self.table.num_sealed(lease_id) == num_sealed
        is_kept = math.isinf(self.leases[lease_id][0])
        for num_wanted in (len(frames), len(frames) + 1):
            is_whole = self.table.is_whole(lease_id, num_wanted)
            assert is_whole == (len(frames) >= num_wanted or not is_kept)


def test_any_order_of_things(seed: int, scale: Callable[[int], int]) -> None:
    for round_number in range(scale(2000)):
        draw = random.Random(seed + round_number)
        model = Model()
        steps = [
            model.lend,
            model.lend,
            model.enter,
            model.computed,
            model.seal,
            model.hand_over,
            model.renew,
            model.release,
            model.hold,
            model.unhold,
            model.pin,
            model.pin_from,
            model.pass_time,
        ]
        for _ in range(30):
            draw.choice(steps)(draw)
            model.check()
        model.table.end_all()
        for hold_id in model.holds:
            model.table.unhold(hold_id)
        model.table.lapse(model.now_s + 3.0)
        assert model.table.num_lent == 0 and not any(model.kept.values())
        model.table.check_integrity()


def test_what_is_entered_is_nobodys_until_it_is_computed() -> None:
    given: list[int] = []
    table = ExportedBlocks(NUM_BLOCKS, 64, TTL_S, given.extend)
    lease_id, _ = table.lend([offer(1)])
    looks: list[int] = []
    table.watch(lease_id, lambda: looks.append(len(table.blocks_of(lease_id, 0))))
    _, entered = table.lend([offer(2, is_sealed=False)], lease_id, is_computed=False)
    assert looks == [] and not table.is_whole(lease_id, 2)
    assert table.hold(entered)[1] == [False]
    assert table.find_stale([(2, FIRST_GENERATION)]) == [0]
    assert (table.num_lent, table.counters.num_blocks_lent) == (2, 1)
    table.computed(lease_id, [2])
    assert looks == [2] and table.is_whole(lease_id, 2)
    assert table.unsealed_of(lease_id) == [2] and table.hold(entered)[1] == [True]
    assert (table.num_lent, table.counters.num_blocks_lent) == (2, 2)
    table.check_integrity()


def test_what_another_lends_that_has_computed_it_can_be_read() -> None:
    """As soon as it is in the cache, a second prompt may have it for its prefix."""
    given: list[int] = []
    table = ExportedBlocks(NUM_BLOCKS, 64, TTL_S, given.extend)
    first, _ = table.lend([offer(1, is_sealed=False)], is_computed=False)
    second, (block,) = table.lend([offer(1)])
    assert given == [1] and table.hold([block])[1] == [True]
    table.computed(first, [1])
    table.release([first], 0.0)
    assert given == [1] and table.counters.num_blocks_lent == 1
    table.check_lease(second, 0.0)
    table.check_integrity()


def test_a_kept_lease_does_not_lapse_and_a_handed_over_one_does() -> None:
    given: list[int] = []
    table = ExportedBlocks(NUM_BLOCKS, 64, TTL_S, given.extend)
    lease_id, _ = table.lend([offer(1), offer(2)])
    table.lapse(1e12)
    table.hand_over(lease_id, 1e9, 100.0)
    table.lapse(100.0 + TTL_S - 0.1)
    assert given == []
    table.lapse(100.0 + TTL_S)
    assert given == [1, 2] and table.counters.num_leases_lapsed == 1
    with pytest.raises(LeaseLapsed):
        table.hand_over(lease_id, 1.0, 100.0)
    with pytest.raises(LeaseLapsed):
        table.lend([offer(3)], lease_id)
    assert table.num_lent == 0


@pytest.mark.parametrize("is_entered", [False, True])
def test_who_watches_is_told_of_what_can_be_read(table: ExportedBlocks, is_entered: bool) -> None:
    """By then, and not behind that: a look may confirm and hold what it finds."""
    lease_id, _ = table.lend([offer(1)])
    held: list[list[bool]] = []

    def look() -> None:
        told = table.blocks_of(lease_id, 0)
        hold_id, is_held = table.hold(list(told))
        assert table.find_stale((block.frame, block.generation) for block in told) == []
        table.check_integrity()
        table.unhold(hold_id)
        held.append(is_held)

    table.watch(lease_id, look)
    table.lend([offer(2, is_sealed=False)], lease_id, is_computed=not is_entered)
    if is_entered:
        assert held == []
        table.computed(lease_id, [2])
    assert held == [[True, True]]


def test_another_content_under_a_lent_block_is_a_defect(table: ExportedBlocks) -> None:
    table.lend([offer(1)])
    with pytest.raises(StoreIntegrityError, match="another content"):
        table.lend([offer(2), offer(1, content=1)])
    assert (table.num_lent, table.num_leases) == (1, 1)


def test_bad_bytes_end_the_leases_that_name_them_and_no_other(table: ExportedBlocks) -> None:
    first, (block,) = table.lend([offer(1)])
    second, _ = table.lend([ExportOffer(1, block.chain_hash, 999, 16), offer(2)])
    assert table.checksums_of([block]) == [{block.checksum, 999}]
    assert table.drop({(1, block.checksum)}) == 1
    with pytest.raises(LeaseLapsed):
        table.check_lease(first, 0.0)
    table.check_lease(second, 0.0)
    assert table.num_lent == 2


@pytest.mark.parametrize("how", ["released", "damaged", "all ended"])
def test_what_a_reader_was_promised_stays_until_then_whatever_ends_its_lease(
    table: ExportedBlocks, how: str
) -> None:
    """Also where one of those that were asked for is stale, and not beyond its time."""
    lease_id, (one, other) = table.lend([offer(1), offer(2)])
    pairs = [(1, one.generation), (2, other.generation), (2, other.generation + 2)]
    assert table.pin(lease_id, pairs, 3.0, now_s=5.0) == (3.0, [2])
    if how == "released":
        table.release([lease_id], 5.0)
    elif how == "damaged":
        table.drop({(1, one.checksum)})
    else:
        table.end_all()
    table.lapse(7.9)
    assert table.find_stale(pairs) == [2] and (table.num_lent, table.num_pins) == (2, 1)
    table.check_integrity()
    table.lapse(8.0)
    assert table.find_stale(pairs) == [0, 1, 2] and (table.num_lent, table.num_pins) == (0, 0)
    table.check_integrity()


def test_nobody_is_told_that_bytes_are_bad_which_nobody_has_vouched_for(
    table: ExportedBlocks,
) -> None:
    lease_id, (block,) = table.lend([offer(1, is_sealed=False)])
    assert table.checksums_of([block]) == [set()]
    assert table.drop({(1, 0)}) == 0
    table.seal(lease_id, {1: 0})
    assert table.checksums_of([block]) == [{0}]
    assert table.drop({(1, 0)}) == 1


def _only(table: ExportedBlocks) -> ExportLease:
    (lease,) = table._leases
    return lease


def _handed_over(table: ExportedBlocks) -> ExportLease:
    table.hand_over(_only(table).lease_id, 1.0, 0.0)
    return _only(table)


def _held_alone(table: ExportedBlocks) -> ExportedBlock:
    """Of a lease that is over."""
    lease_id = _only(table).lease_id
    table.hold(table.blocks_of(lease_id, 0)[:1])
    table.release([lease_id], 0.0)
    return table._lent[1]


@pytest.mark.parametrize(
    ("spoil", "law"),
    [
        (lambda t: _only(t).unsealed.update({9: None}), "waits for a checksum and is not lent"),
        (lambda t: _handed_over(t).unsealed.update({1: None}), "handed over with a block"),
        (lambda t: _only(t).ahead.update({1: b""}), "lent and yet to be computed"),
        (lambda t: _handed_over(t).ahead.update({3: b""}), "handed over with a block"),
        (lambda t: setattr(t._lent[1], "is_computed", False), "not lent as its lease says"),
        (lambda t: setattr(_held_alone(t), "is_computed", False), "held, and not computed"),
        (lambda t: t._lent.pop(1), "not lent as its lease says"),
        (lambda t: setattr(t._lent[1], "num_leases", 2), "miscounted"),
        (lambda t: setattr(t._lent[1], "num_holds", 1), "miscounted"),
        (lambda t: t._generations.update({1: 4}), "not lent as its lease says"),
        (lambda t: t._generations.update({5: 3}), "odd"),
        (lambda t: t._leases.remove(_only(t).lease_id), "miscounted"),
        (lambda t: t._holds.update({"x": (3,)}), "not lent"),
        (lambda t: t._pins.update({"x": 1.0}), "promised blocks that are not held"),
    ],
)
def test_each_law_is_recomputed(
    table: ExportedBlocks, spoil: Callable[[ExportedBlocks], object], law: str
) -> None:
    table.lend([offer(1), offer(2)])
    table.check_integrity()
    spoil(table)
    with pytest.raises(StoreIntegrityError, match=law):
        table.check_integrity()


@pytest.mark.parametrize("how", ["released", "lapsed", "damaged", "all ended"])
def test_the_end_of_a_lease_is_told_once_however_it_comes(table: ExportedBlocks, how: str) -> None:
    lease_id, (block,) = table.lend([offer(1)])
    other, _ = table.lend([offer(2)])
    told: list[str] = []
    table.when_over(lease_id, lambda: told.append("first"))
    table.when_over(lease_id, lambda: told.append("second"))
    table.when_over(other, lambda: told.append("other"))
    table.hand_over(lease_id, 1.0, now_s=0.0)
    table.lapse(0.5)
    assert told == []
    if how == "released":
        table.release([lease_id], 0.5)
    elif how == "lapsed":
        table.lapse(1.0)
    elif how == "damaged":
        table.drop([(1, block.checksum)])
    else:
        table.end_all()
    table.release([lease_id], 2.0)
    assert told == ["first", "second", *(["other"] if how == "all ended" else [])]
    table.when_over(lease_id, lambda: told.append("late"))
    assert told[-1] == "late"
    table.check_integrity()
