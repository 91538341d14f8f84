"""A prefix that lies at another node's store is fetched from there, verified, and copied home; what
does not come is computed and counted by reason. With real stores over the gRPC transport.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import Quarantine, TransferTimeout
from kvstore.transport.base import GetResult
from process.deadline import Deadline
from process.errors import InvalidArgument
from protos import common_pb2, prefill_pb2
from tests.harness.gated_engine import BLOCK_SIZE, prompt_of
from tests.harness.handles import blocks_of
from tests.harness.prefill_decode_pair import WAIT_S, PrefillCall, whole
from tests.harness.prefill_nodes import Node, Nodes, nodes, remote_client
from tests.harness.waiting import until

PROMPT = prompt_of(42, start=3)
NUM_FULL = 10


def tokens_by_node(reply: prefill_pb2.PrefillReply) -> dict[str, int]:
    counts = {count.node_id: count.num_tokens for count in reply.leg.from_store}
    return {node_id: num_tokens for node_id, num_tokens in counts.items() if num_tokens}


def recomputed(reply: prefill_pb2.PrefillReply) -> dict[str, int]:
    return {count.reason: count.num_blocks for count in reply.leg.recomputed}


def shape(handle: common_pb2.KvHandle) -> list[tuple[str, int, int]]:
    """(node, first block, number of blocks) of each run."""
    return [(run.node_id, run.first_block, len(blocks_of(run))) for run in handle.runs]


async def fill(n: Nodes, node: Node, num_tokens: int = len(PROMPT)) -> prefill_pb2.PrefillReply:
    """Have `node` compute and store so much of the prompt, and keep none of it on its device."""
    reply = await n.run(node, PROMPT[:num_tokens], name="fill", wants_handle=False)
    await n.forget(node)
    return reply


async def test_the_second_node_s_hit_comes_from_the_first_node_s_store(tmp_path: Path) -> None:
    async with nodes(tmp_path) as n:
        await fill(n, n[0])
        reply = await n.run(n[1], PROMPT, [n[0].hint(0, NUM_FULL)])
        assert tokens_by_node(reply) == {"store-0": NUM_FULL * BLOCK_SIZE}
        assert reply.leg.num_bytes_read == NUM_FULL * n[1].core.layout.block_bytes
        assert reply.leg.num_tokens_computed == 2
        assert recomputed(reply) == {}
        # A copy lies at home now, and that is what is handed over.
        assert shape(reply.handle) == [("store-1", 0, NUM_FULL)]
        assert reply.handle.tail.node_id == "store-1"
        assert n[1].holds(n.hashes(n[1], PROMPT)) == NUM_FULL
        await n.release(reply.handle)
        await n.check()
        await n.forget(n[1])
        await n[0].kill_store()
        again = await n.run(n[1], PROMPT, name="again", wants_handle=False)
        assert tokens_by_node(again) == {"store-1": NUM_FULL * BLOCK_SIZE}
        await n.check()


async def test_device_then_home_then_the_other_node(tmp_path: Path) -> None:
    """Each gives what the ones before it have not, and no byte is moved twice."""
    async with nodes(tmp_path) as n:
        await fill(n, n[0])
        await fill(n, n[1], 6 * BLOCK_SIZE)
        await n.run(n[1], PROMPT[:13], name="short", wants_handle=False)  # three blocks on device
        hints = [n[1].hint(0, 6), n[0].hint(6, NUM_FULL - 6)]
        reply = await n.run(n[1], PROMPT, hints)
        assert reply.leg.num_tokens_local == 3 * BLOCK_SIZE
        assert tokens_by_node(reply) == {"store-1": 3 * BLOCK_SIZE, "store-0": 4 * BLOCK_SIZE}
        block_bytes = n[1].core.layout.block_bytes
        assert reply.leg.num_bytes_read == 7 * block_bytes
        assert reply.leg.transport == "grpc, shm"
        by_node = {count.node_id: count.transport for count in reply.leg.from_store}
        assert by_node == {"store-1": "shm", "store-0": "grpc"}
        moved = {each.transport: each for each in reply.leg.transports}
        assert moved["shm"].num_bytes_read == 3 * block_bytes
        assert moved["grpc"].num_bytes_read == 4 * block_bytes
        assert moved["shm"].num_bytes_written == reply.leg.num_bytes_written > 0
        assert moved["grpc"].num_bytes_written == 0
        assert shape(reply.handle) == [("store-1", 0, NUM_FULL)]
        await n.release(reply.handle)
        await n.check()


async def test_a_prefix_over_three_nodes(tmp_path: Path) -> None:
    async with nodes(tmp_path, num_nodes=3) as n:
        await fill(n, n[1], 6 * BLOCK_SIZE)
        await fill(n, n[2])
        await fill(n, n[0], 3 * BLOCK_SIZE)
        hints = [n[0].hint(0, 3), n[1].hint(3, 3), n[2].hint(6, 4)]
        reply = await n.run(n[0], PROMPT, hints)
        tokens = {"store-0": 3, "store-1": 3, "store-2": 4}
        assert tokens_by_node(reply) == {name: 4 * count for name, count in tokens.items()}
        assert n[0].holds(n.hashes(n[0], PROMPT)) == NUM_FULL
        await n.release(reply.handle)
        await n.check()


async def test_a_cold_prefix_stays_where_it_is_and_the_handle_has_two_runs(tmp_path: Path) -> None:
    """Without a copy the blocks behind it go to the store that has their parents."""
    async with nodes(tmp_path, replicate_after_hits=2) as n:
        longer = PROMPT + prompt_of(20, start=8)
        num_longer = len(longer) // BLOCK_SIZE
        await fill(n, n[0])
        await fill(n, n[1], 4 * BLOCK_SIZE)
        hashes = n.hashes(n[1], longer)
        hints = [n[1].hint(0, 4), n[0].hint(4, NUM_FULL - 4)]
        for number in range(4):
            reply = await n.run(n[1], longer, hints, name=f"r{number}")
            # The first one stores the rest there; its last block is hot when it was matched twice.
            is_copied = number == 3
            if is_copied:
                assert shape(reply.handle) == [("store-1", 0, num_longer)]
            else:
                assert shape(reply.handle) == [("store-1", 0, 4), ("store-0", 4, num_longer - 4)]
                assert reply.handle.tail.node_id == "store-0"
                assert len({run.lease_id for run in reply.handle.runs}) == 2
            assert reply.handle.num_tokens == len(longer)
            assert n[0].holds(hashes) == num_longer
            assert n[1].holds(hashes) == (num_longer if is_copied else 4)
            await n.release(reply.handle)
            await n.check()
            await n.forget(n[1])


async def test_home_is_away_and_the_other_node_takes_what_comes(tmp_path: Path) -> None:
    async with nodes(tmp_path) as n:
        await fill(n, n[0], 6 * BLOCK_SIZE)
        await n[1].kill_store()
        await until(lambda: n[1].core.connector.client is None)
        reply = await n.run(n[1], PROMPT, [n[0].hint(0, 6)])
        assert tokens_by_node(reply) == {"store-0": 24}
        assert recomputed(reply) == {"store_unavailable": 4}
        assert shape(reply.handle) == [("store-0", 0, NUM_FULL)]
        assert n[0].holds(n.hashes(n[0], PROMPT)) == NUM_FULL
        await n.release(reply.handle)
        await n.check()


async def test_a_worker_that_pulls_from_nobody(tmp_path: Path) -> None:
    """By its settings: nothing was lost."""
    async with nodes(tmp_path, remote_transport="") as n:
        await fill(n, n[0])
        reply = await n.run(n[1], PROMPT, [n[0].hint(0, NUM_FULL)], wants_handle=False)
        assert (tokens_by_node(reply), recomputed(reply)) == ({}, {})
        await n.check()


async def test_the_tenant_is_told_to_the_store(tmp_path: Path) -> None:
    async with nodes(tmp_path) as n:
        client = n[0].core.connector.client
        assert client is not None
        put, tenants = client.put_blocks, set()

        async def watched(*arguments: object, **options: object) -> object:
            tenants.add(options["tenant"])
            return await put(*arguments, **options)  # type: ignore[arg-type]

        client.put_blocks = watched  # type: ignore[assignment, method-assign]
        await n.run(n[0], PROMPT, wants_handle=False, tenant="blue")
        assert tenants == {"blue"}


# ---- what goes wrong

Spoil = Callable[[Nodes, prefill_pb2.PrefillReply, common_pb2.PrefixRun], None]


def flip(index: int) -> Spoil:
    return lambda n, filled, hint: n[0].flip_bit(blocks_of(filled.handle.runs[0])[index])


def other_life(n: Nodes, filled: prefill_pb2.PrefillReply, hint: common_pb2.PrefixRun) -> None:
    hint.store_incarnation = bytes(16)


def other_node(n: Nodes, filled: prefill_pb2.PrefillReply, hint: common_pb2.PrefixRun) -> None:
    hint.node_id = "store-7"


def nobody(n: Nodes, filled: prefill_pb2.PrefillReply, hint: common_pb2.PrefixRun) -> None:
    hint.store_address = "127.0.0.1:1"


def too_long(n: Nodes, filled: prefill_pb2.PrefillReply, hint: common_pb2.PrefixRun) -> None:
    hint.num_blocks = 100  # more than there is


@pytest.mark.parametrize(
    ("spoil", "num_tokens", "num_loaded", "reasons"),
    [
        (flip(0), 42, 0, {"checksum": 10}),
        (flip(4), 42, 4, {"checksum": 6}),
        (flip(9), 42, 9, {"checksum": 1}),
        (other_life, 42, 0, {"incarnation": 10}),
        (other_node, 42, 0, {"incarnation": 10}),
        (nobody, 42, 0, {"store_unavailable": 10}),
        (too_long, 27, 6, {"missing": 4}),
    ],
)
async def test_what_cannot_be_used_is_computed_and_counted(
    tmp_path: Path, spoil: Spoil, num_tokens: int, num_loaded: int, reasons: dict[str, int]
) -> None:
    async with nodes(tmp_path) as n:
        filled = await n.run(n[0], PROMPT[:num_tokens], name="fill")
        await n.release(filled.handle)
        hint = n[0].hint(0, NUM_FULL)
        spoil(n, filled, hint)
        reply = await n.run(n[1], PROMPT, [hint])
        assert sum(tokens_by_node(reply).values()) == num_loaded * BLOCK_SIZE
        assert recomputed(reply) == reasons
        assert n[1].holds(n.hashes(n[1], PROMPT)) == NUM_FULL
        assert shape(reply.handle) == [("store-1", 0, NUM_FULL)]
        await n.release(reply.handle)
        await n.check()


async def test_a_lease_at_home_outlives_a_slow_pull(tmp_path: Path) -> None:
    """What home had stays pinned while another node takes longer than a lease lives."""
    async with nodes(tmp_path, lease_ttl_s=(ttl_s := 4.0)) as n:
        await fill(n, n[0])
        await fill(n, n[1], 4 * BLOCK_SIZE)
        client, home = await remote_client(n[1], n[0]), n[1].core.connector.client
        assert home is not None
        renew, match, renewed_s = home.renew, client.match, 0.0

        async def noted(*arguments: Any, **options: Any) -> None:
            nonlocal renewed_s
            await renew(*arguments, **options)
            renewed_s = time.monotonic()

        async def slow(*arguments: Any, **options: Any) -> Any:
            lapses_s = time.monotonic() + ttl_s
            await until(lambda: renewed_s > lapses_s)  # it would have lapsed
            return await match(*arguments, **options)

        home.renew = noted  # type: ignore[method-assign]
        client.match = slow  # type: ignore[method-assign]
        reply = await n.run(n[1], PROMPT, [n[1].hint(0, 4), n[0].hint(4, 6)])
        assert tokens_by_node(reply) == {"store-1": 16, "store-0": 24}
        assert not reply.leg.not_stored
        assert shape(reply.handle) == [("store-1", 0, NUM_FULL)]
        await n.release(reply.handle)
        await n.check()


async def test_home_dies_during_the_pull_and_the_other_node_takes_what_comes(
    tmp_path: Path,
) -> None:
    async with nodes(tmp_path) as n:
        await fill(n, n[0], 6 * BLOCK_SIZE)
        home, client = n[1].core.connector.client, await remote_client(n[1], n[0])
        assert home is not None
        match = client.match

        async def meanwhile(*arguments: Any, **options: Any) -> Any:
            await n[1].kill_store()
            await until(lambda: home.broken is not None)
            return await match(*arguments, **options)

        client.match = meanwhile  # type: ignore[method-assign]
        reply = await n.run(n[1], PROMPT, [n[0].hint(0, 6)])
        assert tokens_by_node(reply) == {"store-0": 24}
        assert shape(reply.handle) == [("store-0", 0, NUM_FULL)]
        await n.release(reply.handle)
        await n.check()


async def test_what_came_before_the_time_ran_out_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of three blocks, of which the third is not over in time."""
    async with nodes(tmp_path) as n:
        monkeypatch.setattr(
            "services.prefill.prefix_fetch.BATCH_BYTES", 3 * n[0].core.layout.block_bytes
        )
        await fill(n, n[0])
        client = await remote_client(n[1], n[0])
        get, batches = client.get_blocks, []

        async def slow(lease_id: str, items: list[Any], deadline: Deadline, **options: Any) -> Any:
            batches.append(len(items))
            if len(batches) == 3:
                return GetResult(0, dict.fromkeys(range(len(items)), "deadline"))
            return await get(lease_id, items, deadline, **options)

        client.get_blocks = slow  # type: ignore[method-assign]
        reply = await n.run(n[1], PROMPT, [n[0].hint(0, NUM_FULL)])
        assert batches == [3, 3, 3]
        assert tokens_by_node(reply) == {"store-0": 6 * BLOCK_SIZE}
        assert recomputed(reply) == {"deadline": 4}
        assert n[1].holds(n.hashes(n[1], PROMPT)) == NUM_FULL
        await n.release(reply.handle)
        await n.check()


