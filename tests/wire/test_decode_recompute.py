"""What must not be used is not used: a corrupt, stale, foreign or missing block is computed again,
counted by reason, and the tokens are those of one engine all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from process import incarnation, keys
from protos import common_pb2, prefill_pb2
from services.worker import handle as handles
from tests.harness.gated_engine import prompt_of
from tests.harness.handles import blocks_of, forge, set_blocks
from tests.harness.prefill_decode_pair import Answer, Pair, pair
from tests.harness.waiting import until

PROMPT = prompt_of(30, start=3)
NUM_BLOCKS = 8  # seven full ones and the tail

Spoil = Callable[[Pair, common_pb2.KvHandle], None]


async def generate_spoiled(p: Pair, spoil: Spoil, *, is_signed: bool = True) -> Answer:
    """A request whose handle (or what it names) is spoiled between prefill and decode; by someone
    who has the key, or by someone who has not.
    """
    async with p.stream() as stream:
        key = await stream.reserve(p.reserve(PROMPT))
        assert (await stream.next(key)).reserved.num_tokens_local == 0
        reply = await p.run_prefill(PROMPT)
        spoil(p, reply.handle)
        if is_signed:
            handles.sign(reply.handle, p.prefill.core.handle_keys)
        await stream.generate(key, reply)
        answer = await stream.collect(key)
    answer.token_ids[:0] = reply.token_ids
    assert answer.token_ids == p.expected(PROMPT, 8)
    num_from_store = sum(count.num_tokens for count in answer.leg.from_store)
    leg = answer.leg
    assert leg.num_tokens_computed + leg.num_tokens_local + num_from_store == len(PROMPT)
    return answer


def flip_byte(p: Pair, frame: int) -> None:
    """One bit of a committed frame, behind everybody's back."""
    slab = p.store.node.slab
    slab.frames[frame, 3] ^= 1


def corrupt(index: int) -> Spoil:
    return lambda p, handle: flip_byte(p, blocks_of(handle.runs[0])[index].frame)


def corrupt_tail(p: Pair, handle: common_pb2.KvHandle) -> None:
    flip_byte(p, blocks_of(handle.tail)[0].frame)


def older(p: Pair, handle: common_pb2.KvHandle) -> None:
    run = handle.runs[0]
    forge(run, 4, generation=blocks_of(run)[4].generation + 2)


def foreign_block(p: Pair, handle: common_pb2.KvHandle) -> None:
    forge(handle.runs[0], 5, chain_hash=bytes(16))


def other_tenant(p: Pair, handle: common_pb2.KvHandle) -> None:
    handle.tenant = "somebody else"


def other_model(p: Pair, handle: common_pb2.KvHandle) -> None:
    handle.model_fingerprint = bytes(32)


def other_store_life(p: Pair, handle: common_pb2.KvHandle) -> None:
    for run in (handle.runs[0], handle.tail):
        run.store_incarnation = incarnation.new()


def other_store(p: Pair, handle: common_pb2.KvHandle) -> None:
    for run in (handle.runs[0], handle.tail):
        run.node_id = "elsewhere"


def too_old(p: Pair, handle: common_pb2.KvHandle) -> None:
    handle.deadline_unix_ms = 1


def gap(p: Pair, handle: common_pb2.KvHandle) -> None:
    handle.runs[0].first_block = 1


def shortened(p: Pair, handle: common_pb2.KvHandle) -> None:
    set_blocks(handle.runs[0], blocks_of(handle.runs[0])[:3])
    handle.ClearField("tail")
    handle.num_tokens = 12


def unknown_lease(p: Pair, handle: common_pb2.KvHandle) -> None:
    for run in (handle.runs[0], handle.tail):
        run.lease_id = "no such lease"


def no_lease(p: Pair, handle: common_pb2.KvHandle) -> None:
    for run in (handle.runs[0], handle.tail):
        run.lease_id = ""


def other_version(p: Pair, handle: common_pb2.KvHandle) -> None:
    handle.version = 99


def too_long(p: Pair, handle: common_pb2.KvHandle) -> None:
    handle.num_tokens = 1000


CASES: list[tuple[Spoil, str, int]] = [
    (corrupt(0), "checksum", 8),
    (corrupt(3), "checksum", 5),
    (corrupt(6), "checksum", 2),
    (corrupt_tail, "checksum", 1),
    (older, "generation", 4),
    (foreign_block, "fingerprint", 3),
    (other_model, "fingerprint", 8),
    (other_store_life, "incarnation", 8),
    (gap, "fingerprint", 8),
    (shortened, "missing", 5),
    (too_long, "fingerprint", 8),
]


