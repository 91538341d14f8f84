"""Handles on the wire: the blocks of a run, one by one, for tests that look at or forge them; and
partial ones, as a prefill worker makes them while it still runs, cut out of a final one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from kvstore.block_refs import Block, PackedBlocks
from process.deadline import Deadline
from protos import common_pb2
from services.worker import handle as handles
from tests.harness.prefill_decode_pair import LEASE_TTL_S, WAIT_S, Pair


def blocks_of(run: common_pb2.BlockRun) -> list[Block]:
    return list(PackedBlocks(run.blocks))


def set_blocks(run: common_pb2.BlockRun, blocks: Iterable[Block]) -> None:
    run.blocks = PackedBlocks.of(blocks).data


def forge(run: common_pb2.BlockRun, index: int, **changes: Any) -> None:
    """Set fields of one block to other values."""
    blocks = blocks_of(run)
    blocks[index] = dataclasses.replace(blocks[index], **changes)
    set_blocks(run, blocks)


def changed(message: Any, changes: dict[str, Any]) -> Any:
    """Fields of a message set to other values, by their names; of one in it as "sampling.seed"."""
    for path, value in changes.items():
        *parents, name = path.split(".")
        target = message
        for parent in parents:
            target = getattr(target, parent)
        if isinstance(value, list | tuple):
            target.ClearField(name)
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)
    return message


def partial(p: Pair, handle: common_pb2.KvHandle, num_blocks: int) -> common_pb2.KvHandle:
    """What was stored when prefill had stored so many full blocks; signed."""
    early = common_pb2.KvHandle()
    early.CopyFrom(handle)
    early.ClearField("tail")
    set_blocks(early.runs[0], blocks_of(early.runs[0])[:num_blocks])
    early.num_tokens = num_blocks * early.block_size
    early.is_partial = True
    early.nonce = handles.new_nonce()
    handles.sign(early, p.prefill.core.handle_keys)
    return early


def sign(p: Pair, handle: common_pb2.KvHandle) -> None:
    """As a prefill worker that has the key."""
    handles.sign(handle, p.prefill.core.handle_keys)


async def split(p: Pair, handle: common_pb2.KvHandle, at: int = 4) -> None:
    """The first `at` blocks lie in decode's own store, under a lease there; the handle says so."""
    client = p.decode.core.connector.client
    assert client is not None
    run = handle.runs[0]
    blocks = blocks_of(run)
    hashes = [block.chain_hash for block in blocks]
    matched = await client.match(hashes[:at], ttl_s=LEASE_TTL_S, deadline=Deadline.after(WAIT_S))
    assert len(matched.blocks) == at
    home, rest = common_pb2.BlockRun(), common_pb2.BlockRun()
    home.node_id, home.store_address = p.decode_store.node.node_id, client.address
    home.store_incarnation, home.lease_id = client.incarnation, matched.lease_id
    at_home = [
        dataclasses.replace(
            block, frame=ref.frame, generation=ref.generation, checksum=ref.checksum
        )
        for block, ref in zip(blocks[:at], matched.blocks, strict=True)
    ]
    set_blocks(home, at_home)
    rest.CopyFrom(run)
    rest.first_block = at
    set_blocks(rest, blocks[at:])
    del handle.runs[:]
    handle.runs.extend([home, rest])
