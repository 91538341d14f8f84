"""10,000 bad blocks against a real store: none is used, each is counted, no good one is refused.

Two levels. Here the reader is the store's client, so that each block's bytes can be compared with
what was written; in the second half a whole prefill and decode worker read, and the tokens say
whether anything wrong was used (the fake model draws them from its KV).
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import block_hash, store_process
from kvstore.block_refs import Block
from kvstore.client import PutResult
from kvstore.config import KvStoreSettings
from kvstore.errors import INCARNATION, LEASE_LAPSED
from kvstore.slab import Slab
from process import entrypoint
from tests.chaos import damage
from tests.harness.handles import blocks_of
from tests.harness.prefill_decode_pair import Pair, pair
from tests.harness.store import FINGERPRINT, Worker
from tests.harness.waiting import within

pytestmark = pytest.mark.chaos

BLOCK_BYTES = 3001  # no multiple of anything
BLOCK_SIZE = 16
NUM_FRAMES = 48
MAX_CHAIN = 12
CALL_S = 20.0
POISON = 0xA5
NUM_BAD = 10_000
TRANSPORTS = ("shm", "nixl", "grpc")

Scale = Callable[[int], int]


class Hunt:
    """One writer, one reader, one store; and what was spoiled and found so far."""

    def __init__(
        self, rng: random.Random, store: store_process.RunningStore, writer: Worker, reader: Worker
    ) -> None:
        assert store.node.slab is not None
        self.rng = rng
        self.slab: Slab = store.node.slab
        self.writer = writer
        self.reader = reader
        self.num_bad = 0
        self.num_good = 0
        self.counted: Counter[str] = Counter()
        self.past: list[Block] = []
        """References of earlier rounds: their frames have other lives by now, or will have."""

    async def round(self) -> None:
        """Store a fresh chain, spoil some of it, read all of it."""
        put = await self._store_fresh(self.rng.randint(1, MAX_CHAIN))
        try:
            whole_call = self.rng.random()
            if whole_call < 0.05:
                await self._read_for_another_life(put)
            elif whole_call < 0.10:
                await self._read_after_the_lease(put)
                return
            else:
                await self._read_spoiled(put)
        finally:
            self.past = (self.past + list(put.refs))[-4 * NUM_FRAMES :]
            await self.writer.release(put.lease_id)

    async def _store_fresh(self, num_blocks: int) -> PutResult:
        rows = self.writer.view[:num_blocks]
        rows[:] = np.frombuffer(self.rng.randbytes(rows.size), dtype=np.uint8).reshape(rows.shape)
        root = block_hash.root_key(self.rng.randbytes(16), FINGERPRINT)
        chain = block_hash.chain(root, range(num_blocks * BLOCK_SIZE), BLOCK_SIZE)
        put = await self.writer.put(chain, range(num_blocks), deadline=within())
        assert len(put.refs) == num_blocks, "the store is too small for this test"
        return put

    async def _read_spoiled(self, put: PutResult) -> None:
        right: dict[int, frozenset[str]] = {}
        refs = list(put.refs)
        num_spoiled = self.rng.randint(0, len(refs))
        for index in self.rng.sample(range(len(refs)), num_spoiled):
            if self.rng.random() < 0.15 and (stale := self._stale()) is not None:
                refs[index], right[index] = stale, frozenset({"generation"})
                continue
            spoil = self.rng.choice(damage.OF_BYTES + damage.OF_REFERENCES)
            refs[index], right[index] = spoil(self.rng, self.slab, put.refs, index)
        failed = await self._read(put.lease_id, refs)
        assert failed.keys() == right.keys(), "a bad block was taken, or a good one refused"
        for index, reason in failed.items():
            assert reason in right[index], (reason, right[index])
        self._account(failed, len(refs))

    def _stale(self) -> Block | None:
        """A reference that was right once, to a frame that lives another life now."""
        gone = [ref for ref in self.past if self.slab.generations[ref.frame] != ref.generation]
        return self.rng.choice(gone) if gone else None

    async def _read_for_another_life(self, put: PutResult) -> None:
        """Whoever sent the references got them from a store of another incarnation."""
        failed = await self._read(put.lease_id, put.refs, incarnation=entrypoint.new_incarnation())
        assert failed == dict.fromkeys(range(len(put.refs)), INCARNATION)
        self._account(failed, len(put.refs))

    async def _read_after_the_lease(self, put: PutResult) -> None:
        """The lease is over, and others have written into all frames since."""
        await self.writer.release(put.lease_id)
        for _ in range(1 + NUM_FRAMES // MAX_CHAIN):
            flood = await self._store_fresh(MAX_CHAIN)
            await self.writer.release(flood.lease_id)
        failed = await self._read(put.lease_id, put.refs)
        assert failed == dict.fromkeys(range(len(put.refs)), LEASE_LAPSED)
        self._account(failed, len(put.refs))

    async def _read(
        self, lease_id: str, refs: Sequence[Block], *, incarnation: bytes | None = None
    ) -> dict[int, str]:
        """Read into poisoned blocks; every block that is not refused must be what was written."""
        self.reader.view[:] = POISON
        block_ids = self.rng.sample(range(len(self.reader.view)), len(refs))
        truth = self.writer.view[: len(refs)].copy()
        result = await self.reader.client.get_blocks(
            lease_id, list(zip(refs, block_ids, strict=True)), within(), incarnation=incarnation
        )
        assert result.num_bytes == (len(refs) - len(result.failed)) * BLOCK_BYTES
        for index, block_id in enumerate(block_ids):
            if index not in result.failed:
                assert np.array_equal(self.reader.view[block_id], truth[index])
        untouched = np.delete(self.reader.view, block_ids, axis=0)
        assert np.all(untouched == POISON), "a block that nobody named was written into"
        return dict(result.failed)

    def _account(self, failed: dict[int, str], num_read: int) -> None:
        self.counted.update(failed.values())
        self.num_bad += len(failed)
        self.num_good += num_read - len(failed)


@asynccontextmanager
async def hunt(rng: random.Random, transport: str) -> Any:
    """A store, a writer and a reader; in the end nothing may be held."""
    settings = KvStoreSettings(
        capacity_bytes=NUM_FRAMES * 4096, integrity_interval_s=0.05, quarantine_grace_s=0.2
    )
    async with store_process.running(settings) as store:
        writer = Worker(transport, BLOCK_BYTES, MAX_CHAIN, rng.randrange(2**31))
        reader = Worker(transport, BLOCK_BYTES, 2 * MAX_CHAIN, rng.randrange(2**31))
        await writer.attach(store.address)
        await reader.attach(store.address)
        try:
            yield Hunt(rng, store, writer, reader)
            # While the store looks into a report it holds the blocks itself.
            await reader.client.settle()
            status = await writer.status()
            held = (status.num_writing, status.num_quarantined, status.num_leases)
            assert held == (0, 0, 0), "something is held for nobody"
        finally:
            await writer.client.close()
            await reader.client.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_no_bad_block_is_used_and_each_is_counted(
    transport: str, seed: int, scale: Scale
) -> None:
    """A wrong block passes a 64-bit checksum once in 2^64: a failure here is no bad luck."""
    goal = scale(NUM_BAD)
    async with hunt(random.Random(f"{seed}-{transport}-bad"), transport) as made:
        while made.num_bad < goal:
            await made.round()
        assert made.counted.total() == made.num_bad >= goal
        assert made.num_good > 0
        assert made.counted.keys() >= {"checksum", "generation"}


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_bytes_that_change_while_they_are_read_are_never_used(
    transport: str, seed: int, scale: Scale
) -> None:
    """Frames are spoiled and mended all the time, also between a copy and its check: what is taken
    is right, whatever else."""
    rng = random.Random(f"{seed}-{transport}-changing")
    async with hunt(rng, transport) as made:
        put = await made._store_fresh(MAX_CHAIN)
        stop = threading.Event()

        def spoil_and_mend() -> None:
            turns = random.Random(f"{seed}-{transport}-turns")
            while not stop.is_set():
                frame = made.slab.block(turns.randrange(NUM_FRAMES))
                at = turns.randrange(BLOCK_BYTES)
                frame[at] ^= 0x10
                stop.wait(turns.choice((0.0, 0.0001, 0.001)))
                frame[at] ^= 0x10

        spoiler = threading.Thread(target=spoil_and_mend)
        spoiler.start()
        counted: Counter[str] = Counter()
        try:
            for _ in range(scale(2000)):
                failed = await made._read(put.lease_id, put.refs)  # compares what was taken
                counted.update(failed.values())
                if "generation" in failed.values():
                    # A reader reported it while it was bad, and the store has dropped it.
                    await made.writer.release(put.lease_id)
                    put = await made._store_fresh(MAX_CHAIN)
        finally:
            stop.set()
            spoiler.join(CALL_S)
        assert counted.keys() <= {"checksum", "generation"}
        assert counted["checksum"] > 0, "the spoiler never met a reader: the test tests nothing"
        await made.writer.release(put.lease_id)


@pytest.mark.parametrize("transport", ("shm", "grpc"))
async def test_flips_anywhere_in_the_slab_heal(transport: str, seed: int, scale: Scale) -> None:
    """Bits of blocks and of generation words turn over under load: every block that is read is what
    was written, and after the last flip all of them are read from the store again."""
    rng = random.Random(f"{seed}-{transport}-slab")
    async with hunt(rng, transport) as made:
        chain = [bytes([index + 1]) * 16 for index in range(MAX_CHAIN)]
        made.writer.view[:] = np.frombuffer(
            rng.randbytes(made.writer.view.size), dtype=np.uint8
        ).reshape(made.writer.view.shape)
        num_flips, num_read, refused = 0, 0, Counter[str]()

        async def turn() -> dict[int, str]:
            """Store what is missing, read all of it, give the lease back."""
            nonlocal num_read
            put = await made.writer.put(chain, range(MAX_CHAIN), deadline=within())
            try:
                failed = await made._read(put.lease_id, put.refs)
            finally:
                await made.writer.release(put.lease_id)
            await made.reader.client.settle()
            num_read += MAX_CHAIN - len(failed)
            refused.update(failed.values())
            return failed

        await turn()
        while num_flips < scale(NUM_BAD):
            for _ in range(rng.randint(1, 4)):
                frame = rng.randrange(NUM_FRAMES if rng.random() < 0.1 else MAX_CHAIN)
                if rng.random() < 0.5:
                    made.slab.generations[frame] ^= np.uint64(1 << rng.randrange(64))
                else:
                    made.slab.block(frame)[rng.randrange(BLOCK_BYTES)] ^= 1 << rng.randrange(8)
                num_flips += 1
            await turn()
        await turn()  # the last readers that meet the damage report it
        written = (await made.writer.status()).num_bytes_written
        assert await turn() == {}
        assert (await made.writer.status()).num_bytes_written == written, "a block was put again"
        words = {"generation"} if transport == "shm" else set()
        assert refused.keys() == {"checksum"} | words
        assert num_read > 0


# -- pages of the file tier


async def _demoted(store: store_process.RunningStore, num_pages: int) -> None:
    """Until that many pages are in use and nothing moves."""
    async with asyncio.timeout(CALL_S):
        while True:
            assert store.node.store is not None
            moves = store.node.store.table
            if moves.num_demoted >= num_pages and not moves.num_moving:
                return
            await asyncio.sleep(0.005)


def _spoil_file(rng: random.Random, path: Path, num_bits: int) -> None:
    """Bits anywhere behind the file's own header: in pages' headers, in pages, in neither."""
    size = path.stat().st_size
    with path.open("r+b", buffering=0) as pages:
        for _ in range(num_bits):
            at = rng.randrange(4096, size)
            (byte,) = os.pread(pages.fileno(), 1, at)
            os.pwrite(pages.fileno(), bytes([byte ^ 1 << rng.randrange(8)]), at)


async def test_no_bad_page_is_used_in_this_life_or_the_next(
    tmp_path: Path, seed: int, scale: Scale
) -> None:
    """Blocks go to the file tier, bits turn over there, the store is asked again: each block that
    comes is what was written, and some must be found bad."""
    rng = random.Random(f"{seed}-pages")
    settings = KvStoreSettings(
        node_id="with-files",
        capacity_bytes=NUM_FRAMES * 4096,
        file_tier_dir=str(tmp_path),
        file_tier_bytes=12 * NUM_FRAMES * 4096,
        demote_below_free=0.5,
        integrity_interval_s=0.05,
    )
    num_bad = num_good = 0
    truth: dict[bytes, bytes] = {}
    earlier: list[list[bytes]] = []
    """Chains of earlier lives: what is left of them lies in pages only."""
    for life in range(max(3, scale(40))):
        async with store_process.running(settings) as store:
            writer = Worker("shm", BLOCK_BYTES, MAX_CHAIN, seed + life)
            await writer.attach(store.address)
            try:
                chains = [
                    await _store_chain(rng, writer, truth)
                    for _ in range(4 * NUM_FRAMES // MAX_CHAIN)
                ]
                await _demoted(store, NUM_FRAMES)
                (path,) = tmp_path.glob("*.baton-pages")
                _spoil_file(rng, path, rng.randint(20, 400))
                for chain in rng.sample(chains + earlier, len(chains + earlier)):
                    num_good += await _read_back(writer, chain, truth)
                earlier = (earlier + chains)[-48:]
                status = await writer.status()
                assert status.file_tier_problem == ""
                num_bad += status.num_pages_bad
            finally:
                await writer.client.close()
    assert num_bad > 0 and num_good > 0


async def _store_chain(
    rng: random.Random, writer: Worker, truth: dict[bytes, bytes]
) -> list[bytes]:
    rows = writer.view
    rows[:] = np.frombuffer(rng.randbytes(rows.size), dtype=np.uint8).reshape(rows.shape)
    root = block_hash.root_key(rng.randbytes(16), FINGERPRINT)
    chain = block_hash.chain(root, range(MAX_CHAIN * BLOCK_SIZE), BLOCK_SIZE)
    put = await writer.put(chain, range(MAX_CHAIN), deadline=within())
    await writer.release(put.lease_id)
    truth |= {chain_hash: row.tobytes() for chain_hash, row in zip(chain, rows, strict=True)}
    return chain


async def _read_back(writer: Worker, chain: list[bytes], truth: dict[bytes, bytes]) -> int:
    """Returns: how many blocks came; each is compared with what was written."""
    matched = await writer.match(chain)
    writer.view[:] = POISON
    items = list(zip(matched.blocks, range(MAX_CHAIN), strict=False))
    got = await writer.client.get_blocks(matched.lease_id, items, within())
    assert not got.failed, "a block that the store brought from a page and checked was bad"
    for block, row in items:
        assert block.chain_hash == chain[row]
        assert writer.view[row].tobytes() == truth[block.chain_hash]
    await writer.release(matched.lease_id)
    return len(items)


# -- through prefill and decode


async def _spoiled_request(p: Pair, rng: random.Random, name: str) -> tuple[int, Counter[str]]:
    """One request, several of whose blocks are spoiled in the store between prefill and decode.

    Returns: how many were spoiled, and what decode counted.
    """
    num_tokens = rng.randint(6, 60)
    prompt = tuple(rng.randrange(1, 97) for _ in range(num_tokens))
    async with p.stream() as stream:
        key = await stream.reserve(p.reserve(prompt, name=name))
        assert (await stream.next(key)).reserved.num_tokens_local == 0
        reply = await p.run_prefill(prompt, name=name)
        handle = reply.handle
        frames = [block.frame for run in handle.runs for block in blocks_of(run)]
        frames += [block.frame for block in blocks_of(handle.tail)]
        bad = sorted(rng.sample(range(len(frames)), rng.randint(1, len(frames))))
        for index in bad:
            _spoil_frame(rng, p.store.node.slab, frames[index])
        await stream.generate(key, reply)
        answer = await stream.collect(key)
    assert [*reply.token_ids, *answer.token_ids] == p.expected(prompt, 8)
    # The first bad block ends what can be used, and what lies behind it shares its reason.
    assert answer.recomputed == {"checksum": len(frames) - bad[0]}
    return len(bad), Counter(answer.recomputed)


def _spoil_frame(rng: random.Random, slab: Slab, frame: int) -> None:
    ref = Block(b"", frame, int(slab.generations[frame]), 0, 0)
    spoil = rng.choice((damage.one_bit, damage.torn, damage.exchanged))
    spoil(rng, slab, [ref], 0)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_tokens_are_exact_however_many_blocks_are_bad(
    tmp_path: Path, transport: str, seed: int, scale: Scale
) -> None:
    rng = random.Random(f"{seed}-{transport}-tokens")
    async with pair(tmp_path, transport=transport) as p:
        num_bad = 0
        counted: Counter[str] = Counter()
        while num_bad < scale(NUM_BAD // 10):
            spoiled, reasons = await _spoiled_request(p, rng, f"r{secrets.token_hex(8)}")
            num_bad += spoiled
            counted += reasons
        status = {c.reason: c.num_blocks for c in p.decode.core.status().recomputed}
        assert status == dict(counted), "the worker's own account differs from its requests'"
        assert counted["checksum"] >= num_bad
        await p.check()