@pytest.mark.parametrize(("spoil", "reason", "num_blocks"), CASES)
async def test_spoiled_blocks_are_computed_again_and_counted(
    tmp_path: Path, spoil: Spoil, reason: str, num_blocks: int
) -> None:
    async with pair(tmp_path) as p:
        answer = await generate_spoiled(p, spoil)
        assert answer.recomputed == {reason: num_blocks}
        num_usable = (NUM_BLOCKS - num_blocks) * 4
        assert answer.leg.num_tokens_computed == len(PROMPT) - num_usable
        status = p.decode.core.status()
        assert [(c.reason, c.num_blocks) for c in status.recomputed] == [(reason, num_blocks)]
        await p.check()


@pytest.mark.parametrize("spoil", [unknown_lease, no_lease])
async def test_without_a_lease_tokens_are_exact_whatever_the_store_says(
    tmp_path: Path, spoil: Spoil
) -> None:
    """The blocks may still be there and verify; then they are used, else counted."""
    async with pair(tmp_path) as p:
        answer = await generate_spoiled(p, spoil)
        assert set(answer.recomputed) <= {"lease_lapsed", "transport", "missing"}
        await p.check(leases=1)  # the real one lapses by itself


FORGED: list[Spoil] = [
    older,
    foreign_block,
    other_tenant,
    other_model,
    other_store,
    gap,
    shortened,
    no_lease,
    lambda p, handle: setattr(handle, "deadline_unix_ms", handle.deadline_unix_ms + 1),
    lambda p, handle: setattr(handle, "nonce", bytes(16)),
    lambda p, handle: setattr(handle, "is_partial", True),
    lambda p, handle: setattr(handle, "signature", b""),
    lambda p, handle: setattr(handle, "key_id", "another"),
]


@pytest.mark.parametrize("spoil", FORGED)
async def test_what_was_changed_without_the_key_is_not_believed(
    tmp_path: Path, spoil: Spoil
) -> None:
    """Nothing of it is: not even the lease that it names is given back."""
    async with pair(tmp_path) as p:
        answer = await generate_spoiled(p, spoil, is_signed=False)
        assert answer.recomputed == {"signature": NUM_BLOCKS}
        assert answer.leg.num_tokens_computed == len(PROMPT)
        await p.check(leases=1)


async def test_a_handle_is_good_for_one_use(tmp_path: Path) -> None:
    """The second use computes the prompt; the first keeps what it has."""
    async with pair(tmp_path) as p, p.stream() as stream:
        reply = await p.run_prefill(PROMPT)
        reasons = []
        for _ in range(2):
            key = await stream.reserve(p.reserve(PROMPT))
            assert (await stream.next(key)).HasField("reserved")
            await stream.generate(key, reply)
            answer = await stream.collect(key)
            assert [*reply.token_ids, *answer.token_ids] == p.expected(PROMPT, 8)
            reasons.append(answer.recomputed)
        assert reasons[0] == {}
        assert set(reasons[1]) == {"replayed"}
        await p.check()


