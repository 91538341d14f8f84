"""Random sequences of everything that workers can do; every law is recomputed after each step.

Beside the store's own check_integrity a model of our own keeps what must be true: which chains were
committed with which contents, and what a reader with a lease may rely on.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.block_refs import Block
from kvstore.block_store import StoreLimits, WrittenFrame
from kvstore.errors import LeaseLapsed, UnknownAttachment
from kvstore.slot_pool import SlotState
from process.rpc_errors import FailedPrecondition
from tests.conftest import examples
from tests.unit.kvstore.store_driver import StoreDriver

NUM_FRAMES = 6
TTL_S = 10.0


def _hash(chain: int, index: int) -> bytes:
    """Chain 1 branches off chain 0 after two blocks."""
    return bytes([0 if index < 2 else chain, index]).rjust(16, b"h")


def _chain(chain: int, length: int) -> list[bytes]:
    return [_hash(chain, i) for i in range(length)]


class StoreMachine(RuleBasedStateMachine):
    """Three workers, two of them one-sided; two branching chains of up to five blocks."""

    def __init__(self) -> None:
        super().__init__()
        limits = StoreLimits(max_ttl_s=50.0, quarantine_grace_s=7.0)
        self.driver = StoreDriver(NUM_FRAMES, 100, limits)
        self.store = self.driver.store
        self.now_s = 0.0
        self.lives = [0, 0, 0]
        self.workers: list[str] = []
        self.leases: dict[str, float] = {}  # lease -> its earliest end, as its owner knows it
        self.pinned: dict[str, dict[int, Block]] = {}
        self.writing: dict[str, tuple[int, list[WrittenFrame]]] = {}  # lease -> (worker, frames)
        self.unsettled: list[tuple[int, list[WrittenFrame]]] = []
        self.bad: set[tuple[int, int]] = set()

    @initialize()
    def attach_all(self) -> None:
        self.workers = [self._attach(i) for i in range(3)]

    def _attach(self, worker: int) -> str:
        one_sided = worker != 2
        attachment = self.store.attach(
            f"w{worker}",
            bytes([self.lives[worker]]),
            "shm" if one_sided else "grpc",
            one_sided,
            self.now_s,
        )
        return attachment.attachment_id

    def _alive(self, lease_id: str) -> bool:
        return self.leases.get(lease_id, -1.0) > self.now_s

    @rule(
        worker=st.integers(0, 2),
        chain=st.integers(0, 1),
        start=st.integers(0, 3),
        length=st.integers(0, 3),
        tail=st.booleans(),
        lease=st.none() | st.integers(0, 5),
    )
    def reserve(
        self, worker: int, chain: int, start: int, length: int, tail: bool, lease: int | None
    ) -> None:
        ids = list(self.leases)
        lease_id = ids[lease % len(ids)] if lease is not None and ids else ""
        hashes = _chain(chain, start + length)
        parent = hashes[start - 1] if start else b""
        try:
            lease_id, answers, tail_answer = self.driver.reserve(
                self.workers[worker],
                parent,
                hashes[start:],
                tail_name="tail" if tail else "",
                lease_id=lease_id,
                ttl_s=TTL_S,
                now_s=self.now_s,
            )
        except FailedPrecondition:
            assert parent and parent not in self.driver.present
            return
        except LeaseLapsed:
            assert not self._alive(lease_id)
            return
        self.leases[lease_id] = max(self.leases.get(lease_id, 0.0), self.now_s + TTL_S)
        all_answers = [*answers, *([tail_answer] if tail_answer else [])]
        rooms = [answer.has_room for answer in all_answers]
        assert rooms == sorted(rooms, reverse=True)
        for answer in all_answers:
            if answer.block is not None:
                self.pinned.setdefault(lease_id, {})[answer.block.frame] = answer.block
            elif self._is_writer(worker, lease_id, answer.frame):
                frames = self.writing.setdefault(lease_id, (worker, []))[1]
                written = WrittenFrame(answer.frame, answer.generation, answer.frame, 16)
                if written not in frames:
                    frames.append(written)

    def _is_writer(self, worker: int, lease_id: str, frame: int) -> bool:
        """Workers may share a lease; asked for again, a frame is still that of who asked first."""
        if frame < 0 or self.writing.get(lease_id, (worker, []))[0] != worker:
            return False
        return self.driver.writer_of(lease_id, frame) == self.workers[worker]

    @precondition(lambda self: self.writing)
    @rule(pick=st.integers(0, 9), count=st.integers(1, 4))
    def commit(self, pick: int, count: int) -> None:
        lease_id = list(self.writing)[pick % len(self.writing)]
        worker, frames = self.writing[lease_id]
        part = frames[:count]
        try:
            blocks = self.driver.commit(self.workers[worker], lease_id, part, self.now_s)
        except FailedPrecondition:
            return  # its parent was reserved by another worker under this lease, or aborted
        except LeaseLapsed:
            assert not self._alive(lease_id) or self.lives[worker] > 0
            del self.writing[lease_id]
            return
        self._forget_written(lease_id, len(part))
        for block in blocks:
            self.pinned.setdefault(lease_id, {})[block.frame] = block

    def _forget_written(self, lease_id: str, count: int) -> None:
        worker, frames = self.writing[lease_id]
        self.writing[lease_id] = (worker, frames[count:])
        if not frames[count:]:
            del self.writing[lease_id]

    @precondition(lambda self: self.writing)
    @rule(pick=st.integers(0, 9), quarantine=st.booleans())
    def abort(self, pick: int, quarantine: bool) -> None:
        lease_id = list(self.writing)[pick % len(self.writing)]
        worker, frames = self.writing[lease_id]
        self.driver.abort(
            self.workers[worker], lease_id, frames, quarantine=quarantine, now_s=self.now_s
        )
        del self.writing[lease_id]
        if quarantine:
            self.unsettled.append((worker, frames))

    @precondition(lambda self: self.unsettled)
    @rule()
    def settle(self) -> None:
        """The second word: it may come late, from a later life, or after the lease."""
        worker, frames = self.unsettled.pop(0)
        self.driver.abort(self.workers[worker], "", frames, quarantine=False, now_s=self.now_s)

    @rule(chain=st.integers(0, 1), length=st.integers(0, 5), pin=st.booleans())
    def match(self, chain: int, length: int, pin: bool) -> None:
        hashes = _chain(chain, length)
        match = self.store.match(hashes, pin=pin, ttl_s=TTL_S, now_s=self.now_s)
        blocks, lease_id = match.blocks, match.lease_id
        expected = 0
        while expected < length and hashes[expected] in self.driver.present:
            expected += 1
        assert [block.chain_hash for block in blocks] == hashes[:expected]
        assert bool(lease_id) == (pin and expected > 0)
        if lease_id:
            self.leases[lease_id] = self.now_s + TTL_S
            self.pinned[lease_id] = {block.frame: block for block in blocks}

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 9))
    def release(self, pick: int) -> None:
        lease_id = list(self.leases)[pick % len(self.leases)]
        ended = self.store.release([lease_id], now_s=self.now_s)
        assert ended == int(self._alive(lease_id))
        del self.leases[lease_id]
        self.pinned.pop(lease_id, None)

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 9), ttl_s=st.sampled_from([0.0, 3.0, 20.0]))
    def renew(self, pick: int, ttl_s: float) -> None:
        lease_id = list(self.leases)[pick % len(self.leases)]
        try:
            self.store.renew(lease_id, ttl_s=ttl_s, now_s=self.now_s)
        except LeaseLapsed:
            assert not self._alive(lease_id)
        else:
            self.leases[lease_id] = max(self.leases[lease_id], self.now_s + ttl_s)

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.store.lapse(self.now_s)

    @rule(worker=st.integers(0, 2), detach=st.booleans())
    def restart(self, worker: int, detach: bool) -> None:
        if detach:
            self.store.detach(self.workers[worker], self.now_s)
        self.lives[worker] += 1
        old, self.workers[worker] = self.workers[worker], self._attach(worker)
        try:
            self.driver.check_reservation(old, "", 0, 1, self.now_s)
        except UnknownAttachment:
            return
        raise AssertionError("an earlier life may still write")

    @rule(pick=st.integers(0, NUM_FRAMES - 1))
    def hold_and_let_go(self, pick: int) -> None:
        blocks = [b for held in self.pinned.values() for b in held.values()][pick : pick + 2]
        hold_id, _ = self.store.hold(blocks)
        self.driver.check_integrity()
        self.store.unhold(hold_id)

    @precondition(lambda self: self.pinned)
    @rule(pick=st.integers(0, 9), which=st.integers(0, 4))
    def damage(self, pick: int, which: int) -> None:
        """A pinned block turns out bad: it is stale at once, and nothing below it is present."""
        blocks = list(self.pinned[list(self.pinned)[pick % len(self.pinned)]].values())
        if not blocks:
            return
        block = blocks[which % len(blocks)]
        holds = self.store.checksums_of([block])[0] is not None
        self.store.drop([block])
        assert self.store.checksums_of([block]) == [None]
        if holds:
            self.bad.add((block.frame, block.generation))

    @invariant()
    def every_law_holds(self) -> None:
        self.driver.check_integrity()

    @invariant()
    def presence_is_prefix_closed(self) -> None:
        for chain in (0, 1):
            there = [chain_hash in self.driver.present for chain_hash in _chain(chain, 7)]
            assert there == sorted(there, reverse=True)
        assert len(set(self.driver.present)) == len(self.driver.present)

    @invariant()
    def what_a_living_lease_pins_is_still_what_it_was(self) -> None:
        for lease_id, blocks in self.pinned.items():
            if self._alive(lease_id):
                for frame, block in blocks.items():
                    if (frame, block.generation) in self.bad:
                        assert self.driver.generations[frame] != block.generation
                        continue
                    assert self.driver.is_committed(frame)
                    assert self.driver.generations[frame] == block.generation

    def teardown(self) -> None:
        """When all leases and workers are gone, only unpinned blocks are left."""
        for worker in self.workers:
            self.store.detach(worker, self.now_s)
        self.now_s += 1000.0
        self.store.lapse(self.now_s)
        self.driver.check_integrity()
        assert len(self.store.leases) == 0
        assert self.store.num_pinned() == 0
        assert self.driver.count(SlotState.COMMITTED) == len(self.driver.present)
        free = self.driver.count(SlotState.FREE)
        assert free + len(self.driver.present) == NUM_FRAMES


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=examples(200), stateful_step_count=40, deadline=None
)
