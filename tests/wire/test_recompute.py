"""What must not be used is not used: a corrupt, stale, foreign or missing block is computed again,
counted by reason, and the tokens are those of one engine all the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from protos import common_pb2
from tests.harness.gated_engine import prompt_of
from tests.harness.handles import blocks_of, changed, forge, set_blocks, sign
from tests.harness.prefill_decode_pair import Answer, Pair, pair

pytestmark = [pytest.mark.oracle, pytest.mark.asyncio(loop_scope="module")]

NUM_TOKENS = 30
NUM_BLOCKS = 8  # seven full ones and the tail

Spoil = Callable[[Pair, common_pb2.KvHandle], None]


async def generate_spoiled(
    p: Pair, spoil: Spoil, *, is_signed: bool = True, lapses: bool = False
) -> Answer:
    """A request whose handle (or what it names) is spoiled between prefill and decode, and signed
    again where `is_signed`. lapses: nothing gives its lease back."""
    prompt = p.new_prompt(NUM_TOKENS)
    async with p.stream() as stream:
        key = await stream.reserve(p.reserve(prompt))
        assert (await stream.next(key)).reserved.num_tokens_local == 0
        reply = await p.run_prefill(prompt)
        handle = common_pb2.KvHandle()
        handle.CopyFrom(reply.handle)
        spoil(p, reply.handle)
        if is_signed:
            sign(p, reply.handle)
        answer = await stream.answer(key, reply)
    assert answer.token_ids == p.expected(prompt, 8)
    num_from_store = sum(count.num_tokens for count in answer.leg.from_store)
    leg = answer.leg
    assert leg.num_tokens_computed + leg.num_tokens_local + num_from_store == NUM_TOKENS
    if lapses:
        await p.check(leases=1)
        p.at_prefill.release_later(handle)
    await p.check()
    return answer


def corrupt(index: int) -> Spoil:
    return lambda p, handle: p.flip_bit(blocks_of(handle.runs[0])[index])


def corrupt_tail(p: Pair, handle: common_pb2.KvHandle) -> None:
    p.flip_bit(blocks_of(handle.tail)[0])


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
        run.store_incarnation = secrets.token_bytes(16)


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
    p: Pair, spoil: Spoil, reason: str, num_blocks: int
) -> None:
    before = p.at_decode.counts("baton_kv_recomputed_blocks")
    answer = await generate_spoiled(p, spoil)
    assert answer.recomputed == {reason: num_blocks}
    num_usable = (NUM_BLOCKS - num_blocks) * 4
    assert answer.leg.num_tokens_computed == NUM_TOKENS - num_usable
    before[reason] = before.get(reason, 0) + num_blocks
    assert p.at_decode.counts("baton_kv_recomputed_blocks") == before


async def test_blocks_that_changed_after_their_lease_lapsed_are_counted_as_that(p: Pair) -> None:
    def lapsed(p: Pair, handle: common_pb2.KvHandle) -> None:
        unknown_lease(p, handle)
        older(p, handle)

    answer = await generate_spoiled(p, lapsed, lapses=True)
    assert answer.recomputed == {"lease_lapsed": 4}


@pytest.mark.parametrize("spoil", [unknown_lease, no_lease])
async def test_without_a_lease_tokens_are_exact_whatever_the_store_says(
    p: Pair, spoil: Spoil
) -> None:
    """The blocks may still be there and verify; then they are used, else counted."""
    answer = await generate_spoiled(p, spoil, lapses=True)
    assert set(answer.recomputed) <= {"lease_lapsed", "transport", "missing"}


FORGED: list[Spoil] = [
    older,
    foreign_block,
    other_tenant,
    other_model,
    other_store,
    gap,
    shortened,
    no_lease,
    lambda p, handle: changed(handle, {"deadline_unix_ms": handle.deadline_unix_ms + 1}),
    lambda p, handle: changed(handle, {"nonce": bytes(16)}),
    lambda p, handle: changed(handle, {"is_partial": True}),
    lambda p, handle: changed(handle, {"signature": b""}),
    lambda p, handle: changed(handle, {"key_id": "another"}),
]


@pytest.mark.parametrize("spoil", FORGED)
async def test_what_was_changed_without_the_key_is_not_believed(p: Pair, spoil: Spoil) -> None:
    """Nothing of it is: not even the lease that it names is given back."""
    answer = await generate_spoiled(p, spoil, is_signed=False, lapses=True)
    assert answer.recomputed == {"signature": NUM_BLOCKS}
    assert answer.leg.num_tokens_computed == NUM_TOKENS


async def test_a_handle_is_good_for_one_use(p: Pair) -> None:
    """The second use computes the prompt; the first keeps what it has."""
    prompt = p.new_prompt(NUM_TOKENS)
    reply = await p.run_prefill(prompt)
    reasons = []
    for _ in range(2):
        answer = await p.decode_from(reply, prompt)
        assert answer.token_ids == p.expected(prompt, 8)
        reasons.append(set(answer.recomputed))
    assert reasons == [set(), {"replayed"}]


async def test_a_key_that_is_rotated_between_prefill_and_decode_still_verifies(p: Pair) -> None:
    used: list[str] = []

    def rotate(p: Pair, handle: common_pb2.KvHandle) -> None:
        used.append(handle.key_id)
        p.rotate_keys()

    answer = await generate_spoiled(p, rotate, is_signed=False)
    assert answer.recomputed == {}
    answer = await p.generate(p.new_prompt(NUM_TOKENS))
    assert answer.recomputed == {}
    assert answer.prefill is not None and answer.prefill.handle.key_id not in used


@pytest.mark.parametrize(
    ("spoil", "reason", "is_signed"),
    [
        (too_old, "deadline", True),  # its lease is over by then; this one's is not
        (other_store, "incarnation", True),  # another node answers at its address
        (other_tenant, "fingerprint", True),  # the lease that it names is not this request's
        # Not read, not even for its lease. How another version signs is not known here: it is no
        # forgery that is counted.
        (other_version, "version", True),
        (other_version, "version", False),
    ],
)
async def test_a_handle_that_is_not_used_keeps_its_lease_until_it_lapses(
    p: Pair, spoil: Spoil, reason: str, is_signed: bool
) -> None:
    answer = await generate_spoiled(p, spoil, is_signed=is_signed, lapses=True)
    assert answer.recomputed == {reason: NUM_BLOCKS}


async def test_no_handle_is_said_and_computed(p: Pair) -> None:
    prompt = p.new_prompt(NUM_TOKENS)
    first = p.expected(prompt, 1)
    async with p.reserved(prompt) as (stream, key):
        await stream.compute(key, first)
        answer = await stream.collect(key)
    assert [*first, *answer.token_ids] == p.expected(prompt, 8)
    assert answer.recomputed == {"missing": 8}
    assert answer.leg.num_tokens_computed == NUM_TOKENS


async def test_a_store_without_room_makes_the_handle_shorter(tmp_path: Path) -> None:
    """Four frames for eight blocks: the rest is computed again and said."""
    async with pair(tmp_path, num_frames=4) as p:
        prompt = prompt_of(NUM_TOKENS)
        answer = await p.generate(prompt)
        assert answer.token_ids == p.expected(prompt, 8)
        assert answer.prefill is not None
        num_stored = answer.prefill.handle.num_tokens // 4
        assert 0 < num_stored <= 4
        not_stored = {c.reason: c.num_blocks for c in answer.prefill.leg.not_stored}
        assert not_stored == {"no_room": NUM_BLOCKS - num_stored}
        assert answer.recomputed == {"missing": NUM_BLOCKS - num_stored}
        assert answer.leg.num_tokens_computed == NUM_TOKENS - 4 * num_stored
        await p.check()


async def test_a_corrupt_frame_at_prefill_is_computed_again_and_counted(tmp_path: Path) -> None:
    """Prefill takes the prefix from the store, finds one block wrong, and says so."""
    async with pair(tmp_path, prefill_blocks=64) as p:
        prompt = p.new_prompt(NUM_TOKENS)
        first = await p.run_prefill(prompt, name="first")
        await p.forget()
        p.flip_bit(blocks_of(first.handle.runs[0])[2])
        again = await p.run_prefill(prompt, name="again")
        assert list(again.token_ids) == p.expected(prompt, 1)
        assert {c.reason: c.num_blocks for c in again.leg.recomputed} == {"checksum": 5}
        assert [count.num_tokens for count in again.leg.from_store] == [8]
        assert again.leg.num_tokens_computed == NUM_TOKENS - 8
        # The store looked for itself and dropped it; the first handle's lease still pins its frame.
        p.at_prefill.release_later(first.handle, again.handle)
        await p.check()


async def test_a_restarted_store_is_another_one(tmp_path: Path) -> None:
    """Between prefill and decode the store dies and comes back empty: nothing of it is used."""
    async with pair(tmp_path) as p:
        prompt = prompt_of(NUM_TOKENS)
        async with p.reserved(prompt) as (stream, key):
            reply = await p.run_prefill(prompt)
            await p.kill_store()
            await p.start_store()
            await p.reattached()
            answer = await stream.answer(key, reply)
        assert answer.token_ids == p.expected(prompt, 8)
        assert answer.recomputed == {"incarnation": 8}
        await p.check()