async def test_a_key_that_is_rotated_between_prefill_and_decode_still_verifies(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as p:
        first = p.prefill.core.handle_keys.key_ids

        def rotate(p: Pair, handle: common_pb2.KvHandle) -> None:
            assert handle.key_id == first[0]
            keys.rotate(Path(p.prefill.core.settings.handle_keys_file))

        answer = await generate_spoiled(p, rotate, is_signed=False)
        assert answer.recomputed == {}
        answer = await p.generate(prompt_of(30, start=8), name="next")
        assert answer.recomputed == {}
        assert answer.prefill is not None and answer.prefill.handle.key_id not in first
        assert p.decode.core.handle_keys.num_reloads == 1
        await p.check()


async def test_a_handle_that_is_too_old_is_not_used(tmp_path: Path) -> None:
    """Its lease is over by then; this one, whose lease is not, lapses by itself."""
    async with pair(tmp_path) as p:
        answer = await generate_spoiled(p, too_old)
        assert answer.recomputed == {"deadline": NUM_BLOCKS}
        await p.check(leases=1)


async def test_a_handle_of_a_store_that_is_not_there_is_not_used(tmp_path: Path) -> None:
    """Another node answers at its address; its lease is not found either, and lapses."""
    async with pair(tmp_path) as p:
        answer = await generate_spoiled(p, other_store)
        assert answer.recomputed == {"incarnation": NUM_BLOCKS}
        await p.check(leases=1)


async def test_a_handle_of_another_tenant_is_not_used(tmp_path: Path) -> None:
    """Nor is the lease that it names given back: it is not this request's."""
    async with pair(tmp_path) as p:
        answer = await generate_spoiled(p, other_tenant)
        assert answer.recomputed == {"fingerprint": NUM_BLOCKS}
        await p.check(leases=1)


@pytest.mark.parametrize("is_signed", [True, False])
async def test_a_handle_of_another_version_is_not_read(tmp_path: Path, is_signed: bool) -> None:
    """Not even for its lease, which lapses by itself. How another version signs is not known
    here: it is no forgery that is counted."""
    async with pair(tmp_path) as p:
        answer = await generate_spoiled(p, other_version, is_signed=is_signed)
        assert answer.recomputed == {"version": NUM_BLOCKS}
        await p.check(leases=1)


async def test_no_handle_is_said_and_computed(tmp_path: Path) -> None:
    async with pair(tmp_path) as p, p.stream() as stream:
        key = await stream.reserve(p.reserve(PROMPT))
        await stream.next(key)
        first = p.expected(PROMPT, 1)
        await stream.generate(key, prefill_pb2.PrefillReply(token_ids=first))
        answer = await stream.collect(key)
        assert [*first, *answer.token_ids] == p.expected(PROMPT, 8)
        assert answer.recomputed == {"missing": 8}
        assert answer.leg.num_tokens_computed == len(PROMPT)
        await p.check()


async def test_a_store_without_room_makes_the_handle_shorter(tmp_path: Path) -> None:
    """Four frames for eight blocks: what fits is handed over, the rest is computed again and
    said.
    """
    async with pair(tmp_path, num_frames=4) as p:
        answer = await p.generate(PROMPT)
        assert answer.token_ids == p.expected(PROMPT, 8)
        assert answer.prefill is not None
        num_stored = answer.prefill.handle.num_tokens // 4
        assert 0 < num_stored <= 4
        not_stored = {c.reason: c.num_blocks for c in answer.prefill.leg.not_stored}
        assert not_stored == {"no_room": NUM_BLOCKS - num_stored}
        assert answer.recomputed == {"missing": NUM_BLOCKS - num_stored}
        assert answer.leg.num_tokens_computed == len(PROMPT) - 4 * num_stored
        await p.check()


async def test_a_corrupt_frame_at_prefill_is_computed_again_and_counted(tmp_path: Path) -> None:
    """Prefill takes the prefix from the store, finds one block wrong, and says so."""
    async with pair(tmp_path, prefill_blocks=64) as p:
        first = await p.run_prefill(PROMPT, name="first")
        for start in range(60, 63):
            await p.run_prefill(prompt_of(200, start=start), name=f"f{start}", wants_handle=False)
        flip_byte(p, blocks_of(first.handle.runs[0])[2].frame)
        again = await p.run_prefill(PROMPT, name="again")
        assert list(again.token_ids) == p.expected(PROMPT, 1)
        assert {c.reason: c.num_blocks for c in again.leg.recomputed} == {"checksum": 5}
        assert [count.num_tokens for count in again.leg.from_store] == [8]
        assert again.leg.num_tokens_computed == len(PROMPT) - 8
        # The store looked for itself and dropped it; the first handle's lease still pins its frame.
        connector = p.prefill.core.connector
        leases = [reply.handle.runs[0].lease_id for reply in (first, again)]
        connector.release_later(connector.client, leases)
        await p.check()


async def test_a_restarted_store_is_another_one(tmp_path: Path) -> None:
    """Between prefill and decode the store dies and comes back empty: nothing of it is used."""
    async with pair(tmp_path) as p, p.stream() as stream:
        key = await stream.reserve(p.reserve(PROMPT))
        await stream.next(key)
        reply = await p.run_prefill(PROMPT)
        await p.kill_store()
        await p.start_store()
        old = reply.handle.runs[0].store_incarnation
        connector = p.decode.core.connector
        await until(lambda: connector.client is not None and connector.client.incarnation != old)
        await stream.generate(key, reply)
        answer = await stream.collect(key)
        assert [*reply.token_ids, *answer.token_ids] == p.expected(PROMPT, 8)
        assert answer.recomputed == {"incarnation": 8}
        await p.reattached()
        await p.check()