async def test_a_bad_block_at_home_comes_from_the_other_node(tmp_path: Path) -> None:
    async with nodes(tmp_path) as n:
        await fill(n, n[0])
        filled = await n.run(n[1], PROMPT, name="fill")
        await n.release(filled.handle)
        await n.forget(n[1])
        n[1].flip_bit(blocks_of(filled.handle.runs[0])[5])
        hints = [n[1].hint(0, NUM_FULL), n[0].hint(NUM_FULL, 1)]
        reply = await n.run(n[1], PROMPT, hints, wants_handle=False)
        assert tokens_by_node(reply) == {"store-1": 20, "store-0": 20}
        assert recomputed(reply) == {}
        await n.check()


async def test_after_a_transfer_that_ran_out_of_time_nobody_else_writes_there(
    tmp_path: Path,
) -> None:
    """Its blocks may still be written into; a second store's bytes must not go there."""
    # The client of the late store is dropped: what it may have pinned there lapses.
    async with nodes(tmp_path, num_nodes=3, lease_ttl_s=2.0) as n:
        for node in (n[0], n[2]):
            await fill(n, node)
        slow = await remote_client(n[1], n[0])
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        taken: list[int] = []

        async def late(lease_id: str, items: object, deadline: object, **options: object) -> object:
            assert isinstance(items, list)
            taken.extend(block_id for _, block_id in items)
            raise TransferTimeout("late", Quarantine(tuple(taken), settled))

        slow.get_blocks = late  # type: ignore[assignment, method-assign]
        other = await remote_client(n[1], n[2])
        asked: list[str] = []
        other.match = lambda *arguments, **options: asked.append("match")  # type: ignore[assignment, method-assign]
        hints = [n[0].hint(0, 5), n[2].hint(5, 5)]
        reply = await n.run(n[1], PROMPT, hints)
        assert recomputed(reply) == {"deadline": 10}
        assert not asked
        stats = n[1].core.thread.stats
        assert stats.num_quarantined_blocks == len(taken) == NUM_FULL
        settled.set_result(None)
        await until(lambda: n[1].core.thread.stats.num_quarantined_blocks == 0)
        await n.release(reply.handle)
        await n.check()


@pytest.mark.parametrize(
    "change",
    [
        lambda hints: hints[1].__setattr__("first_block", 7),
        lambda hints: hints[0].__setattr__("first_block", 1),
        lambda hints: hints[1].__setattr__("num_blocks", 0),
        lambda hints: hints[0].__setattr__("store_incarnation", b"short"),
        lambda hints: hints[0].__setattr__("store_address", ""),
    ],
)
async def test_hints_that_no_router_makes_are_refused_by_name(
    tmp_path: Path, change: Callable[[list[common_pb2.PrefixRun]], None]
) -> None:
    async with nodes(tmp_path) as n:
        hints = [n[1].hint(0, 6), n[0].hint(6, 4)]
        change(hints)
        with pytest.raises(InvalidArgument) as caught:
            await whole(PrefillCall(n[1].stub, n.request(PROMPT, hints), timeout_s=WAIT_S))
        assert caught.value.field == "hints"


async def test_any_prefix_anywhere_gives_the_same_answer(
    tmp_path: Path, seed: int, scale: Callable[[int], int]
) -> None:
    """Random prompts with random parts at random nodes, hints that are right, short or too long,
    stores that forget: the token is right, the accounts add up, no store has a gap, nothing
    stays pinned.
    """
    rng = random.Random(seed)
    async with nodes(tmp_path, num_nodes=3, replicate_after_hits=1, num_frames=96) as n:
        for number in range(scale(400)):
            prompt = prompt_of(rng.randint(5, 90), start=100 + number)
            hashes = n.hashes(n[0], prompt)
            for node in rng.sample(n.all, rng.randint(0, 2)):
                part = prompt[: rng.randint(1, len(prompt))]
                await n.run(node, part, name=f"fill{number}", wants_handle=False)
            where = rng.choice(n.all)
            hints, end = [], 0
            for node in sorted(n.all, key=lambda node: node is not where):
                claimed = node.holds(hashes) + rng.choice([-1, 0, 0, 0, 2])
                if claimed > end:
                    hints.append(node.hint(end, claimed - end))
                    end = claimed
            if rng.random() < 0.2:
                await n.forget(where)
                await where.core.connector.settle()  # what is still pinned takes room
            partials: list[common_pb2.KvHandle] = []
            reply = await n.run(where, prompt, hints, name=f"r{number}", partials=partials)
            for node in n.all:
                node.holds(hashes)
            assert reply.handle.num_tokens == len(prompt), reply.leg
            await n.release(reply.handle)
        await n.check()
